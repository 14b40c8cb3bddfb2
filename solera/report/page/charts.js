/* Charts over steps, drawn by uPlot. A page gives each chart its lines. All charts share which runs are hidden, whether
   lines are smoothed, and the step under the pointer. A line: {name, of, colour, dash, steps, values} and, where they apply, low and high (ends of an
   interval), means (steps and values to smooth), right, percent, stepped, apart, words. */
const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const charts = [];
const COLOURS = 8;
const HEIGHT = 215;
const MARK = 9;
const FEW = 60;
const view = { smooth: true };

/* An element with attributes and children; strings become text, never HTML. */
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/* Eight colours that colour-blind people can tell apart, then others around the wheel: no two are equal. */
function hue(index) {
  const turn = Math.round(index * 137.5) % 360;
  return index < COLOURS ? `var(--c${index})` : `light-dark(oklch(0.5 0.15 ${turn}), oklch(0.78 0.13 ${turn}))`;
}
const colour = (index) => `--colour: ${hue(index)}`;
const swatch = (index) => element("span", { class: "swatch", style: colour(index) });

/* A canvas needs plain colours, so ask which colour the page's style currently gives. */
function paint(css, alpha = 1) {
  const probe = document.getElementById("paint");
  probe.style.color = css;
  const found = getComputedStyle(probe).color;
  return alpha === 1 ? found : `color-mix(in srgb, ${found} ${100 * alpha}%, transparent)`;
}

/* The dash of the n-th metric of a chart. No two are equal: a line, dashes, dots, then dashes with one more dot each. */
function dash(index) {
  const dots = (count) => Array.from({ length: count }, () => [2, 3]).flat();
  return index === 0 ? [] : index === 1 ? [8, 4] : index === 2 ? [2, 3] : [9, 3, ...dots(index - 2)];
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1);
  return String(+value.toPrecision(size >= 1000 ? 5 : 4));
}
/* Two digits below 10 %, because the marks of an axis may be a quarter of a percent apart. */
const percent = (value) => (value === null || value === undefined ? "–" : `${+(100 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 1)} %`);
const said = (line, value) => line.words?.[value] ?? (line.percent ? percent(value) : figure(value));

const MANY = 50;
/* The range of the axis of values. It starts at zero, unless that would squeeze the curves into the upper third. A few
   of many values, far above all others, do not extend it; the top of the chart shows how high they go. */
function bounds(values, share) {
  if (!values.length) return [0, 1];
  const sorted = values.sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.985 * (sorted.length - 1))];
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length >= MANY && usual > 0 && high > 3 * usual && high - low > 3 * (usual - low)) high = 1.5 * usual;
  if (low >= 0 && (low < 0.7 * high || share)) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const pad = (high - low) * 0.06;
  const top = high <= 1 && high > 0.9 ? 1.02 : high + pad;
  return [low === 0 ? 0 : low - pad, top];
}

/* Whether an axis should be logarithmic: all values are positive, and most of them span two decades. */
function decades(values) {
  const sorted = values.sort((a, b) => a - b), at = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  return sorted.length > 1 && sorted[0] > 0 && at(0.98) >= 100 * at(0.02);
}

/* Most decades of a logarithmic axis. What is smaller is mostly rounding. */
const DECADES = 6;
/* The powers of ten among the marks of an axis, and no more than seven of them. A filter of uPlot. */
function powers(u, splits) {
  const power = (value) => (value > 0 && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? Math.round(Math.log10(value)) : null);
  const found = splits.map(power).filter((each) => each !== null), every = Math.ceil(found.length / 7);
  return splits.map((value) => (power(value) !== null && (found.at(-1) - power(value)) % every === 0 ? value : null));
}

/* Gaussian mean over steps. */
function smoothed([steps, values], width) {
  return [steps, steps.map((centre, place) => {
    let sum = 0, weights = 0;
    const add = (i) => {
      const weight = Math.exp(-0.5 * ((steps[i] - centre) / width) ** 2);
      sum += weight * values[i];
      weights += weight;
    };
    for (let i = place; i >= 0 && centre - steps[i] <= 2.5 * width; i--) add(i);
    for (let i = place + 1; i < steps.length && steps[i] - centre <= 2.5 * width; i++) add(i);
    return sum / weights;
  })];
}

/* Index of the step nearest to the wanted one. */
function nearest(steps, wanted) {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
}

