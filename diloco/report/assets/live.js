"use strict";
// The dashboard: what the server streams goes into the page. A connection that breaks is taken up where it was.
addEventListener("DOMContentLoaded", () => {
  const page = new RunPage(document), {setText, duration} = Parts;
  let told = 0, ended = false;
  window.dilocoPage = page;

  function connection(kind, text) {
    page.linkState.className = `link-state ${kind}`;
    setText(page.linkState, text);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden && told) page.show(); });

  connection("", "connecting");
  const source = new EventSource("events");
  source.addEventListener("view", (event) => {
    told = Date.now();
    page.apply(JSON.parse(event.data));
    connection("on", "live");
  });
  source.addEventListener("over", (event) => {
    ended = true;
    connection("off", JSON.parse(event.data));
    source.close();
  });
  source.addEventListener("problem", (event) => connection("off", JSON.parse(event.data)));
  source.addEventListener("error", () => { if (!ended) connection("off", "connection lost, trying again"); });
  setInterval(() => {
    const quiet = (Date.now() - told) / 1000;
    if (told && !ended && quiet > 6) connection("off", `nothing heard for ${duration(quiet)}`);
  }, 1000);
});
