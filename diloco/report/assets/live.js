"use strict";
// The dashboard: what the server streams goes into the page. A connection that breaks is taken up where it was.
addEventListener("DOMContentLoaded", () => {
  const page = new RunPage(document), {setText, duration} = Parts;
  const AGAIN_MS = 3000; // a browser does not connect again by itself where it was refused
  let heard = 0, shown = false;
  window.dilocoPage = page;

  function connection(kind, text) {
    page.linkState.className = `link-state ${kind}`;
    setText(page.linkState, text);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden && shown) page.show(); });

  function connect() {
    const source = new EventSource("events");
    source.addEventListener("view", (event) => {
      heard = Date.now();
      shown = true;
      page.apply(JSON.parse(event.data));
      connection("on", "live");
    });
    source.addEventListener("problem", (event) => {
      heard = Date.now();
      connection("off", JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      const refused = source.readyState === EventSource.CLOSED;
      connection("off", refused ? "connection refused, trying again" : "connection lost, trying again");
      if (refused) setTimeout(connect, AGAIN_MS);
    });
  }

  connection("", "connecting");
  connect();
  setInterval(() => {
    const quiet = (Date.now() - heard) / 1000;
    if (heard && quiet > 6) connection("off", `nothing heard for ${duration(quiet)}`);
  }, 1000);
});