/* A line as it is drawn, for legends. */
function sample(line, css) {
  const style = `--colour: ${css}`;
  if (line.apart) return element("svg", { width: 14, height: 10, style }, element("circle", { class: line.dash ? "dot ring" : "dot", cx: 7, cy: 5, r: 3.5 }));
  return element("svg", { width: 30, height: 10, style }, element("path", { class: "sample", d: "M1,5H29", "stroke-dasharray": dash(line.dash).join(" ") }));
}

class Chart {
  /* lines: what is drawn; read: lines shown at the pointer only; marks: [{colour, run, steps}] below the axis;
     range: of the left axis, where it is fixed; last: the step at which all charts of the page end. */
  constructor({ title, explains = "", lines, read = [], marks = [], axes = ["", ""], range = null, last }) {
    Object.assign(this, { title, lines: lines.filter((line) => line.steps.length), read, marks, axes, range, last });
    this.several = new Set(this.lines.map((line) => line.of)).size > 1;
    this.plot = element("div", { class: "plot", role: "img", "aria-label": this.spoken() });
    this.tip = element("div", { class: "tip", hidden: true });
    this.scaleNote = element("span", { class: "tag", hidden: true }, "log scale");
    this.host = element("figure", { class: "panel card" }, element("h3", {}, title, " ", this.scaleNote));
    if (explains) this.host.append(element("p", { class: "explains" }, explains));
    this.host.append(this.legend(), this.plot);
    new ResizeObserver(() => this.fit()).observe(this.plot);
    charts.push(this);
  }

  spoken() {
    const end = (line, at) => `${said(line, line.values.at(at))} at step ${line.steps.at(at)}`;
    const told = this.lines.map((line) => `${[line.of, line.name].filter(Boolean).join(", ")}: ${end(line, 0)}, ${end(line, -1)}`);
    return `${this.title} ${told.join("; ")}`;
  }

  /* The legend: a sample of each line with its value at the pointer, or its last value. Ordered by metric, then by run. */
  legend() {
    this.values = new Map(this.lines.map((line) => [line, element("output", {})]));
    const names = [...new Set(this.lines.map((line) => line.name))];
    const alone = names.length === 1;
    const keys = names.map((name) => {
      const same = this.lines.filter((line) => line.name === name);
      const value = (line) => element("span", { class: "value", "data-run": line.run, title: line.of },
        ...(alone && this.several ? [sample(line, hue(line.colour)), line.of] : this.several ? [swatch(line.colour)] : []), this.values.get(line));
      const head = alone && this.several ? [] : [sample(same[0], this.several ? "var(--ink)" : hue(same[0].colour)), name];
      return element("span", { class: "key" }, ...head, ...same.map(value));
    });
    if (this.marks.some((mark) => mark.steps.length)) keys.push(element("span", { class: "key" }, element("svg", { width: 8, height: 10, style: `--colour: ${this.several ? "var(--ink)" : hue(this.marks[0].colour)}` }, element("path", { class: "sample", d: "M4,0V10" })), "sync"));
    this.at = element("span", { class: "at soft" });
    return element("div", { class: "keys" }, ...keys, this.at);
  }

  shown() { return this.lines.filter((line) => !hidden.has(line.run)); }

  /* Values of an axis at the steps that are shown. */
  visible(right, scale) {
    const within = (step) => scale?.min == null || (step >= scale.min && step <= scale.max);
    const found = [];
    for (const line of this.shown()) {
      if (!!line.right !== right) continue;
      for (const values of [line.values, line.low, line.high]) values?.forEach((value, i) => value !== null && within(line.steps[i]) && found.push(value));
    }
    return found;
  }

  draw() {
    this.uplot?.destroy();
    this.uplot = null;
    if (!this.plot.clientWidth) return;
    this.log = [false, true].map((right) => (right || !this.range) && !this.shown().some((line) => line.percent && !!line.right === right) && decades(this.visible(right)));
    this.scaleNote.hidden = !this.log.some(Boolean);
    const tables = [[[0, this.last], [null, null]]], series = [{}, { show: false, scale: "y" }], bands = [];
    for (const line of [...this.shown()].sort((a, b) => b.dash - a.dash)) this.add(line, tables, series, bands);
    this.uplot = new uPlot(this.options(series, bands), uPlot.join(tables), this.plot);
    this.plot.append(this.tip);
    this.tell(null);
  }

