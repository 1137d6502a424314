"use strict";
/* Draws a Picture (daemon/reports/picture.py): panels over one x axis, the batch, with one cursor.

   const page = Headway.open(element, picture)
   page.append(rows)      rows of the history, newer than what is drawn, or drawn again after a failure
   page.replace(picture)  another picture of the job; zoom and cursor stay
   page.moveTo(batch)     moves the cursor

   All text from outside becomes a text node. */
const Headway = (() => {
  const { nearest, part, steps, thin, upTo } = Curves;
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#c9b400", "#8c8c8c"];  // Okabe–Ito
  const CLASSES = { useful: 2, waiting: 1, bubble: 4, replay: 5, snapshot: 3, recovery: 13, replan: 8, idle: 7 };
  const WORK = { forward: 4, backward: 1, orthogonalize: 3, update: 2 };
  const FONT = "11px system-ui, sans-serif", RIGHT = 16, MOST_MARKS = 160, MOST_LIVE = 6000;

  const el = (parent, tag, cls = "", text = "") => {
    const made = document.createElement(tag);
    if (cls) made.className = cls;
    if (text !== "") made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const inks = new Map();
  /* A colour of the theme. Each look makes the browser compute its styles anew, so it looks once. */
  const style = (name) => {
    if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    return inks.get(name);
  };
  const count = (n) => n.toLocaleString("en-US");
  const many = (n, what) => `${count(n)} ${what}${n === 1 ? "" : /(ch|s)$/.test(what) ? "es" : "s"}`;
  const time = (s) => s < 0.95 ? `${s.toFixed(2)} s` : s < 99.5 ? `${s.toFixed(1)} s`
    : s < 5970 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
  const short = (v) => v >= 1e6 ? `${+(v / 1e6).toPrecision(3)}M` : v >= 1e4 ? `${+(v / 1e3).toPrecision(3)}k` : `${+v.toPrecision(4)}`;
  const clock = (s) => new Date(s * 1e3).toLocaleTimeString([], { hour12: false });

  const colourOf = (number) => number % 8 ? COLOURS[number % 8] : style("--first");

  const tiles = new Map();
  /* Colour of a number; after the eighth the colours return with stripes. */
  const paint = (ctx, number) => {
    const colour = colourOf(number), kind = Math.floor(number / 8) % 4;
    if (!kind) return colour;
    const key = `${number % 32}/${style("--ground")}`;
    if (!tiles.has(key)) {
      const tile = document.createElement("canvas"), pen = tile.getContext("2d");
      tile.width = tile.height = 8;
      pen.fillStyle = colour; pen.fillRect(0, 0, 8, 8);
      pen.strokeStyle = style("--ground"); pen.lineWidth = 1.6; pen.beginPath();
      if (kind !== 2) { pen.moveTo(-2, 10); pen.lineTo(10, -2); pen.moveTo(-2, 2); pen.lineTo(2, -2); pen.moveTo(6, 10); pen.lineTo(10, 6); }
      if (kind !== 1) { pen.moveTo(-2, -2); pen.lineTo(10, 10); pen.moveTo(6, -2); pen.lineTo(10, 2); pen.moveTo(-2, 6); pen.lineTo(2, 10); }
      pen.stroke();
      tiles.set(key, tile);
    }
    return ctx.createPattern(tiles.get(key), "repeat");
  };
  const swatch = (parent, number) => {
    const box = el(parent, "canvas");
    box.width = box.height = 12;
    const pen = box.getContext("2d");
    pen.fillStyle = paint(pen, number); pen.fillRect(0, 0, 12, 12);
  };
  const keyOf = (parent, entries) => {
    const list = el(parent, "ul", "key");
    for (const [number, name] of entries) {
      const item = el(list, "li");
      if (number !== null) swatch(item, number);
      el(item, "span", "", name);
    }
  };
  const canvas = (parent, width, height, draw) => {
    const made = parent.querySelector(":scope > canvas") ?? el(parent, "canvas"), ratio = devicePixelRatio || 1;
    const pen = made.getContext("2d"), size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (made.width !== size[0] || made.height !== size[1]) [made.width, made.height] = size;
    made.style.width = `${width}px`; made.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.clearRect(0, 0, width, height);
    pen.font = FONT; pen.textBaseline = "middle";
    draw(pen);
    return made;
  };
  const fitted = (pen, text, width) => {
    if (pen.measureText(text).width <= width) return text;
    let kept = text;
    while (kept && pen.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
    return kept.length > 2 ? `${kept}…` : "";
  };

  class Page {
    constructor(root, picture) {
      this.root = root; this.from = 0; this.to = 1; this.batch = null; this.sections = new Map(); this.isAll = true;
      root.textContent = "";
      this.title = el(root, "header");
      this.readout = el(root, "dl", "readout");
      this.voice = el(root, "div", "voice");  // speaks only of moves by key or event: the mouse moves too often
      this.voice.setAttribute("aria-live", "polite");
      this.stack = el(root, "div", "stack");
      this.stack.tabIndex = 0;
      this.stack.setAttribute("role", "group");
      this.stack.setAttribute("aria-label", "Panels over the batches. Arrow keys move the cursor, plus and minus zoom, 0 shows all.");
      this.line = el(this.stack, "div", "cursor");
      this.chosen = el(this.stack, "div", "chosen");
      this.chosen.hidden = true;
      this.below = el(root, "div", "below");
      this.listen();
      this.replace(picture);
      new ResizeObserver(() => this.later()).observe(root);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { tiles.clear(); inks.clear(); this.keep(new Map()); this.later(); });
    }

    /* --- What is shown ------------------------------------------------------------------------------------------- */

    replace(picture) {
      this.picture = picture;
      this.series = Object.fromEntries(Object.entries(picture.series).map(([name, s]) => [name, { batches: [...s.batches], values: [...s.values] }]));
      const follows = this.isAtEnd;
      this.done = picture.num_done;
      if (follows && this.done) this.batch = this.done - 1;
      this.drawBelow();
      this.later();
    }

    append(rows) {
      const follows = this.isAtEnd;
      for (const row of rows) {
        const told = { ...row, tokens_per_s: row.seconds > 0 ? row.tokens / row.seconds : null };
        for (const name of ["loss", "eval_loss", "final_eval_loss", "learning_rate", "gradient_norm", "tokens_per_s"]) {
          const value = told[name];
          if (value === undefined || (value === null && name !== "loss")) continue;  // a loss that is not finite is null
          const line = this.series[name] ??= { batches: [], values: [] };
          while (line.batches.length && line.batches[line.batches.length - 1] >= row.batch) { line.batches.pop(); line.values.pop(); }
          line.batches.push(row.batch); line.values.push(value);
          if (line.batches.length > MOST_LIVE) thin(line);
        }
        this.done = row.batch + 1;
        const plans = this.picture.generations, last = plans[plans.length - 1];
        if (!last || last.number < row.generation) plans.push({ number: row.generation, first: row.batch, end: this.done, furthest: 0, text: "", stages: [], goodput_s: {}, at_s: 0 });
        else last.end = Math.max(last.end, this.done);
      }
      if (rows.length && follows) this.batch = this.done - 1;
      this.later();
    }

    later() {
      if (this.isDue) return;
      this.isDue = true;
      requestAnimationFrame(() => { this.isDue = false; this.draw(); });
    }

    draw() {
      const began = performance.now();
      this.width = Math.max(this.root.clientWidth - parseFloat(getComputedStyle(this.root).paddingLeft) * 2, 260);
      this.left = this.width < 560 ? 46 : 62;
      if (this.isAll) { this.from = 0; this.to = Math.max(this.done - 1, 1); }
      this.drawn = new Map(); this.last = this.chosen;
      this.drawTitle();
      this.drawLoss();
      this.drawLayers();
      this.drawRate();
      this.drawGoodput();
      this.curve("Gradient norm", "before clipping", [["gradient_norm", "", 3]], 120);
      this.curve("Learning rate", "of the matrices", [["learning_rate", "", 0]], 110);
      this.keep(this.drawn);
      this.drawPipeline();
      this.moveTo(this.batch);
      this.drawn_ms = performance.now() - began;
    }

    x(batch) { return this.left + (batch - this.from) / (this.to - this.from) * (this.width - this.left - RIGHT); }
    batchAt(x) { return this.from + (x - this.left) / (this.width - this.left - RIGHT) * (this.to - this.from); }
    get isAtEnd() { return this.batch === null || this.batch >= this.done - 2; }

    drawTitle() {
      const p = this.picture, lead = [];
      this.title.textContent = "";
      el(this.title, "h1", "", p.job);
      const plans = p.generations.length, again = p.failures.reduce((sum, each) => sum + Math.max(each.batch + 1 - each.boundary, 0), 0);
      lead.push(`${p.phase}: ${count(this.done)} of ${many(p.num_batches, "batch")}, ${many(plans, "plan")} on ${many(p.devices.length, "device")}`);
      const struck = [...p.failures, ...p.cuts], faults = [[p.failures, "failure"], [p.cuts, "cut link"]].filter(([those]) => those.length);
      const lost_s = struck.reduce((sum, each) => sum + (each.still_s ?? 0) + (each.again_s ?? 0), 0);
      if (struck.length) lead.push(`${faults.map(([those, what]) => many(those.length, what)).join(" and ")}, ${many(again, "batch")} computed again, ${time(lost_s)} lost`);
      if (p.lost_rows) lead.push(p.lost_rows[0].toUpperCase() + p.lost_rows.slice(1));
      el(this.title, "p", "lead", `${lead.join(". ")}.`);
      const exact = el(this.title, "p", "lead");
      if (p.other) { el(exact, "strong", "", `Difference to ${p.other.name}: ${p.other.sentence}. `); }
      if (p.is_exact !== null) exact.append(`${p.is_exact ? "Exact" : "Not exact"}: ${p.exact_reason.replace(/ \(.*\)$/, "")}.`);  // each class stands below
    }

    /* The next section of the stack, with its title and what its colours mean: that of the draw before, if it says the same. */
    section(title, unit, entries = [], none = "") {
      const key = JSON.stringify([title, unit, entries, none]), made = this.sections.get(key) ?? el(null, "section");
      if (!this.sections.has(key)) {
        const head = el(made, "div", "head"), name = el(head, "h2", "", title);
        if (unit) el(name, "small", "", unit);
        if (entries.length) keyOf(head, entries);
        if (none) el(made, "p", "none", none);
      }
      if (this.last.nextSibling !== made) this.last.after(made);
      this.drawn.set(key, made);
      return this.last = made;
    }

    /* Drops the sections that are not drawn any more. */
    keep(drawn) {
      for (const [key, made] of this.sections) if (!drawn.has(key)) { made.chart?.destroy(); made.remove(); }
      this.sections = drawn;
    }

    /* Curves by uPlot, named as in the picture's series, or given: [series, label, colour, options]. */
    curve(title, unit, lines, height, options = {}) {
      const found = lines.map(([name, ...rest]) => [typeof name === "string" ? this.series[name] : name, ...rest]).filter(([line]) => line && line.batches.length);
      if (!found.length) return null;
      const made = this.section(title, unit, [...found.filter(([, label]) => label).map(([, label, colour]) => [colour, label]), ...(options.isFirst ? this.signs() : [])]);
      const parts = found.map(([line]) => part(line, this.from, this.to, this.width)), data = uPlot.join(parts.map((line) => [line.batches, line.values]));
      made.top = options.top ?? Infinity;
      made.peaks = parts[0].batches.map((batch, i) => [batch, parts[0].values[i]]).filter(([, value]) => value > made.top);
      if (made.chart?.series.length === data.length) {
        if (made.chart.width !== this.width || made.chart.height !== height) made.chart.setSize({ width: this.width, height });
        made.chart.setData(data);
        return made;
      }
      made.chart?.destroy();
      const axis = { stroke: style("--soft"), font: FONT, grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false } };
      made.chart = new uPlot({
        width: this.width, height, legend: { show: false }, cursor: { show: false }, select: { show: false },
        padding: [8, RIGHT, 0, 0],
        scales: { x: { time: false, range: () => [this.from, this.to] }, y: options.top ? { range: () => [0, made.top] } : {} },
        axes: [
          { ...axis, size: 24, gap: 4, splits: () => steps(this.from, this.to, this.width / 90), values: (_, found) => found.map(count) },
          { ...axis, size: () => this.left, gap: 6, values: (_, found) => found.map(short) },
        ],
        series: [{}, ...found.map(([, , colour, more]) => ({ stroke: colourOf(colour), width: 1.5, points: { show: (u) => u.data[0].length < 3, size: 6 }, ...more }))],
        hooks: { draw: [(drawn) => {
          const r = devicePixelRatio || 1, pen = drawn.ctx, top = drawn.bbox.top / r;
          pen.save(); pen.scale(r, r);
          this.marks(pen, top, top + drawn.bbox.height / r, options.isFirst);
          this.markPeaks(pen, made.peaks, top);
          pen.restore();
        }] },
      }, data, made);
      return made;
    }

    /* What is higher than its panel: a sign at the edge, with its height. */
    markPeaks(pen, peaks, top) {
      let before = -99;
      for (const [batch, value] of peaks) {
        const x = this.x(batch);
        if (x - before < 60) continue;
        pen.fillStyle = style("--soft"); pen.textAlign = x > this.width - 80 ? "right" : "left"; pen.textBaseline = "top"; pen.font = FONT;
        pen.fillText(`▲ ${short(value)}`, x, top);
        before = x;
      }
    }

    drawLoss() {
      const other = this.picture.other, unit = "nats per token, by batch";
      const more = { points: { show: true, size: 5 }, dash: [5, 4] };
      const lines = [["loss", "loss", 0], ["eval_loss", "held-out loss", 1, more], ["final_eval_loss", "held-out loss after the last update", 4, { points: { show: true, size: 9 } }]];
      if (other) lines.unshift([other.loss, `loss of ${other.name}`, 6, { width: 6 }], [other.eval_loss, `held-out loss of ${other.name}`, 3, more]);
      if (!this.curve("Loss", unit, lines, this.width < 560 ? 220 : 280, { isFirst: true })) {
        this.section("Loss", unit, [], "No batch is safe from a failure yet.");
      }
      if (other && other.difference.values.some((value) => value)) {
        this.curve("Difference", `to ${other.name}, nats per token`, [[other.difference, "", 5]], 110);
      }
    }

    drawRate() {
      const steps = { batches: [], values: [] };
      for (const plan of this.picture.generations) {
        if (plan.end <= plan.first || !plan.predicted_tokens_per_s) continue;
        steps.batches.push(plan.first, plan.end - 1 || plan.first + 0.5); steps.values.push(plan.predicted_tokens_per_s, plan.predicted_tokens_per_s);
      }
      for (let i = steps.batches.length - 1; i > 0; i--) if (steps.batches[i] <= steps.batches[i - 1]) { steps.batches.splice(i, 1); steps.values.splice(i, 1); }
      const rates = [...this.series.tokens_per_s?.values ?? []].sort((a, b) => a - b), usual = rates[Math.floor(rates.length * 0.99)] ?? 1;
      const most = Math.max(...steps.values, rates.at(-1) < 3 * usual ? rates.at(-1) : usual) * 1.1;  // one spike shall not flatten the rest
      this.curve("Tokens per second", "measured and predicted", [["tokens_per_s", "measured", 2], [steps, "predicted", 5, { dash: [6, 4] }]], 150, { top: most });
    }

    signs() {
      const p = this.picture, found = [];
      if (p.generations.length > 1) found.push([null, "│ new plan"]);
      if (p.failures.length) found.push([null, "✕ failure"], [null, "▒ computed again"]);
      if (p.events.some((each) => each.kind === "note")) found.push([null, "✂ link cut"]);
      return found;
    }

    /* Lines where plans begin, and where failures struck. */
    marks(pen, top, bottom, isFirst = false) {
      const inside = (batch) => batch >= this.from && batch <= this.to;
      const line = (batch, colour, dash) => {
        const x = Math.round(this.x(batch)) + 0.5;
        pen.strokeStyle = colour; pen.setLineDash(dash); pen.lineWidth = 1;
        pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, bottom); pen.stroke(); pen.setLineDash([]);
        return x;
      };
      let before = -9, drawn = 0;
      for (const plan of this.picture.generations.slice(1)) {
        const x = this.x(plan.first);
        if (!inside(plan.first) || x - before < 2 || drawn++ > MOST_MARKS) continue;
        line(plan.first, style("--plan"), []);
        before = x;
      }
      for (const each of this.picture.failures) {
        if (each.num_again !== 0 && each.batch >= this.from && each.boundary <= this.to) {
          const begin = Math.max(this.x(each.boundary), this.left), end = Math.min(this.x(each.batch + 1), this.width - RIGHT);
          if (end > begin) { pen.fillStyle = style("--again"); pen.fillRect(begin, top, end - begin, bottom - top); }
        }
      }
      const struck = [...this.picture.failures.map((each) => [each.batch, "✕"]), ...this.picture.events.filter((each) => each.kind === "note").map((each) => [each.batch, "✂"])];
      before = -99;
      for (const [batch, sign] of struck.sort((a, b) => a[0] - b[0]).slice(0, MOST_MARKS)) {
        if (!inside(batch)) continue;
        const x = line(batch, style("--bad"), [4, 3]);
        if (isFirst && x - before > 12) {
          pen.fillStyle = style("--bad"); pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = "bold 14px system-ui, sans-serif";
          pen.fillText(sign, x, top + 8);
          before = x;
        }
      }
    }

    /* A canvas over the batches, with the x axis below it; returns the pen for what stands at its left. */
    bands(parent, height, draw) {
      const made = canvas(parent, this.width, height + 24, (pen) => {
        pen.save();
        pen.beginPath(); pen.rect(this.left, 0, this.width - this.left - RIGHT, height); pen.clip();
        draw(pen);
        pen.restore();
        this.marks(pen, 0, height);
        pen.fillStyle = style("--soft"); pen.textAlign = "center"; pen.textBaseline = "middle"; pen.font = FONT;
        for (const at of steps(this.from, this.to, this.width / 90)) pen.fillText(count(at), this.x(at), height + 14);
        pen.textAlign = "right";
      });
      return made.getContext("2d");
    }

    drawLayers() {
      const p = this.picture, plans = p.generations.filter((each) => each.stages.length && each.end > each.first && each.end > this.from && each.first <= this.to);
      const shown = p.devices.slice(0, 12).map((name, number) => [number, name]);
      if (p.devices.length > 12) shown.push([null, `and ${count(p.devices.length - 12)} more`]);
      const isKnown = p.generations.some((each) => each.stages.length);
      const made = this.section("Who held which layers", "layers from the first to the last, colour: device", shown, isKnown ? "" : p.devices.length ? "Left out: there were too many plans for one page." : "Not known: no plan has come into force yet, or an earlier release wrote the events.");
      if (!isKnown) return;
      const height = Math.min(Math.max(p.layers.length * 18, 96), 280), row = height / p.layers.length;
      const beside = this.bands(made, height, (pen) => {
        const open = new Map();
        const label = ([stage, begin, end]) => {
          const wide = Math.min(end, this.width - RIGHT) - Math.max(begin, this.left);
          const high = (stage[1] - stage[0] + 1) * row;
          if (wide < 34 || high < 12) return;
          const others = stage[2].length + (stage[3] ?? 0) - 1;
          const text = fitted(pen, p.devices[stage[2][0]] + (others ? ` + ${others}` : ""), wide - 10);
          pen.font = "600 11px system-ui, sans-serif";
          const size = pen.measureText(text).width, x = Math.max(begin, this.left) + 6, y = stage[0] * row + high / 2;
          if (!text) return;
          pen.fillStyle = "rgba(255,255,255,.88)"; pen.fillRect(x - 3, y - 8, size + 6, 16);
          pen.fillStyle = "#16191d"; pen.textAlign = "left"; pen.textBaseline = "middle"; pen.fillText(text, x, y + 0.5);
        };
        for (const plan of plans) {
          const begin = this.x(plan.first), end = this.x(plan.end), still = new Set();
          for (const stage of plan.stages) {
            const part = (stage[1] - stage[0] + 1) * row / stage[2].length;
            stage[2].forEach((device, index) => {
              pen.fillStyle = paint(pen, device);
              pen.fillRect(begin, stage[0] * row + index * part, Math.max(end - begin, 0.75), part);
            });
            pen.fillStyle = style("--ground"); pen.fillRect(begin, stage[0] * row - 0.5, end - begin, 1);
            const key = `${stage[0]}/${stage[1]}/${stage[2]}`, run = open.get(key);
            still.add(key);
            if (run && Math.abs(run[2] - begin) < 0.5) run[2] = end; else { if (run) label(run); open.set(key, [stage, begin, end]); }
          }
          for (const [key, run] of [...open]) if (!still.has(key)) { label(run); open.delete(key); }
        }
        for (const run of open.values()) label(run);
      });
      const every = Math.max(1, Math.ceil(14 / row));
      p.layers.forEach((name, index) => {
        if (index % every && index !== p.layers.length - 1 || (index !== p.layers.length - 1 && p.layers.length - 1 - index < every)) return;
        beside.fillText(fitted(beside, this.left < 60 ? name.replace("block.", "") : name, this.left - 8), this.left - 8, (index + 0.5) * row);
      });
    }

    drawGoodput() {
      const p = this.picture;
      let plans = p.generations.filter((each) => each.end > each.first && Object.values(each.goodput_s).some((s) => s > 0));
      const isWhole = !plans.length && Object.keys(p.goodput_s).length > 0;
      if (isWhole) plans = [{ first: 0, end: Math.max(this.done, 1), goodput_s: p.goodput_s }];
      const names = [...new Set(plans.flatMap((each) => Object.keys(each.goodput_s)))].sort((a, b) => (a !== "useful") - (b !== "useful"));
      const number = (name) => CLASSES[name] ?? 15;
      const made = this.section("Goodput", `share of all workers' seconds${isWhole ? ", over the whole run" : ", by plan"}`, names.map((name) => [number(name), name]), plans.length ? "" : "Not known: no worker has reported how it spent its time.");
      if (!plans.length) return;
      const beside = this.bands(made, 110, (pen) => {
        for (const plan of plans) {
          const total = Object.values(plan.goodput_s).reduce((sum, s) => sum + s, 0), begin = this.x(plan.first), wide = Math.max(this.x(plan.end) - begin, 0.75);
          let y = 110;
          for (const name of names) {
            const high = (plan.goodput_s[name] ?? 0) / total * 110;
            y -= high;
            pen.fillStyle = paint(pen, number(name)); pen.fillRect(begin, y, wide, high);
          }
        }
      });
      for (const share of [0, 50, 100]) beside.fillText(`${share} %`, this.left - 8, Math.min(Math.max(110 - share * 1.1, 6), 104));
    }

    drawPipeline() {
      const told = this.picture.pipeline, box = this.pipeline;
      box.textContent = "";
      const title = el(box, "h2", "", "The pipeline");
      if (!told) { el(box, "p", "none", this.picture.why_no_pipeline || "No worker runs now: the last batches are drawn while a job runs."); return; }
      el(title, "small", "", `batches ${count(told.first_batch)} to ${count(told.last_batch)}, ${time(told.batch_s)} a batch`);
      keyOf(box, ["forward", "backward", "update"].map((name) => [WORK[name], name]));
      const wide = this.width < 560, left = wide ? 84 : 170, row = 24, height = told.workers.length * row, width = this.width;
      const x = (s) => left + s / told.window_s * (width - left - RIGHT);
      canvas(box, width, height + 24, (pen) => {
        told.workers.forEach((name, index) => {
          pen.fillStyle = style("--soft"); pen.textAlign = "right";
          pen.fillText(fitted(pen, wide ? name.replace("stage ", "").replace(" on ", " ") : name, left - 10), left - 8, (index + 0.5) * row);
          pen.fillStyle = style("--grid"); pen.fillRect(left, index * row + 3, width - left - RIGHT, row - 6);
        });
        pen.textAlign = "center";
        for (const [worker, kind, , microbatch, began, took] of told.operations) {
          const begin = x(Math.max(began, 0)), end = x(Math.min(began + took, told.window_s));
          pen.fillStyle = COLOURS[WORK[kind]]; pen.fillRect(begin, worker * row + 3, Math.max(end - begin - 0.5, 0.5), row - 6);
          if (microbatch >= 0 && end - begin > 13) { pen.fillStyle = "#16191d"; pen.fillText(microbatch, (begin + end) / 2, (worker + 0.5) * row); }
        }
        pen.fillStyle = style("--soft");
        for (let i = 0; i <= 4; i++) { pen.textAlign = i === 4 ? "right" : "center"; pen.fillText(time(told.window_s * i / 4), x(told.window_s * i / 4), height + 12); }
      });
    }

    drawBelow() {
      const p = this.picture, below = this.below, seen = below.querySelector(".events")?.scrollTop ?? 0;
      below.textContent = "";
      this.pipeline = el(below, "section", "whole");
      const lost = el(below, "section");
      el(el(lost, "h2", "", "Time lost to failures"), "small", "", "standing still, then computing again");
      const stops = [...p.failures, ...p.cuts].sort((a, b) => a.at_s - b.at_s);
      if (!stops.length) el(lost, "p", "none", "No failure has interrupted the training.");
      const most = Math.max(...stops.map((each) => (each.still_s ?? 0) + (each.again_s ?? 0)), 1e-9), table = el(lost, "table", "lost");
      for (const each of stops) {
        const row = el(table, "tr"), num = Math.max(each.batch + 1 - each.boundary, 0), what = el(row, "td", "", each.text);
        const bar = el(what, "div", "bar");
        for (const [name, s] of [["still", each.still_s], ["again", each.again_s]]) el(bar, "i", name).style.width = `${(s ?? 0) / most * 100}%`;
        const again = num ? `, ${each.again_s === null ? "and now" : time(each.again_s)} for ${many(num, "batch")} again` : ", no batch again";
        el(what, "div", "none", each.still_s === null ? "has not resumed yet" : `${time(each.still_s)} still${again}`);
        el(row, "td", "n", each.still_s === null ? "" : time(each.still_s + (each.again_s ?? 0)));
      }
      if (p.failures.length) el(lost, "p", "none", "Nothing is lost for good: each layer's state is copied to other nodes every few batches, and what came after the newest copies is computed again, to the same bits.");
      const events = el(below, "section"), list = el(events, "ul", "events");
      events.prepend(el(null, "h2", "", "What happened"));
      if (!p.events.length) el(events, "p", "none", "Nothing has been told yet.");
      const signs = { failure: "✕", plan: "◆", note: "✂", other: "·" };
      for (const each of p.events) {
        const button = el(el(list, "li"), "button", "", "");
        el(button, "span", "at", clock(each.at_s)); el(button, "span", each.kind, signs[each.kind] ?? "·"); el(button, "span", "", each.text);
        button.addEventListener("click", () => this.moveTo(each.batch, true));
      }
      this.drawJob(el(below, "section", "whole"));
      list.scrollTop = seen;  // a page that is kept up is drawn anew under who reads it
    }

    drawJob(box) {
      const p = this.picture;
      el(box, "h2", "", "The job");
      const facts = el(box, "dl", "facts");
      const fact = (name, text) => { if (text) { el(facts, "dt", "", name); el(facts, "dd", "", text); } };
      fact("SHA-256", p.job_hash);
      fact("Arithmetic", p.arithmetic);
      fact("Class", p.arithmetic_classes.join("; "));
      fact("Checkpoints", p.checkpoints.join(", "));
      fact("User", p.user);
      if (p.other?.differing_keys.length) fact(`Keys unlike ${p.other.name}`, p.other.differing_keys.join("; "));
      fact("Drawn", new Date(p.at_s * 1e3).toLocaleString("sv"));
      el(el(box, "h2", "", "The same bits again"), "small", "", `save the job below as ${p.job}.toml`);
      el(box, "pre", "", p.commands.join("\n"));
      el(box, "pre", "", p.job_file);
    }

    /* --- The cursor and the zoom ---------------------------------------------------------------------------------- */

    moveTo(batch, isSought = false) {
      const loss = this.series.loss;
      if (!loss?.batches.length || batch === null) { if (this.line) this.line.hidden = true; this.tell(null); return; }
      const index = nearest(loss.batches, batch);
      this.batch = loss.batches[index];
      if (isSought && (this.batch < this.from || this.batch > this.to)) {
        const half = (this.to - this.from) / 2;
        this.zoom(this.batch - half, this.batch + half);
        return;
      }
      const x = this.x(this.batch);
      this.line.hidden = x < this.left - 1 || x > this.width - RIGHT + 1;
      this.line.style.left = `${x}px`;
      this.tell(index);
      if (!isSought) return;
      this.voice.textContent = `batch ${count(this.batch)}, loss ${loss.values[index]}`;
      this.stack.scrollIntoView({ block: "nearest" });
    }

    tell(index) {
      const box = this.readout, p = this.picture;
      box.textContent = "";
      const say = (name, text, full = "") => { const pair = el(box, "div"); el(pair, "dt", "", name); el(pair, "dd", "", text).title = full; };
      if (index === null) { say("batch", "none yet"); return; }
      const at = this.batch, value = (name) => {
        const line = this.series[name], found = line ? upTo(line.batches, at) : -1;
        return found < 0 ? null : [line.values[found], line.batches[found]];
      };
      const full = (v) => v === null ? "not finite" : String(v);
      say("batch", count(at));
      say("loss", full(this.series.loss.values[index]));
      const held = value("eval_loss");
      if (held) say(held[1] === at ? "held-out loss" : `held-out loss, batch ${count(held[1])}`, held[0]?.toFixed(4) ?? "not finite", full(held[0]));
      const final = value("final_eval_loss");
      if (final && final[1] === at) say("held-out loss after its update", final[0]?.toFixed(4) ?? "not finite", full(final[0]));
      if (p.other) {
        const found = nearest(p.other.loss.batches, at);
        if (found >= 0 && p.other.loss.batches[found] === at) say(p.other.name, Object.is(p.other.loss.values[found], this.series.loss.values[index]) ? "the same, in each digit" : full(p.other.loss.values[found]));
      }
      for (const [name, title] of [["learning_rate", "learning rate"], ["gradient_norm", "gradient norm"], ["tokens_per_s", "tokens/s"]]) {
        const told = value(name);
        if (told && told[0] !== null) say(title, name === "tokens_per_s" ? count(Math.round(told[0])) : told[0] && Math.abs(told[0]) < 1e-3 ? told[0].toExponential(2) : `${+told[0].toPrecision(3)}`, full(told[0]));
      }
      const buttons = el(box, "div");
      for (const [text, title, act] of [["+", "zoom in", () => this.scale(0.5)], ["−", "zoom out", () => this.scale(2)], ["all", "show all batches", () => this.zoomAll()]]) {
        const button = el(buttons, "button", "", text);
        button.setAttribute("aria-label", title); button.title = title;
        button.addEventListener("click", act);
      }
      const plan = [...p.generations].reverse().find((each) => each.first <= at && at < each.end);
      if (plan) {
        const who = plan.stages.slice(0, 12).map((stage) => `${stage[2].map((device) => p.devices[device]).join(" + ")}${stage[3] ? ` + ${stage[3]}` : ""}: ${span(p.layers, stage)}`);
        el(box, "div", "wide", [`Plan ${plan.number}`, who.join(" | ") + (plan.stages.length > 12 ? " | …" : ""), plan.text].filter(Boolean).join(" · "));
      }
    }

    zoom(from, to) {
      const most = Math.max(this.done - 1, 1), wide = Math.min(Math.max(to - from, 4), most);
      this.from = Math.min(Math.max(from, 0), most - wide);
      this.to = this.from + wide;
      this.isAll = wide >= most;
      this.later();
    }
    zoomAll() { this.isAll = true; this.later(); }
    scale(factor) { const half = (this.to - this.from) / 2 * factor; this.zoom(this.batch - half, this.batch + half); }

    listen() {
      let began = null;
      const at = (event) => Math.min(Math.max(event.clientX - this.stack.getBoundingClientRect().left, this.left), this.width - RIGHT);
      this.stack.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) began = at(event);
        this.moveTo(this.batchAt(at(event)));
      });
      this.stack.addEventListener("pointermove", (event) => {
        const x = at(event);
        this.moveTo(this.batchAt(x));
        if (began === null) return;
        this.chosen.hidden = Math.abs(x - began) < 6;
        this.chosen.style.left = `${Math.min(x, began)}px`; this.chosen.style.width = `${Math.abs(x - began)}px`;
      });
      addEventListener("pointerup", (event) => {
        if (began === null) return;
        const x = at(event), from = began;
        began = null;
        this.chosen.hidden = true;
        if (Math.abs(x - from) >= 6) this.zoom(this.batchAt(Math.min(x, from)), this.batchAt(Math.max(x, from)));
      });
      this.stack.addEventListener("dblclick", () => this.zoomAll());
      this.stack.addEventListener("keydown", (event) => {
        const loss = this.series.loss;
        if (!loss || event.ctrlKey || event.metaKey || event.altKey) return;
        const step = event.shiftKey ? 10 : 1, index = nearest(loss.batches, this.batch ?? 0);
        const go = (to) => this.moveTo(loss.batches[Math.min(Math.max(to, 0), loss.batches.length - 1)], true);
        const acts = {
          ArrowLeft: () => go(index - step), ArrowRight: () => go(index + step), Home: () => go(0), End: () => go(loss.batches.length - 1),
          "+": () => this.scale(0.5), "-": () => this.scale(2), 0: () => this.zoomAll(), Escape: () => this.zoomAll(),
        };
        if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
      });
    }
  }

  /* `embed, blocks 0–3` of layers between two indexes. */
  const span = (layers, [first, last]) => {
    const names = layers.slice(first, last + 1), blocks = names.filter((name) => name.startsWith("block.")).map((name) => name.slice(6));
    const found = names.map((name) => name.startsWith("block.") ? blocks.length > 1 ? `blocks ${blocks[0]}–${blocks.at(-1)}` : `block ${blocks[0]}` : name);
    return [...new Set(found)].join(", ");
  };
  return { open: (root, picture) => new Page(root, picture) };
})();

const drawn = document.getElementById("picture");
if (drawn?.textContent.trim()) Headway.page = Headway.open(document.getElementById("page"), JSON.parse(drawn.textContent));
