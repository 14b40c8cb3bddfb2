const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const hidden = new Set();
const charts = [];
const COLOURS = 8;
const DASHES = 3;
const SYNC = 2; /* its colour where colours tell metrics apart */

/* An element with attributes and children; strings become text, never HTML. */
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "text", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}
const colour = (index) => `--colour: var(--c${index % COLOURS})`;
const swatch = (index) => element("span", { class: "swatch", style: colour(index) });

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1);
  return String(+value.toPrecision(size >= 1000 ? 5 : 4));
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found;
}

/* The axis of values: from zero where that does not squeeze the curves into its upper third. A few values far above all
   others do not stretch it; they leave the chart at its top, which says how far. */
function bounds(values) {
  if (!values.length) return [0, 1];
  const sorted = [...values].sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.985 * (sorted.length - 1))];
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (usual > 0 && high > 3 * usual && high - low > 3 * (usual - low)) high = 1.5 * usual;
  if (low >= 0 && low < 0.7 * high) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const pad = (high - low) * 0.06;
  const top = high <= 1 && high > 0.9 ? 1 : high + pad;
  return [low === 0 ? 0 : low - pad, top];
}

/* Gaussian mean over steps: its standard deviation is a fortieth of the longest run, the same in all. */
function smoothed(points) {
  const width = Math.max(1, Math.max(...runs.map((run) => run.steps.length)) / 40);
  return points.map(([centre], place) => {
    let sum = 0, weights = 0;
    const add = (i) => {
      const weight = Math.exp(-0.5 * ((points[i][0] - centre) / width) ** 2);
      sum += weight * points[i][1];
      weights += weight;
    };
    for (let i = place; i >= 0 && centre - points[i][0] <= 2.5 * width; i--) add(i);
    for (let i = place + 1; i < points.length && points[i][0] - centre <= 2.5 * width; i++) add(i);
    return [centre, sum / weights];
  });
}

function pointsOf(run, metric) {
  const values = run.metrics[metric] || [];
  return run.steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null && value !== undefined);
}

function syncSteps(run) {
  return pointsOf(run, "sync/count").filter(([, count], i, all) => count > (i ? all[i - 1][1] : 0)).map(([step]) => step);
}

