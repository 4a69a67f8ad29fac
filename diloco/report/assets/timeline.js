"use strict";
// What islands did over time, drawn on a canvas: a row each, the rounds with their phases above them, faults as marks.
const Timeline = (() => {
  const {make, color, duration, moment} = Parts;
  const COLORS = {training: "training", computing: "training", waiting: "waiting", sending: "sending", joining: "joining", starting: "joining",
    "catching up": "joining", stopped: "stopped", silent: "stopped", excluded: "stopped", dead: "lost", lost: "lost", ended: "left", left: "left",
    leaving: "left", evicted: "lost", absent: "absent", witnessing: "witness"};
  const WORDS = {computing: "training", absent: "not in the round", dead: "dead", exchange: "exchange"};
  const FONT = '12px system-ui, -apple-system, "Segoe UI", sans-serif';
  const PHASES = 16, AXIS = 24, LANE = 15, LANES = 3, PAD = 8;

  // data: {rows: [{name, spans: [[begin, end, state]], sending}], phases: [[begin, exchange, end, round]], marks: [{at, until, row, what, text, line}],
  //        zero: Unix time of second 0 or null}
  function show(figure, data) {
    const span = extent(data);
    if (!data.rows.length || !(span[1] > span[0])) return Parts.nothing(figure, "Nothing has happened yet.");
    Parts.clear(figure);
    if (!figure.timeline) figure.timeline = new Drawing(figure);
    figure.timeline.take(data, span);
    figure.draw = () => figure.timeline.draw();
    Parts.drawn.add(figure);
    return figure.timeline;
  }

  function extent(data) {
    let first = Infinity, last = -Infinity;
    const see = (begin, end) => { if (begin < first) first = begin; if (end > last) last = end; };
    for (const row of data.rows) if (row.spans.length) see(row.spans[0][0], row.spans[row.spans.length - 1][1]);
    for (const phase of data.phases) see(phase[0], phase[2]);
    return [first, last];
  }

  class Drawing {
    constructor(figure) {
      this.figure = figure;
      this.zoom = null; // [begin, end], or null: all of it
      this.recent = null; // or the last seconds, which move on
      this.bar = make("div", {class: "bar-row"});
      this.legend = make("div", {class: "legend"});
      this.canvas = make("canvas", {role: "img", "aria-label": "Timeline"});
      this.tip = make("div", {class: "tip", hidden: ""});
      figure.append(this.bar, this.canvas, this.tip, this.legend);
      this.legend.style.marginTop = "10px";
      new ResizeObserver(() => this.draw()).observe(figure);
      this.listen();
    }

    take(data, span) {
      this.data = data;
      this.span = span;
      this.choices();
      this.legendFor();
      this.draw();
    }

    choices() {
      const length = this.span[1] - this.span[0];
      const spans = {all: "all"};
      for (const [seconds, text] of [[21600, "6 hours"], [3600, "hour"], [600, "10 min"], [60, "minute"]]) if (length > 1.5 * seconds) spans[`s${seconds}`] = `last ${text}`;
      const signature = Object.keys(spans).join();
      if (this.bar.dataset.signature === signature) return;
      this.bar.dataset.signature = signature;
      this.group = Parts.choice(spans, this.recent === null ? "all" : `s${this.recent}`, (name) => {
        this.zoom = null;
        this.recent = name === "all" ? null : Number(name.slice(1));
        this.draw();
      });
      this.bar.replaceChildren(...(Object.keys(spans).length > 1 ? [this.group] : []));
    }

    legendFor() {
      const states = new Set(this.data.rows.flatMap((row) => row.spans.map((span) => span[2])));
      const entries = [...states].map((state) => [WORDS[state] || state, COLORS[state] || "left"]);
      if (this.data.phases.length) entries.push(["collecting", "collect"], ["exchanging", "exchange"]);
      if (this.data.rows.some((row) => (row.sending || []).length)) entries.push(["sending (below)", "sending"]);
      const seen = new Set(entries.map(([word]) => word));
      const signature = [...seen].join();
      if (this.legend.dataset.signature === signature) return;
      this.legend.dataset.signature = signature;
      this.legend.replaceChildren(...entries.filter(([word]) => seen.delete(word)).map(([word, name]) =>
        make("span", {}, make("i", {style: {background: `var(--${name})`}}), word)));
    }

    range() {
      if (this.zoom) return this.zoom;
      if (this.recent !== null) return [Math.max(this.span[0], this.span[1] - this.recent), this.span[1]];
      return this.span;
    }

    sizes() {
      const rows = this.data.rows.length, width = this.figure.clientWidth;
      const row = rows > 40 ? 13 : rows > 16 ? 17 : 24;
      const lines = this.data.marks.some((mark) => mark.line) ? LANE * LANES : 0;
      const top = lines + (this.data.phases.length ? PHASES + 10 : 4);
      const context = this.canvas.getContext("2d");
      context.font = FONT;
      const widest = this.data.rows.reduce((most, each) => Math.max(most, context.measureText(each.name.slice(0, 40)).width), 40);
      const left = Math.min(widest + 14, width < 560 ? 86 : 190);
      return {width, row, top, lines, left, height: top + rows * row + AXIS, right: width - PAD};
    }

    draw() {
      if (!this.data || !this.figure.clientWidth) return;
      const at = this.sizes(), [begin, end] = this.range(), dense = window.devicePixelRatio || 1;
      this.at = at;
      this.canvas.style.height = `${at.height}px`;
      this.canvas.width = Math.round(at.width * dense);
      this.canvas.height = Math.round(at.height * dense);
      const pen = this.canvas.getContext("2d");
      pen.setTransform(dense, 0, 0, dense, 0, 0);
      pen.clearRect(0, 0, at.width, at.height);
      pen.font = FONT;
      const wide = at.right - at.left, x = (time) => at.left + (wide * (time - begin)) / (end - begin);
      this.x = x;
      this.ticks(pen, begin, end, x);
      pen.save();
      pen.beginPath();
      pen.rect(at.left, 0, wide, at.height);
      pen.clip();
      this.phases(pen, begin, end, x);
      this.spans(pen, begin, end, x);
      this.marks(pen, begin, end, x);
      this.selection(pen);
      pen.restore();
      this.names(pen);
    }

    bars(pen, list, begin, end, x, top, height, name) {
      pen.fillStyle = color(name);
      pen.beginPath();
      for (const [from, to] of list) {
        if (to < begin || from > end) continue;
        const left = x(Math.max(from, begin)), right = x(Math.min(to, end));
        pen.rect(left, top, Math.max(right - left, 0.75), height);
      }
      pen.fill();
    }

    phases(pen, begin, end, x) {
      const {phases} = this.data, top = this.at.lines + 2;
      this.bars(pen, phases.map((each) => [each[0], each[1]]), begin, end, x, top, PHASES, "collect");
      this.bars(pen, phases.map((each) => [each[1], each[2]]), begin, end, x, top, PHASES, "exchange");
      pen.fillStyle = color("panel");
      if (phases.length && (this.at.right - this.at.left) / phases.length > 4 || end - begin < this.span[1] - this.span[0]) {
        for (const each of phases) if (each[2] >= begin && each[2] <= end) pen.fillRect(x(each[2]) - 0.5, top, 1, PHASES);
      }
    }

    spans(pen, begin, end, x) {
      const {row, top} = this.at, bar = row > 14 ? row - 7 : row - 3;
      this.data.rows.forEach((each, number) => {
        const y = top + number * row, sending = (each.sending || []).length > 0, tall = sending ? bar * 0.7 : bar;
        const states = new Map();
        for (const span of each.spans) {
          if (span[1] < begin || span[0] > end) continue;
          if (!states.has(span[2])) states.set(span[2], []);
          states.get(span[2]).push(span);
        }
        for (const [state, list] of states) this.bars(pen, list, begin, end, x, y, tall, COLORS[state] || "left");
        if (sending) this.bars(pen, each.sending, begin, end, x, y + tall, bar - tall, "sending");
      });
    }

    marks(pen, begin, end, x) {
      const {row, top, lines, height} = this.at, lanes = Array(LANES).fill(-Infinity);
      for (const mark of this.data.marks) {
        if ((mark.until || mark.at) < begin || mark.at > end) continue;
        const left = x(mark.at);
        pen.fillStyle = pen.strokeStyle = color(mark.good ? "training" : "lost");
        if (mark.until) {
          pen.globalAlpha = 0.12;
          pen.fillRect(left, lines, x(Math.min(mark.until, end)) - left, height - lines - AXIS);
          pen.globalAlpha = 1;
        }
        if (mark.line) {
          pen.setLineDash([4, 3]);
          pen.beginPath();
          pen.moveTo(left, 2);
          pen.lineTo(left, height - AXIS);
          pen.stroke();
          pen.setLineDash([]);
          const wide = pen.measureText(mark.what).width + 8, lane = lanes.findIndex((used) => used <= left);
          if (lane >= 0) { // labels never overlap: what finds no lane is told by the tip
            pen.textBaseline = "middle";
            pen.fillText(mark.what, left + 4, lane * LANE + LANE / 2);
            lanes[lane] = left + wide;
          }
        }
        if (mark.row !== undefined && mark.row >= 0) {
          const y = top + mark.row * row + (row > 14 ? row - 7 : row - 3) / 2, r = Math.min(5, row / 2.6);
          pen.beginPath();
          if (mark.good) { pen.moveTo(left - r, y - r); pen.lineTo(left + r, y); pen.lineTo(left - r, y + r); pen.closePath(); }
          else { pen.moveTo(left, y - r - 1); pen.lineTo(left + r + 1, y); pen.lineTo(left, y + r + 1); pen.lineTo(left - r - 1, y); pen.closePath(); }
          pen.fill();
          pen.strokeStyle = color("panel");
          pen.lineWidth = 1.2;
          pen.stroke();
          pen.lineWidth = 1;
        }
      }
    }

    names(pen) {
      const {row, top, left} = this.at;
      pen.textBaseline = "middle";
      pen.font = row < 15 ? FONT.replace("12px", "10.5px") : FONT;
      pen.fillStyle = color("soft");
      if (this.data.phases.length) pen.fillText("rounds", 0, this.at.lines + 2 + PHASES / 2);
      pen.fillStyle = color("ink");
      this.data.rows.forEach((each, number) => pen.fillText(cut(pen, each.name, left - 10), 0, top + number * row + (row > 14 ? row - 7 : row - 3) / 2));
    }

    ticks(pen, begin, end, x) {
      const {top, height, left, right, lines} = this.at, clock = this.data.zero !== null;
      pen.textBaseline = "alphabetic";
      const wanted = Math.max(2, Math.floor((right - left) / 96)), step = stepFor((end - begin) / wanted);
      const shift = clock ? -60 * new Date(1000 * begin).getTimezoneOffset() : 0;
      const day = end - begin > 86400;
      let last = -Infinity;
      for (let time = Math.ceil((begin + shift) / step) * step - shift; time <= end; time += step) {
        const text = clock ? label(time, step, day) : step < 60 ? `${Number(time.toFixed(2))} s` : duration(time);
        pen.fillStyle = color("grid");
        pen.fillRect(x(time), lines, 1, height - AXIS - lines);
        const wide = pen.measureText(text).width, at = Math.min(Math.max(x(time) - wide / 2, left), right - wide);
        if (at < last + 8) continue;
        pen.fillStyle = color("soft");
        pen.fillText(text, at, height - 7);
        last = at + wide;
      }
    }

    selection(pen) {
      if (!this.drag || Math.abs(this.drag.to - this.drag.from) < 4) return;
      pen.fillStyle = color("accent");
      pen.globalAlpha = 0.18;
      pen.fillRect(Math.min(this.drag.from, this.drag.to), 0, Math.abs(this.drag.to - this.drag.from), this.at.height);
      pen.globalAlpha = 1;
    }

    time(x) {
      const [begin, end] = this.range();
      return begin + ((x - this.at.left) / (this.at.right - this.at.left)) * (end - begin);
    }

    listen() {
      const canvas = this.canvas;
      const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      canvas.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse") return this.point(...place(event));
        this.drag = {from: place(event)[0], to: place(event)[0]};
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        if (this.drag) { this.drag.to = x; this.draw(); } else this.point(x, y);
      });
      canvas.addEventListener("pointerup", () => {
        const {drag} = this;
        this.drag = null;
        if (drag && Math.abs(drag.to - drag.from) >= 4) {
          this.zoom = [this.time(Math.min(drag.from, drag.to)), this.time(Math.max(drag.from, drag.to))];
          if (this.group) for (const button of this.group.children) button.setAttribute("aria-pressed", "false");
        }
        this.draw();
      });
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      canvas.addEventListener("dblclick", () => {
        this.zoom = this.recent = null;
        if (this.group) for (const button of this.group.children) button.setAttribute("aria-pressed", String(button.dataset.choice === "all"));
        this.draw();
      });
    }

    point(x, y) {
      const text = this.at && x >= this.at.left ? this.tell(x, y) : "";
      this.tip.hidden = !text;
      if (!text) return;
      Parts.setText(this.tip, text);
      const wide = this.tip.offsetWidth, at = this.canvas.offsetTop;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, this.at.width - wide))}px`;
      this.tip.style.top = `${at + y + 18}px`;
    }

    tell(x, y) {
      const time = this.time(x), near = (Math.abs(this.time(x + 6) - time)), {row, top} = this.at;
      const number = Math.floor((y - top) / row), each = y >= top ? this.data.rows[number] : null;
      const lines = [];
      for (const mark of this.data.marks) {
        const here = mark.row === undefined || mark.row < 0 || mark.row === number || !each;
        if (here && Math.abs(mark.at - time) < near && lines.length < 5) lines.push(mark.text || mark.what);
      }
      if (each) {
        const span = each.spans.find((one) => one[0] <= time && time <= one[1]);
        lines.push(span ? `${each.name}: ${WORDS[span[2]] || span[2]} for ${duration(span[1] - span[0])}` : each.name);
      }
      const phase = this.data.phases.find((one) => one[0] <= time && time <= one[2]);
      if (phase) {
        const parts = phase[1] > phase[0] && phase[2] > phase[1] ? `: ${duration(phase[1] - phase[0])} collecting, ${duration(phase[2] - phase[1])} exchanging` : `: ${duration(phase[2] - phase[0])}`;
        lines.push(`round ${phase[3]}${parts}`);
      }
      lines.push(this.data.zero === null ? duration(Math.max(0, time)) : moment(time));
      return lines.join("\n");
    }
  }

  function cut(pen, text, wide) {
    if (pen.measureText(text).width <= wide) return text;
    let short = text.slice(0, 60);
    while (short && pen.measureText(`${short}…`).width > wide) short = short.slice(0, -1);
    return `${short}…`;
  }

  function stepFor(least) {
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    return steps.find((step) => step >= least) || 86400 * Math.ceil(least / 86400);
  }

  function label(time, step, day) {
    const at = new Date(1000 * time), two = (number) => String(number).padStart(2, "0");
    const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
    if (step >= 86400) return at.toLocaleDateString([], {month: "short", day: "numeric"});
    if (day) return `${at.toLocaleDateString([], {month: "short", day: "numeric"})} ${clock}`;
    return step < 60 ? `${clock}:${two(at.getSeconds())}` : clock;
  }

  return {show, COLORS};
})();
