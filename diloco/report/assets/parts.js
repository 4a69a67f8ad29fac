"use strict";
// What every page about a run is made of: texts, tables and plots. Texts of peers become text, never HTML.
const Parts = (() => {
  const drawn = new Set(); // what is drawn again when colours or sizes change

  function make(tag, attributes = {}, ...inside) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name === "style") Object.assign(element.style, value);
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...inside.filter((each) => each !== null && each !== undefined));
    return element;
  }

  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  // the plotting library reads some HTML in texts, such as links: what peers say must not become any
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const CURVES = [1, 2, 3, 4, 5, 6];
  const MOST_POINTS = 500;

  // numbers for people, as diloco/units.py has them

  function scaled(number, units, space = " ") {
    for (const [unit, scale] of units) {
      if (Number(number.toPrecision(3)) >= scale) {
        const value = number / scale;
        return `${value >= 1000 ? value.toFixed(0) : Number(value.toPrecision(3))}${unit ? space + unit : ""}`;
      }
    }
    return `${Number(number.toPrecision(3))}${space}${units[units.length - 1][0]}`.trimEnd();
  }
  const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const COUNTS = [["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];
  const RATES = [["gbit/s", 1e9], ["mbit/s", 1e6], ["kbit/s", 1e3], ["bit/s", 1]];
  const size = (bytes) => scaled(bytes, SIZES);
  const count = (number) => scaled(number, COUNTS, "");
  const rate = (bits) => scaled(bits, RATES);
  const loss = (value) => (value === null || value === undefined ? "" : value.toFixed(4));
  const percent = (share) => `${Math.round(100 * share)} %`;
  function duration(seconds) {
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    if (Math.round(seconds) < 60) return `${seconds.toFixed(0)} s`;
    const minutes = Math.floor(Math.round(seconds) / 60);
    if (minutes < 60) return `${minutes}:${String(Math.round(seconds) % 60).padStart(2, "0")} min`;
    return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
  }
  const moment = (time) => new Date(1000 * time).toLocaleTimeString([], {hour12: false});
  const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  // axes: each has values, and a unit that fits the largest of them

  function unitFor(kind, largest) {
    const pick = (units) => units.find(([, scale]) => largest >= scale) || units[units.length - 1];
    if (kind === "tokens") return pick([["billion tokens", 1e9], ["million tokens", 1e6], ["thousand tokens", 1e3], ["tokens", 1]]);
    if (kind === "bytes") return pick([["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]]);
    if (kind === "seconds") return pick([["hours", 7200], ["minutes", 180], ["seconds", 1]]).slice(0, 1).flatMap((name) =>
      [name, {hours: 3600, minutes: 60, seconds: 1}[name]]);
    if (kind === "rate") return pick([["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3], ["bit/s", 1]]);
    return ["inner steps", 1];
  }
  const largestOf = (lists) => lists.reduce((most, list) => list.reduce((at, value) => (value > at ? value : at), most), 0);
  const on = (values, scale) => (scale === 1 ? values : values.map((value) => (value === null ? null : value / scale)));

  function layout(extra) {
    const axis = {gridcolor: color("grid"), zeroline: false, linecolor: color("line"), ticks: "", automargin: false,
      tickfont: {color: color("soft"), size: 12}, title: {font: {color: color("soft"), size: 12.5}, standoff: 8}};
    const {xaxis = {}, yaxis = {}, ...rest} = extra;
    const joined = (own) => ({...axis, ...own, title: {...axis.title, ...(own.title || {})}});
    return {
      font: {family: 'system-ui, -apple-system, "Segoe UI", sans-serif', color: color("ink"), size: 13},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 58, r: 14, t: 30, b: 46},
      hovermode: "x unified", hoverlabel: {bgcolor: color("panel"), bordercolor: color("line"), font: {color: color("ink"), size: 12.5}},
      legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: {color: color("soft")}}, showlegend: true,
      uirevision: "kept", xaxis: joined(xaxis), yaxis: joined(yaxis), ...rest,
    };
  }
  const CONFIG = {displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false};

  function plot(figure, label) {
    let place = figure.querySelector(".plot");
    if (!place) {
      place = make("div", {class: "plot", role: "img", "aria-label": label});
      figure.append(place);
    }
    return place;
  }

  function choice(names, chosen, changed) {
    const group = make("span", {class: "choice", role: "group"});
    for (const [name, text] of Object.entries(names)) {
      group.append(make("button", {type: "button", "data-choice": name, "aria-pressed": String(name === chosen), onclick: () => {
        for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.choice === name));
        changed(name);
      }}, text));
    }
    return group;
  }

  // curves: [{name, kind, step, tokens, seconds, bytes, loss}]

  const AXES = {step: "steps", tokens: "tokens", seconds: "time", bytes: "bytes"};

  function smooth(values) {
    const weight = 2 / (1 + Math.max(1, values.length / 60));
    let mean = null;
    return values.map((value) => {
      if (value !== null) mean = mean === null ? value : mean + weight * (value - mean);
      return value === null ? null : mean;
    });
  }

  // what a drawing cannot show anyway costs time: of very many points every second, third, … is drawn, and the last
  function drawable(values) {
    const stride = Math.ceil(values.length / MOST_POINTS);
    return stride < 2 ? values : values.filter((_, at) => at % stride === 0 || at === values.length - 1);
  }

  function curveTraces(curves, kind) {
    const [unit, scale] = unitFor(kind, largestOf(curves.map((curve) => curve[kind])));
    const names = new Set(curves.map((curve) => curve.name));
    const traces = [];
    curves.forEach((curve) => {
      const number = names.size > 1 ? [...names].indexOf(curve.name) : curve.kind === "validation" ? 1 : 0;
      const line = {color: color(`curve-${CURVES[number % CURVES.length]}`), width: 2};
      const name = names.size > 1 ? plain(curve.name) : curve.kind === "validation" ? "validation" : "training";
      const x = drawable(on(curve[kind], scale)), many = curve.loss.length > 150 && curve.kind === "training";
      const shown = {x, type: "scatter", name, hovertemplate: "%{y:.4f}"};
      if (many) traces.push({...shown, y: drawable(curve.loss), mode: "lines", line: {...line, width: 1}, opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: undefined});
      const few = curve.loss.length < 60;
      traces.push({...shown, y: drawable(many ? smooth(curve.loss) : curve.loss), mode: few ? "lines+markers" : "lines", line, marker: {size: 5}, connectgaps: true});
    });
    return [traces, unit];
  }

  function losses(figure, curves) {
    const known = (kind) => curves.some((curve) => curve[kind].some((value) => value !== null && value !== undefined));
    if (!curves.some((curve) => curve.loss.length)) return nothing(figure, "No loss is known yet: the first comes with the first round.");
    clear(figure);
    figure.kindShown = figure.kindShown && known(figure.kindShown) ? figure.kindShown : "step";
    let bar = figure.querySelector(".bar-row");
    const kinds = Object.fromEntries(Object.entries(AXES).filter(([kind]) => known(kind)));
    const signature = Object.keys(kinds).join();
    if (!bar || bar.dataset.kinds !== signature) {
      if (bar) bar.remove();
      bar = make("div", {class: "bar-row", "data-kinds": signature}, choice(kinds, figure.kindShown, (kind) => { figure.kindShown = kind; figure.draw(); }));
      figure.prepend(bar);
    }
    figure.draw = () => {
      const [traces, unit] = curveTraces(figure.curves, figure.kindShown);
      Plotly.react(plot(figure, "Loss"), traces, layout({uirevision: figure.kindShown,
        xaxis: {title: {text: unit}, hoverformat: ".4~g"}, yaxis: {title: {text: "loss"}}}), CONFIG);
    };
    figure.curves = curves;
    figure.draw();
    drawn.add(figure);
  }

  // links: [{name, seconds, up, down, limits: [[from, up, down]], end_s}] in bits per second

  function links(figure, uses, chosen) {
    const shown = uses.filter((use) => use.seconds.length);
    if (!shown.length) return nothing(figure, "Nothing has passed a link yet.");
    clear(figure);
    figure.uses = shown;
    figure.linkShown = shown.some((use) => use.name === figure.linkShown) ? figure.linkShown : chosen || shown[0].name;
    const signature = shown.map((use) => use.name).join("\n");
    let bar = figure.querySelector(".bar-row");
    if (shown.length > 1 && (!bar || bar.signature !== signature)) {
      if (bar) bar.remove();
      bar = make("div", {class: "bar-row"}, choice(Object.fromEntries(shown.map((use) => [use.name, use.name])), figure.linkShown,
        (name) => { figure.linkShown = name; figure.draw(); }));
      bar.signature = signature;
      figure.prepend(bar);
    }
    figure.draw = () => {
      const use = figure.uses.find((each) => each.name === figure.linkShown) || figure.uses[0];
      const [unit, scale] = unitFor("rate", Math.max(largestOf([use.up, use.down, ...use.limits.map((limit) => limit.slice(1))]), 1));
      const [xUnit, xScale] = unitFor("seconds", largestOf([use.seconds]));
      const trace = (name, y, number, extra = {}) => ({x: drawable(on(use.seconds, xScale)), y: drawable(on(y, scale)), name, type: "scatter", mode: "lines",
        hovertemplate: `%{y:.3~g} ${unit}`, line: {color: color(`curve-${number}`), width: 1.8}, ...extra});
      const traces = [trace(use.upName || "up", use.up, 1)];
      if (use.down.length) traces.push(trace("down", use.down, 2));
      [[1, "up"], [2, "down"]].forEach(([column, name]) => {
        if (!use.limits.length || !use.limits.some((limit) => limit[column] > 0 && limit[column] < Infinity)) return;
        const at = [...use.limits.map((limit) => limit[0]), use.end_s], values = use.limits.map((limit) => limit[column]);
        traces.push({x: on(at, xScale), y: on([...values, values[values.length - 1]], scale), name: `${name}: the link's rate`, type: "scatter",
          mode: "lines", line: {shape: "hv", dash: "dot", color: color(`curve-${column}`), width: 1.6}, hovertemplate: `%{y:.3~g} ${unit}`});
      });
      Plotly.react(plot(figure, "Links"), traces, layout({uirevision: use.name, xaxis: {title: {text: xUnit}, hoverformat: ".4~g"},
        yaxis: {title: {text: unit}, rangemode: "tozero"}}), CONFIG);
    };
    figure.draw();
    drawn.add(figure);
  }

  // bars: [{name, share, computed}]

  function bars(figure, shares) {
    if (!shares.length) return nothing(figure, "Not known yet.");
    const rows = shares.map((bar) => make("div", {class: "share"}, make("span", {class: "share-name"}, bar.name),
      make("span", {class: "share-bar"}, make("i", {class: bar.computed ? "computed" : "", style: {width: `${Math.min(100, 100 * bar.share)}%`}})),
      make("b", {}, percent(bar.share))));
    figure.replaceChildren(make("div", {class: "shares", role: "img", "aria-label": "Utilisation"}, ...rows));
  }

  function nothing(figure, text) {
    if (figure.querySelector(".empty")) return;
    figure.replaceChildren(make("p", {class: "empty"}, text));
  }
  function clear(figure) {
    const empty = figure.querySelector(".empty");
    if (empty) empty.remove();
  }

  // colours change at once, the drawings one after the other: no input waits for all of them
  function drawAgain() {
    [...drawn].filter((figure) => figure.isConnected).forEach((figure, at) => setTimeout(() => figure.draw(), 20 * at));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);

  function themeButton() {
    return make("button", {type: "button", title: "Light or dark", "aria-label": "Light or dark", onclick: () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      drawAgain();
    }}, "◐");
  }

  return {make, setText, plain, color, size, count, rate, loss, percent, duration, moment, counted, choice, losses, links, bars, nothing,
    clear, drawn, drawAgain, themeButton};
})();