class Chart {
  constructor(panel) {
    this.panel = panel;
    this.labels = { ...panel.metrics };
    this.metrics = this.distinct(Object.keys(panel.metrics).filter((name) => runs.some((run) => name in run.metrics)));
    this.plot = element("div", { class: "plot" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.host = element("figure", { class: "panel card" }, element("h3", {}, panel.title));
    if (panel.explains) this.host.append(element("p", { class: "explains" }, panel.explains));
    if (Object.keys(panel.metrics).length > 1) this.host.append(this.keys());
    this.host.append(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => { this.tip.hidden = true; charts.forEach((c) => c.rule(null)); });
    new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
    charts.push(this);
  }

  /* A metric that equals the first one everywhere would hide behind it: they share a curve and a label. */
  distinct([first, ...others]) {
    const equal = (name) => runs.every((run) => String(run.metrics[name]) === String(run.metrics[first]));
    const same = others.filter(equal);
    this.labels[first] = [first, ...same].map((name) => this.panel.metrics[name]).join(" = ");
    return [first, ...others.filter((name) => !same.includes(name))];
  }

  /* Its place on the panel, whether or not the others are there: its colour is the same in every run, and in plot.png. */
  place(name) { return Object.keys(this.panel.metrics).indexOf(name); }

  /* One run: a colour for each metric. Several: a colour for each run, and for each metric but the first a dash of its
     own, or a ring. */
  look(run, metric) { return runs.length > 1 ? run : metric; }

  keys() {
    const key = (label, m, mark) => element("span", {}, element("svg", {
      width: 24, height: 8, style: runs.length > 1 ? "--colour: var(--ink)" : colour(m),
    }, mark), label);
    const mark = (m) => this.panel.apart ? element("circle", { class: this.kind(m, "dot"), cx: 12, cy: 4, r: 3 }) : element("path", { class: this.kind(m), d: "M1,4H23" });
    const keys = this.metrics.map((name) => key(this.labels[name], this.place(name), mark(this.place(name))));
    if (this.panel.syncs) keys.push(key("sync", SYNC, element("path", { class: "sync", d: "M12,0V8" })));
    return element("div", { class: "keys" }, ...keys);
  }

  kind(metric, shape = "curve") { return metric && runs.length > 1 ? `${shape} further dash${(metric - 1) % DASHES}` : shape; }

  series() {
    const found = [];
    runs.forEach((run, r) => !hidden.has(r) && this.metrics.forEach((name) => {
      const points = pointsOf(run, name), m = this.place(name);
      const bars = m === 0 && this.panel.interval ? this.bars(run) : [];
      if (points.length) found.push({ r, m, points, bars, sparse: points.length < Math.max(run.steps.length / 2, 3) });
    }));
    return found;
  }

  /* Each step's interval: where it is, and its two ends. */
  bars(run) {
    const [low, high] = this.panel.interval.map((name) => new Map(pointsOf(run, name)));
    return [...low.keys()].filter((step) => high.has(step)).map((step) => [step, low.get(step), high.get(step)]);
  }

  draw() {
    const width = (this.width = this.plot.clientWidth);
    if (!width) return;
    const series = this.series();
    const rugs = this.panel.syncs ? runs.map((run, r) => r).filter((r) => !hidden.has(r)) : [];
    const height = 205 + rugs.length * 9;
    const [left, right, top, bottom] = [48, 10, 8, 24 + (rugs.length ? rugs.length * 9 + 5 : 0)];
    const last = Math.max(1, ...runs.flatMap((run) => run.steps.slice(-1)));
    const values = series.flatMap((s) => [...s.points.map((p) => p[1]), ...s.bars.flatMap((bar) => bar.slice(1))]);
    const highest = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const [low, high] = bounds(values);
    this.x = (step) => left + (step / last) * (width - left - right);
    this.y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
    this.step = (pixel) => ((pixel - left) / (width - left - right)) * last;
    this.base = height - bottom;
    const svg = element("svg", { height, role: "img", "aria-label": this.panel.title });
    for (const value of ticks(low, high, 5)) {
      svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: this.y(value), y2: this.y(value) }));
      svg.append(element("text", { x: left - 8, y: this.y(value) + 4, "text-anchor": "end" }, figure(+value.toPrecision(10))));
    }
    for (const value of ticks(0, last, Math.min(8, width / 70)).filter(Number.isInteger)) {
      const end = this.x(value) > width - right - 14 ? "end" : "middle";
      svg.append(element("text", { x: this.x(value), y: height - 6, "text-anchor": end }, figure(value)));
    }
    const curves = element("svg", { x: left, y: top, width: width - left - right, height: this.base - top, viewBox: `${left} ${top} ${width - left - right} ${this.base - top}`, class: highest > high ? "cut" : "curves" });
    if (this.panel.interval && low <= 0 && high >= 0) curves.append(element("line", { class: "zero", x1: left, x2: width - right, y1: this.y(0), y2: this.y(0) }));
    for (const one of [...series].sort((a, b) => b.m - a.m || a.r - b.r)) this.curve(curves, one);
    svg.append(curves);
    if (highest > high) svg.append(element("text", { x: width - right, y: top + 4, "text-anchor": "end" }, `↑ up to ${figure(highest)}`));
    rugs.forEach((r, row) => syncSteps(runs[r]).forEach((step) => svg.append(element("line", {
      class: "sync", style: colour(this.look(r, SYNC)), x1: this.x(step), x2: this.x(step),
      y1: this.base + 5 + row * 9, y2: this.base + 12 + row * 9,
    }))));
    this.line = element("line", { class: "rule", y1: top, y2: this.base, visibility: "hidden" });
    svg.append(this.line);
    this.plot.replaceChildren(svg, this.tip);
  }

  curve(svg, { r, m, points, bars, sparse }) {
    const style = colour(this.look(r, m));
    const place = (step) => this.x(step) + (this.panel.apart ? 5 * (r - (runs.length - 1) / 2) : 0); /* runs of one seed are judged at the same steps */
    for (const [step, low, high] of bars) svg.append(element("line", { class: "interval", style, x1: place(step), x2: place(step), y1: this.y(low), y2: this.y(high) }));
    const dots = () => points.forEach(([step, value]) => svg.append(element("circle", { class: this.kind(m, "dot"), style, cx: place(step), cy: this.y(value), r: 3 })));
    if (this.panel.apart) return dots();
    const path = (list) => list.map(([step, value], i) => {
      const [x, y] = [this.x(step).toFixed(1), this.y(value).toFixed(1)];
      return i === 0 ? `M${x},${y}` : this.panel.stepped ? `H${x}V${y}` : `L${x},${y}`;
    }).join("");
    const smooth = document.getElementById("smooth").checked && !sparse && !this.panel.stepped && points.length >= 30;
    if (smooth) svg.append(element("path", { class: `${this.kind(m)} raw`, style, d: path(points) }));
    svg.append(element("path", { class: this.kind(m), style, d: path(smooth ? smoothed(points) : points) }));
    if (sparse || points.length === 1) dots();
  }

  point(event) {
    const place = event.clientX - this.plot.getBoundingClientRect().left;
    const near = nearest(this.step(place));
    if (near === null) return;
    charts.forEach((chart) => chart.rule(near));
    this.tip.replaceChildren(element("b", { style: "margin: 0" }, `step ${near}`), ...this.readOut(near));
    this.tip.hidden = false;
    const x = this.x(near), room = this.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x < this.width / 2 ? x + 12 : x - this.tip.offsetWidth - 12))}px`;
    this.tip.style.top = "4px";
  }

  readOut(step) {
    const rows = [];
    runs.forEach((run, r) => {
      const at = run.steps.indexOf(step);
      if (hidden.has(r) || at < 0) return;
      const drawn = this.metrics.map((name) => [name, this.labels[name], colour(this.look(r, this.place(name)))]);
      const only = Object.entries(this.panel.read_out).map(([name, label]) => [name, label, "--colour: transparent"]);
      for (const [name, label, style] of [...drawn, ...only]) {
        const value = (run.metrics[name] || [])[at];
        if (value === null || value === undefined) continue;
        const many = this.metrics.length + only.length > 1;
        const said = runs.length > 1 ? (many ? `${run.name}: ${label}` : run.name) : label;
        rows.push(element("div", {}, element("span", { class: "swatch", style }), element("span", {}, said), element("b", {}, (this.panel.words[name] || {})[value] ?? figure(value))));
      }
    });
    return rows;
  }

  rule(step) {
    if (!this.line) return;
    this.line.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) ["x1", "x2"].forEach((end) => this.line.setAttribute(end, this.x(step)));
  }
}

/* The step, of any run that is shown, nearest to a place on the axis. */
function nearest(wanted) {
  let best = null;
  runs.forEach((run, r) => !hidden.has(r) && run.steps.forEach((step) => {
    if (best === null || Math.abs(step - wanted) < Math.abs(best - wanted)) best = step;
  }));
  return best;
}