  add(line, tables, series, bands) {
    const common = { scale: line.right ? "right" : "y", spanGaps: true, points: { show: false } };
    const put = (table, options) => { tables.push(table); return series.push({ ...common, ...options }) - 1; };
    const css = hue(line.colour), count = line.steps.length;
    const few = count < 3 || (count <= FEW && count < this.last / 4); /* draw each value as a point on the line */
    if (line.apart) return put([line.steps, line.values], { paths: () => null });
    if (line.low) {
      const ends = [line.high, line.low].map((end) => put([line.steps, end], { stroke: "transparent", width: 0 }));
      bands.push({ series: ends, fill: () => paint(css, 0.2) });
    }
    const paths = line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    const smooth = view.smooth && !line.stepped && !few && count >= 30;
    if (smooth && !(line.dash && this.several)) put([line.steps, line.values], { stroke: () => paint(css, 0.35), width: 1 });
    const width = Math.max(1, this.last / 40);
    const table = smooth ? smoothed(line.means ?? [line.steps, line.values], width) : [line.steps, line.values];
    put(table, { stroke: () => paint(css), width: 2, dash: dash(line.dash), paths, points: { show: few, size: 6, width: 1, stroke: () => paint(css), fill: () => paint(css) } });
  }

  options(series, bands) {
    const rows = this.marks.filter((mark) => !hidden.has(mark.run)).length;
    const soft = () => paint("var(--soft)"), faint = { stroke: () => paint("var(--line)"), width: 1 };
    const font = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
    const used = [false, true].map((right) => this.lines.some((line) => !!line.right === right));
    const share = (right) => this.lines.some((line) => line.percent && !!line.right === right);
    const axis = (right) => ({
      scale: right ? "right" : "y", side: right ? 1 : 3, stroke: soft, font, ticks: { show: false }, gap: 6,
      grid: right && used[0] ? { show: false } : this.log[+right] ? { ...faint, filter: powers } : faint,
      filter: this.log[+right] ? powers : undefined, label: used[0] && used[1] ? this.axes[+right] : undefined, labelSize: 16, labelGap: 2, labelFont: font,
      values: (u, splits) => splits.map((value) => (value === null ? "" : share(right) ? percent(value) : figure(+value.toPrecision(10)))),
      size: (u, values) => 12 + 6.5 * Math.max(3, ...(values ?? []).map((value) => value.length)),
    });
    const range = (right) => (u, low, high) => this.range && !right ? this.range : this.log[+right] ? uPlot.rangeLog(Math.max(low ?? 0.1, (high ?? 1) / 10 ** DECADES), high ?? 1, 10, true) : bounds(this.visible(right, u.scales.x), share(right));
    return {
      width: this.plot.clientWidth, height: HEIGHT + MARK * rows, series, bands, legend: { show: false }, padding: [8, used[1] ? 0 : 12, 0, 0],
      scales: { x: { time: false }, y: { distr: this.log[0] ? 3 : 1, range: range(false) }, right: { distr: this.log[1] ? 3 : 1, range: range(true) } },
      axes: [
        { stroke: soft, font, grid: { show: false }, ticks: { show: false }, gap: 4 + MARK * rows, size: 22 + MARK * rows, label: "step", labelSize: 15, labelGap: -2, labelFont: font,
          incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7].map((power) => n * 10 ** power)).sort((a, b) => a - b), values: (u, splits) => splits.map(figure) },
        ...[false, true].filter((right) => used[+right]).map(axis),
      ],
      cursor: { y: false, points: { show: false }, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false } },
      hooks: { draw: [(u) => this.over(u)], setCursor: [(u) => this.tell(u.cursor.left >= 0 ? u.data[0][u.cursor.idx] : null)] },
    };
  }

  /* Draw what uPlot does not: points with their intervals, marks of syncs, and how high values go that are cut off. */
  over(u) {
    const { ctx } = u, ratio = uPlot.pxRatio, x = (step) => u.valToPos(step, "x", true);
    const { left, top, width, height } = u.bbox, [first, final] = [u.scales.x.min, u.scales.x.max];
    ctx.save();
    const stroke = (css, x1, y1, x2, y2, size = 1.5) => { ctx.strokeStyle = paint(css); ctx.lineWidth = size * ratio; ctx.beginPath(); ctx.moveTo(x1, y1); ctx.lineTo(x2, y2); ctx.stroke(); };
    this.marks.filter((mark) => !hidden.has(mark.run)).forEach((mark, row) => mark.steps.forEach((step) => {
      if (step >= first && step <= final) stroke(hue(mark.colour), x(step), top + height + (3 + MARK * row) * ratio, x(step), top + height + (MARK + MARK * row) * ratio);
    }));
    const apart = this.shown().filter((line) => line.apart), zero = u.valToPos(0, "y", true);
    if (apart.some((line) => line.low) && zero >= top && zero <= top + height) stroke("var(--soft)", left, zero, left + width, zero, 1);
    const runs = [...new Set(apart.map((line) => line.run))]; /* runs with the same seed are judged at the same steps, so draw them side by side */
    const rim = 5 * ratio; /* so that dots at the edge are not cut off */
    ctx.beginPath(); ctx.rect(left - rim, top - rim, width + 2 * rim, height + 2 * rim); ctx.clip();
    for (const line of apart) line.steps.forEach((step, i) => step >= first && step <= final && this.dot(u, line, i, x(step) + 5 * ratio * (runs.indexOf(line.run) - (runs.length - 1) / 2), stroke));
    [false, true].forEach((right) => {
      const scale = u.scales[right ? "right" : "y"], highest = this.visible(right, u.scales.x).reduce((a, b) => Math.max(a, b), -Infinity);
      if (!(highest > scale.max)) return;
      Object.assign(ctx, { fillStyle: paint("var(--soft)"), font: `${11.5 * ratio}px system-ui, sans-serif`, textAlign: "right", textBaseline: "top" });
      ctx.fillText(`↑ up to ${figure(highest)}`, left + width - 2 * ratio, top + 2 * ratio);
    });
    ctx.restore();
  }

  dot(u, line, i, x, stroke) {
    const y = (value) => u.valToPos(value, "y", true), { ctx } = u, css = hue(line.colour);
    if (line.low && line.low[i] !== null && line.high[i] !== null) stroke(css, x, y(line.low[i]), x, y(line.high[i]));
    ctx.beginPath();
    ctx.arc(x, y(line.values[i]), 3.5 * uPlot.pxRatio, 0, 2 * Math.PI);
    ctx.fillStyle = paint(line.dash ? "var(--card)" : css);
    ctx.fill();
    if (line.dash) { ctx.strokeStyle = paint(css); ctx.lineWidth = 1.5 * uPlot.pxRatio; ctx.stroke(); }
  }

  /* Show the values at a step in the legend and the read-out. Without a step, show the last values. */
  tell(step) {
    this.at.textContent = step === null || step === undefined ? "" : `step ${figure(step)}`;
    for (const [line, output] of this.values) {
      output.textContent = hidden.has(line.run) ? "" : this.valueAt(line, step);
      output.parentElement.hidden = hidden.has(line.run);
    }
    const rows = step == null ? [] : this.read.filter((line) => !hidden.has(line.run)).flatMap((line) => {
      const place = line.steps.indexOf(step);
      return place < 0 ? [] : [element("div", {}, element("span", {}, [this.several ? line.of : "", line.name].filter(Boolean).join(": ")), element("b", {}, said(line, line.values[place])))];
    });
    this.tip.replaceChildren(...rows);
    this.tip.hidden = !rows.length || !this.plot.matches(":hover");
    this.tip.classList.toggle("left", (this.uplot?.cursor.left ?? 0) > this.plot.clientWidth / 2);
  }

  valueAt(line, step) {
    const place = step == null ? line.steps.length - 1 : nearest(line.steps, step);
    const interval = line.low && line.low[place] !== null && line.high[place] !== null && line.low[place] !== line.high[place] ? ` (${said(line, line.low[place]).replace(" %", "")} to ${said(line, line.high[place])})` : "";
    const elsewhere = step != null && line.steps[place] !== step ? ` at ${figure(line.steps[place])}` : "";
    return said(line, line.values[place]) + interval + elsewhere;
  }

  fit() {
    const width = this.plot.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    if (this.uplot) this.uplot.setSize({ width, height: this.uplot.height }); else this.draw();
  }
}

const redraw = () => charts.forEach((chart) => chart.draw());

/* A folded chart is drawn only when it is opened. */
function folded(summary, make, attributes = {}) {
  const details = element("details", attributes, element("summary", {}, ...summary));
  details.addEventListener("toggle", () => details.append(...make()), { once: true });
  return details;
}

function themeButton() {
  const order = ["system", "light", "dark"], button = document.getElementById("theme");
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" }[name];
    redraw();
  };
  button.addEventListener("click", () => set(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  set("system");
}

/* Buttons that show and hide the runs, or the cells of a sweep. */
function chips(host, names, changed = () => {}) {
  names.forEach((name, index) => {
    const chip = element("button", { class: "chip", type: "button", title: "Show or hide", "aria-pressed": "true" }, swatch(index), name);
    host.append(chip);
    chip.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      chip.setAttribute("aria-pressed", String(!hidden.has(index)));
      redraw();
      changed(index);
    });
  });
}
