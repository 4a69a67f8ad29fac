"use strict";
// A page in a file: its data are in it. `run` is a view of a real run, `drawings` are what figures show, by their place.
(() => {
  document.body.classList.add("still");
  const data = JSON.parse(document.getElementById("data").textContent);
  const kinds = {losses: Parts.losses, links: Parts.links, utilisation: Parts.bars, timeline: Timeline.show};
  if (data.run) {
    const page = new RunPage(document);
    page.apply(data.run);
    page.linkState.textContent = data.made;
  } else {
    const title = document.querySelector(".title");
    if (title) title.append(Parts.make("span", {class: "spring"}), Parts.themeButton());
  }
  for (const figure of document.querySelectorAll("figure[data-at]")) kinds[figure.dataset.kind](figure, data.drawings[Number(figure.dataset.at)]);
})();
