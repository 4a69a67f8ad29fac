"use strict";
// A page about a real run: keeps what it was told (see diloco/report/shape.py), and shows it. Live and in a file alike.
const RunPage = (() => {
  const {make, setText, size, count, rate, loss, percent, duration, moment, counted} = Parts;
  const AWAY = ["lost", "ended", "left", "evicted", "silent"];
  const DATED = ["lost", "left", "silent", "ended", "waiting", "catching up", "sending", "starting"];
  const COLUMN = {};
  const LOG_ROWS = 25, MOST_WHY = 6;

  class Page {
    constructor(root) {
      this.root = root;
      this.islands = [];
      this.rounds = [];
      this.waits = [];
      this.marks = [];
      this.flow = [];
      this.validation = [];
      this.now = {islands: [], why: []};
      this.logBack = 0; // pages from the newest
      this.rows = new Map();
      this.stale = new Set(); // series that have grown since they were drawn
      this.top();
    }

    find(selector) { return this.root.querySelector(selector); }

    apply(view) {
      view.columns.forEach((name, at) => { COLUMN[name] = at; });
      for (const series of ["rounds", "waits", "marks", "flow", "validation"]) {
        if (view.reset) this[series] = [];
        if (!view[series].length && !view.reset) continue;
        for (const row of view[series]) this[series].push(row);
        this.forget(series, view.most);
        this.stale.add(series);
        if (series === "rounds" || series === "waits") this.past = null;
      }
      this.islands = view.islands;
      if (view.now.islands) this.now = view.now;
      if (!document.hidden) this.show(); // a tab that nobody sees draws nothing
    }

    // a page may stay open for weeks: it forgets what a new one would not be told either
    forget(series, most) {
      const rows = this[series];
      if (series !== "rounds") rows.splice(0, Math.max(0, rows.length - most[series]));
      else if (rows.length > 2 * most.rounds) this.rounds = rows.filter((_, at) => at % 2 === 0 || at >= rows.length - most.whole);
    }

    show() {
      this.tiles();
      this.why();
      this.islandTable();
      this.meters();
      const grown = (...series) => series.some((name) => this.stale.has(name));
      if (grown("rounds", "validation")) Parts.losses(this.find('[data-kind="losses"]'), this.curves());
      if (grown("rounds", "flow")) Parts.links(this.find('[data-kind="links"]'), this.links());
      if (grown("rounds")) {
        this.log();
        this.bars();
      }
      this.stale.clear();
      this.timeline();
    }

    // the top

    top() {
      this.title = make("h1", {}, "diloco");
      this.pill = make("span", {class: "pill"}, "connecting");
      this.linkState = make("span", {class: "link-state", role: "status"}, "");
      this.progress = make("i", {style: {width: "0%"}});
      this.tilesAt = {};
      const tiles = make("div", {class: "tiles"});
      for (const [name, text] of Object.entries({step: "step", round: "round", loss: "training loss", validation: "validation loss",
        speed: "tokens per second", tokens: "tokens", eta: "left, at this pace", islands: "islands at work"})) {
        this.tilesAt[name] = make("b", {"data-tile": name}, "–");
        tiles.append(make("div", {class: "tile"}, this.tilesAt[name], make("span", {}, text)));
      }
      this.find("#top").replaceChildren(make("div", {class: "title"}, this.title, this.pill, make("span", {class: "spring"}), this.linkState,
        Parts.themeButton()), make("div", {class: "progress"}, this.progress), tiles);
    }

    tiles() {
      const {now, tilesAt: tile} = this, last = this.rounds[this.rounds.length - 1];
      const atWork = now.islands.filter((each) => !AWAY.includes(each.state));
      setText(this.title, now.run || "diloco");
      if (now.run) document.title = `${now.run} · round ${now.round}`;
      const [word, kind] = this.state(atWork.length);
      setText(this.pill, word);
      this.pill.className = `pill ${kind}`;
      if (!now.run) return;
      this.progress.style.width = now.steps ? `${Math.min(100, (100 * now.step) / now.steps)}%` : "0%";
      setText(tile.step, now.steps ? `${steps(now.step)} / ${steps(now.steps)}` : steps(now.step));
      setText(tile.round, String(now.round));
      setText(tile.loss, loss(now.loss) || "–");
      const checked = this.validation[this.validation.length - 1];
      setText(tile.validation, loss(now.validation_loss ?? (checked ? checked[3] : null)) || "–");
      const speed = atWork.reduce((sum, each) => sum + (each.tokens_per_s || 0), 0);
      setText(tile.speed, speed ? count(speed) : "–");
      setText(tile.tokens, last && last[COLUMN.total_tokens] !== null ? count(last[COLUMN.total_tokens]) : "–");
      setText(tile.eta, now.finished ? "done" : now.eta_s !== null && now.eta_s !== undefined && atWork.length ? duration(now.eta_s) : "–");
      setText(tile.islands, `${atWork.length} of ${now.islands.length}`);
    }

    state(atWork) {
      const {now} = this;
      if (!now.run) return ["starting", "wait"];
      if (now.finished) return ["finished", "good"];
      if (!atWork) return ["not running", "bad"];
      if (now.islands.every((each) => each.state === "starting" || AWAY.includes(each.state))) return ["starting", "wait"];
      if (now.islands.some((each) => ["quorum", "min_islands", "start_islands"].includes(each.cause))) return ["waiting for islands", "wait"];
      return [now.phase === "collecting" ? "training" : now.phase, "good"];
    }

    why() {
      const calm = this.now.why.every((text) => /^(nothing holds|the run is finished|nothing is known)/.test(text));
      const list = this.find("#why ul");
      const texts = this.now.why.slice(0, MOST_WHY);
      if (this.now.why.length > MOST_WHY) texts.push(`and ${this.now.why.length - MOST_WHY} more: diloco why tells all of them`);
      if (list.signature === texts.join("\n")) return;
      list.signature = texts.join("\n");
      list.replaceChildren(...texts.map((text) => make("li", {class: calm ? "calm" : ""}, text)));
      this.find("#why").classList.toggle("none", !texts.length);
    }

    // islands

    islandTable() {
      const place = this.find("#islands .islands"), {now} = this;
      if (!this.body) {
        const head = ["island", "state", "tokens/s", "loss", "share", "in rounds", "trained", "link", "sent", "received"];
        this.body = make("tbody");
        const numeric = new Set(["tokens/s", "loss", "in rounds", "trained", "sent", "received"]);
        place.replaceChildren(make("div", {class: "wide"}, make("table", {class: "cards"}, make("thead", {}, make("tr", {},
          ...head.map((name) => make("th", numeric.has(name) ? {class: "n"} : {}, name)))), this.body)));
      }
      const seen = new Set();
      now.islands.forEach((each, at) => {
        seen.add(each.number);
        const row = this.rows.get(each.number) || this.newRow(each.number);
        if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] || null);
        this.fill(row, each);
      });
      for (const [number, row] of this.rows) if (!seen.has(number)) { row.element.remove(); this.rows.delete(number); }
    }

    newRow(number) {
      const cell = (name, label, kind = "n") => make("td", {class: kind, ...(label ? {"data-label": label} : {})});
      const cells = {name: make("td", {class: "name"}), state: make("td", {class: "across"}), speed: cell("speed", "tokens/s"), loss: cell("loss", "loss"),
        share: cell("share", "share", ""), rounds: cell("rounds", "in rounds"), trained: cell("trained", "trained"), link: cell("link", "link", ""),
        sent: cell("sent", "sent"), received: cell("received", "received")};
      const texts = {dot: make("i", {class: "dot"}), name: make("span"), leads: make("span", {class: "badge"}, "leads"), share: meter(), link: meter()};
      cells.name.append(texts.dot, texts.name, texts.leads);
      cells.share.append(texts.share.box, texts.share.text);
      cells.link.append(texts.link.box, texts.link.text);
      const row = {element: make("tr", {"data-island": number}, ...Object.values(cells)), cells, texts};
      this.rows.set(number, row);
      return row;
    }

    fill({element, cells, texts}, each) {
      const {now} = this;
      element.dataset.state = each.state;
      setText(texts.name, each.name);
      texts.leads.hidden = !each.leads;
      texts.dot.style.background = `var(--${Timeline.COLORS[each.state] || "left"})`;
      setText(cells.state, this.words(each));
      setText(cells.speed, each.tokens_per_s ? count(each.tokens_per_s) : "");
      setText(cells.loss, loss(each.loss));
      texts.share.set(each.share, each.share === undefined ? "" : percent(each.share));
      setText(cells.rounds, now.rounds ? `${each.contributed || 0} of ${now.rounds}` : "");
      setText(cells.trained, each.utilisation === undefined ? "" : percent(each.utilisation));
      const used = each.link_bytes_per_s, limit = each.link_limit_bytes_per_s;
      texts.link.set(used && limit ? used / limit : null, used ? (limit ? `${rate(8 * used)} of ${rate(8 * limit)}` : rate(8 * used)) : "");
      setText(cells.sent, each.bytes_sent ? size(each.bytes_sent) : "");
      setText(cells.received, each.bytes_received ? size(each.bytes_received) : "");
    }

    words(each) {
      let text = each.state;
      if (each.state === "waiting" && each.waiting_for) text = `waiting for ${some(each.waiting_for)}`;
      if (each.since && DATED.includes(each.state)) text += `, ${duration(Math.max(0, this.now.at - each.since))}`;
      if (!each.member && !AWAY.includes(each.state)) text += ", not in the roster yet";
      if (each.disk) text += `; disk: ${each.disk}`;
      return text;
    }

    meters() {
      const known = this.now.islands.filter((each) => each.link_limit_bytes_per_s);
      const full = known.filter((each) => (each.link_bytes_per_s || 0) > 0.8 * each.link_limit_bytes_per_s);
      const text = !known.length ? "" : full.length ? `At their limit in the last exchange: ${some(full.map((each) => each.name))}.`
        : `No link was at its limit in the last exchange (${counted(known.length, "link")} with a limit).`;
      const place = this.find("#links .meters");
      if (!place.firstChild) place.append(make("p", {class: "caption"}));
      setText(place.firstChild, text);
    }

    // drawings

    zero() {
      const first = this.rounds.find((row) => row[COLUMN.time] > 0);
      return first ? first[COLUMN.time] - first[COLUMN.collect_s] - first[COLUMN.exchange_s] : this.flow.length ? this.flow[0][0] : null;
    }

    curves() {
      const zero = this.zero(), trained = this.rounds.filter((row) => row[COLUMN.loss] !== null);
      const column = (name) => trained.map((row) => row[COLUMN[name]]);
      const since = (time) => (time > 0 && zero !== null ? time - zero : null);
      const at = new Map(this.rounds.map((row) => [row[COLUMN.round], row]));
      const of = (row, name) => (at.has(row[0]) ? at.get(row[0])[COLUMN[name]] : null);
      const curves = [{name: "run", kind: "training", step: column("step"), tokens: column("total_tokens"),
        seconds: column("time").map(since), bytes: column("total_bytes"), loss: column("loss")}];
      if (this.validation.length) curves.push({name: "run", kind: "validation", step: this.validation.map((row) => row[1]),
        tokens: this.validation.map((row) => of(row, "total_tokens")), seconds: this.validation.map((row) => since(row[2])),
        bytes: this.validation.map((row) => of(row, "total_bytes")), loss: this.validation.map((row) => row[3])});
      return curves;
    }

    links() {
      const zero = this.zero(), uses = [];
      const exchanged = this.rounds.filter((row) => row[COLUMN.exchange_s] > 0 && row[COLUMN.time] > 0 && row[COLUMN.size] > 0);
      if (this.flow.length > 1) {
        const limits = this.now.islands.map((each) => each.link_limit_bytes_per_s);
        const all = limits.length && limits.every(Boolean) ? 8 * limits.reduce((sum, each) => sum + each, 0) : 0;
        uses.push({name: "all islands, now", seconds: this.flow.map((row) => row[0] - this.flow[0][0]), up: this.flow.map((row) => 8 * row[1]),
          down: this.flow.map((row) => 8 * row[2]), limits: all ? [[0, all, all]] : [], end_s: this.flow[this.flow.length - 1][0] - this.flow[0][0]});
      }
      if (exchanged.length) uses.push({name: "each exchange", upName: "the update's bytes over the exchange", seconds: exchanged.map((row) => row[COLUMN.time] - zero),
        up: exchanged.map((row) => (8 * row[COLUMN.size]) / row[COLUMN.exchange_s]), down: [], limits: [], end_s: 0});
      return uses;
    }

    bars() {
      const figure = this.find('[data-kind="utilisation"]');
      const known = this.now.islands.filter((each) => each.utilisation !== undefined);
      this.find("#utilisation").classList.toggle("hidden", !known.length);
      if (known.length) Parts.bars(figure, known.map((each) => ({name: each.name, share: each.utilisation})));
    }

    timeline() {
      const {phases, rows} = this.spans(), numbers = new Map(rows.map((row, at) => [row.number, at]));
      const marks = this.marks.map(([at, island, what, text]) => ({at, row: numbers.get(island), what, good: what === "joined" || what === "caught up",
        text: `${this.islands[island] === undefined ? "" : `${this.islands[island]}: `}${what}${text ? `: ${text}` : ""}`}));
      for (const row of this.rounds) {
        for (const [name, good] of [["joined", true], ["left", false]]) {
          for (const island of row[COLUMN[name]]) {
            if (row[COLUMN.round] > 1) marks.push({at: row[COLUMN.time], row: numbers.get(island), what: name, good, text: `${this.islands[island]} ${name} with round ${row[COLUMN.round]}`});
          }
        }
        if (row[COLUMN.changes]) marks.push({at: row[COLUMN.time], what: "changed", line: true, good: true, text: `the owner changed: ${row[COLUMN.changes]}`});
      }
      Timeline.show(this.find('[data-kind="timeline"]'), {rows, phases, marks, zero: 0});
    }

    // what each island did, as far as the rounds, its waits and its present state say it
    spans() {
      if (!this.past) this.pastSpans();
      const last = this.rounds[this.rounds.length - 1], until = last ? last[COLUMN.time] : 0;
      const rows = this.past.map((row) => ({...row, spans: row.spans}));
      for (const each of this.now.islands) {
        let row = rows.find((one) => one.number === each.number);
        if (!row) { row = {number: each.number, name: each.name, spans: []}; rows.push(row); }
        const from = AWAY.includes(each.state) ? each.since || 0 : until; // what is lost is so since it was heard last
        const begin = Math.max(from, row.spans.length ? row.spans[row.spans.length - 1][1] : 0, until ? 0 : each.since || 0);
        const quiet = AWAY.includes(each.state) && !this.now.islands.some((other) => !AWAY.includes(other.state));
        if (begin && this.now.at > begin && !quiet) row.spans = [...row.spans, [begin, this.now.at, each.state]];
      }
      return {rows, phases: this.phases};
    }

    pastSpans() {
      const past = this.islands.map((name, number) => ({number, name, spans: [], in: false}));
      this.phases = [];
      let before = 0;
      for (const row of this.rounds) {
        const end = row[COLUMN.time], took = row[COLUMN.collect_s] + row[COLUMN.exchange_s], who = row[COLUMN.who];
        if (!(end > 0)) continue;
        const begin = Math.max(before, took ? end - took : before || end);
        before = end;
        for (const number of row[COLUMN.joined]) if (past[number]) past[number].in = true;
        if (who) {
          this.phases.push([begin, Math.max(begin, end - row[COLUMN.exchange_s]), end, row[COLUMN.round]]);
          for (const each of past) {
            const letter = who[each.number] || ".";
            if (letter !== ".") each.in = true;
            if (each.in) extend(each.spans, begin, end, letter === "s" ? "lost" : letter === "." ? "absent" : "training");
          }
        }
        for (const number of row[COLUMN.left]) if (past[number]) past[number].in = false;
      }
      const waits = new Map();
      for (const [island, begin, end] of this.waits) {
        if (!waits.has(island)) waits.set(island, []);
        waits.get(island).push([begin, end]);
      }
      for (const [island, list] of waits) if (past[island]) past[island].spans = over(past[island].spans, list, before);
      this.past = past.filter((row) => row.spans.length);
      this.past.sort((one, other) => one.name.localeCompare(other.name, undefined, {numeric: true}));
    }

    // the log, newest first

    log() {
      const place = this.find("#log .log");
      if (!this.rounds.length) return Parts.nothing(place, "No round is committed yet.");
      const end = this.rounds.length - LOG_ROWS * this.logBack, rows = this.rounds.slice(Math.max(0, end - LOG_ROWS), end).reverse();
      const head = ["round", "time", "step", "tokens", "loss", "took", "contributed", "", "digest"];
      const numeric = new Set(["round", "step", "tokens", "loss", "took"]);
      const body = make("tbody", {}, ...rows.map((row) => this.logRow(row)));
      const turn = (pages, text) => make("button", {type: "button", class: pages > 0 ? "older" : "newer", onclick: () => { this.logBack += pages; this.log(); }}, text);
      const turns = [this.logBack ? turn(-1, "newer rounds") : null, end > LOG_ROWS ? turn(1, "older rounds") : null];
      place.replaceChildren(make("div", {class: "wide"}, make("table", {class: "cards"}, make("thead", {}, make("tr", {},
        ...head.map((name) => make("th", numeric.has(name) ? {class: "n"} : {}, name)))), body)), make("div", {class: "bar-row more"}, ...turns));
    }

    logRow(row) {
      const get = (name) => row[COLUMN[name]], name = (number) => this.islands[number] || "?";
      const took = get("collect_s") + get("exchange_s"), who = [...get("who")].flatMap((letter, number) => (letter === "c" || letter === "l" ? [number] : []));
      const notes = [];
      if (get("joined").length && get("round") > 1) notes.push(`${some(get("joined").map(name))} joined`);
      if (get("left").length) notes.push(`${some(get("left").map(name))} left`);
      const late = [...get("who")].flatMap((letter, number) => (letter === "l" ? [name(number)] : []));
      if (late.length) notes.push(`${some(late)} late`);
      if (get("changes")) notes.push(get("changes"));
      const parts = !who.length ? "" : who.length <= 4 ? who.map(name).sort().join(", ") : `${who.length} of ${get("islands")}`;
      const cell = (text, label, kind = "n") => make("td", {class: kind, ...(label ? {"data-label": label} : {})}, text);
      return make("tr", {}, cell(String(get("round")), "round"), cell(get("time") > 0 ? moment(get("time")) : "", "", "soft"), cell(String(get("step")), "step"),
        cell(get("total_tokens") ? count(get("total_tokens")) : "", "tokens"), cell(loss(get("loss")), "loss"), cell(took ? duration(took) : "", "took"),
        cell(parts, "", "across"), cell(notes.join("; "), "", "across soft"), cell(get("digest"), "", "mono across"));
    }
  }

  const steps = (number) => (number < 10000 ? String(number) : count(number));

  function meter() {
    const bar = make("i"), box = make("span", {class: "meter"}, bar), text = make("span");
    return {box, text, set(share, words) {
      box.hidden = share === null || share === undefined;
      if (!box.hidden) bar.style.width = `${Math.min(100, 100 * share)}%`;
      box.classList.toggle("full", share > 0.8 && words.includes("of"));
      setText(text, words);
    }};
  }

  function some(names) {
    return names.length <= 4 ? names.join(", ") : `${names.slice(0, 3).join(", ")} and ${names.length - 3} more`;
  }

  function extend(spans, begin, end, state) {
    const last = spans[spans.length - 1];
    if (last && last[2] === state && begin - last[1] < 0.5) last[1] = end;
    else spans.push([begin, end, state]);
  }

  // spans with waits laid over them; a wait that reaches past the last round counts, too
  function over(spans, waits, until) {
    const made = [];
    let next = 0;
    waits.sort((one, other) => one[0] - other[0]);
    for (const [begin, end, state] of spans) {
      let at = begin;
      while (next < waits.length && waits[next][1] <= at) next += 1;
      for (let each = next; each < waits.length && waits[each][0] < end; each += 1) {
        const from = Math.max(at, waits[each][0]), to = Math.min(end, waits[each][1]);
        if (state !== "training" || to <= from) continue;
        if (from > at) made.push([at, from, state]);
        made.push([from, to, "waiting"]);
        at = to;
      }
      if (at < end) made.push([at, end, state]);
    }
    return made;
  }

  return Page;
})();
