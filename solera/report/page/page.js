const byId = (id) => document.getElementById(id);
const runs = data.runs;
const last = Math.max(1, ...runs.flatMap((run) => run.steps.flatMap((steps) => steps.slice(-1))));
const SYNC = 2; /* its colour if colours distinguish metrics */

function runCard(run, r) {
  const [before, after] = run.accuracies;
  const accuracy = before
    ? [element("b", {}, percent(after[1])), element("span", { class: "soft" }, `held-out accuracy at step ${after[0]}${after[0] > before[0] ? `; ${percent(before[1])} at step ${before[0]}` : ""}`)]
    : [element("span", { class: "soft" }, "no evaluation")];
  const seconds = Object.values(run.seconds).reduce((a, b) => a + b, 0);
  const facts = Object.entries({ ...run.facts, "time in steps": duration(seconds) }).filter(([, value]) => value !== null);
  const state = `${run.learned}${run.planned ? ` of ${run.planned}` : ""} steps, ${run.finished ? "finished" : "not finished"}`;
  return element("article", { class: "run card", style: colour(r) },
    element("div", { class: "name" }, runs.length > 1 ? element("h3", {}, run.name) : "", element("span", { class: "state" }, state)),
    element("div", { class: "accuracy" }, ...accuracy),
    element("dl", { class: "facts" }, ...facts.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, figure(value))))),
    ...run.notes.map((note) => element("p", { class: "note" }, note)));
}

/* The one-sentence summary of each run, and its warnings. */
function showDiagnosis() {
  if (data.compared) byId("diagnosis").append(element("p", { class: "says" }, data.compared));
  runs.forEach((run, r) => {
    const name = runs.length > 1 ? [swatch(r), element("b", {}, `${run.name}: `)] : [];
    byId("diagnosis").append(element("p", { class: runs.length > 1 ? null : "says" }, ...name, run.diagnosis.sentence),
      ...(run.diagnosis.attention.length ? [element("ul", { class: "attention" }, ...run.diagnosis.attention.map((one) => element("li", {}, runs.length > 1 ? `${run.name}: ${one}` : one)))] : []));
  });
}

/* A metric of a run as a line to draw. */
function lineOf(panel, run, r, name, label, place) {
  const column = run.metrics[name], steps = run.steps[column.steps];
  const [low, high] = (panel.intervals[name] ?? []).map((end) => end in run.metrics ? valuesAt(run, end, steps) : undefined);
  return {
    run: r, of: runs.length > 1 ? run.name : "", name: label, colour: runs.length > 1 ? r : place, dash: place, steps, values: column.values,
    low: high && low, high: low && high, means: column.means, right: panel.right.includes(name), percent: panel.percent.includes(name),
    stepped: panel.stepped, apart: panel.apart, words: panel.words[name],
  };
}

function valuesAt(run, name, steps) {
  const column = run.metrics[name], own = run.steps[column.steps];
  const found = new Map(own.map((step, i) => [step, column.values[i]]));
  return steps.map((step) => found.get(step) ?? null);
}

/* A metric that equals the first one everywhere would be hidden behind it, so the two share a line and a label. */
function distinct(panel) {
  const names = Object.keys(panel.metrics).filter((name) => runs.some((run) => name in run.metrics));
  const same = names.slice(1).filter((name) => runs.every((run) => JSON.stringify(run.metrics[name]) === JSON.stringify(run.metrics[names[0]])));
  const first = [names[0], ...same].map((name) => panel.metrics[name]).join(" = ");
  return names.filter((name) => !same.includes(name)).map((name, i) => [name, i ? panel.metrics[name] : first]);
}

function linesOf(panel, metrics) {
  const places = Object.keys(panel.metrics);
  return metrics.flatMap(([name, label]) => runs.flatMap((run, r) => name in run.metrics ? [lineOf(panel, run, r, name, label, places.indexOf(name))] : []));
}

function chartOf(panel) {
  const marks = panel.syncs ? runs.map((run, r) => ({ run: r, colour: runs.length > 1 ? r : SYNC, steps: run.syncs })).filter((mark) => mark.steps.length) : [];
  return new Chart({ ...panel, lines: linesOf(panel, distinct(panel)), read: linesOf(panel, Object.entries(panel.read_out)), marks, last }).host;
}

/* A panel in which nothing changes is folded into one line with its values. The chart is inside. */
function flatPanel(panel) {
  const lines = linesOf(panel, distinct(panel)).map((line) => ({ ...line, said: said(line, line.values.at(-1)), name: line.name === panel.title ? "" : line.name }));
  const same = (name) => new Set(lines.filter((line) => line.name === name).map((line) => line.said)).size === 1;
  const told = new Set(lines.map((line) => [same(line.name) ? "" : line.of, line.name, line.said].filter(Boolean).join(" ")));
  return folded([element("h3", {}, panel.title), element("span", { class: "soft" }, `${[...told].join(", ")} throughout`)], () => [chartOf(panel)], { class: "flat card" });
}

function showPanels(panels, host, flat) {
  host.append(...panels.filter((panel) => !panel.flat).map(chartOf));
  flat.append(...panels.filter((panel) => panel.flat).map(flatPanel));
}

function duration(seconds) {
  if (seconds < 90) return `${seconds.toFixed(1)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function timeBars() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.seconds)))];
  if (!names.length) return;
  const longest = Math.max(...runs.map((run) => Object.values(run.seconds).reduce((a, b) => a + b, 0)));
  const rows = runs.map((run, r) => {
    const total = Object.values(run.seconds).reduce((a, b) => a + b, 0);
    const parts = names.filter((name) => run.seconds[name]).map((name) => element("span", {
      style: `${colour(names.indexOf(name))}; width: ${(100 * run.seconds[name]) / total}%`,
      title: `${name}: ${duration(run.seconds[name])}, ${Math.round((100 * run.seconds[name]) / total)} %`,
    }));
    const stack = element("div", { class: "stack", style: `width: ${(100 * total) / longest}%` }, ...parts);
    return element("div", { class: "time", "data-run": r }, element("span", { class: "label" }, run.name), stack, element("span", { class: "total" }, duration(total)));
  });
  const share = (name) => runs.length > 1 ? name : `${name} ${duration(runs[0].seconds[name])}`;
  const keys = names.map((name, i) => element("span", {}, swatch(i), share(name)));
  byId("panels").append(element("figure", { class: "times card" },
    element("h3", {}, "Where did the time go?"), element("div", { class: "keys" }, ...keys), ...rows));
}

/* What became of every token that was generated, as of the last checkpoint. */
function tokenTable() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.account)))];
  if (!names.length) return;
  const cell = (run, name) => {
    const tokens = run.account[name], share = Math.round((1000 * tokens) / run.account.generated) / 10;
    return tokens === undefined ? "–" : `${tokens.toLocaleString("en")}${name === "generated" ? "" : ` (${share} %)`}`;
  };
  const rows = names.map((name) => element("tr", {}, element("td", {}, name), ...runs.map((run) => element("td", { class: "figure" }, cell(run, name)))));
  const heads = ["tokens", ...runs.map((run) => runs.length > 1 ? run.name : "")];
  byId("panels").append(element("figure", { class: "times card" }, element("h3", {}, "What became of the tokens?"),
    element("p", { class: "soft" }, "All tokens that the engines have sampled, restarts included, as of the last checkpoint."),
    element("div", { class: "scroll" }, element("table", { class: "tokens" },
      element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {}, head)))), element("tbody", {}, ...rows)))));
}

function settingsTable(fields, withDefault) {
  const shown = (value) => (value === null || value === undefined ? "unset" : Array.isArray(value) ? `[${value.join(", ")}]` : String(value));
  const heads = ["field", ...runs.map((run) => run.name), ...(withDefault ? ["default"] : [])];
  const rows = fields.map((field) => {
    const values = [...field.values, ...(withDefault ? [field.default] : [])];
    return element("tr", { class: field.differs && fields.length === data.settings.length ? "differs" : null },
      element("td", {}, ...breakable(field.name)), ...values.map((value) => element("td", { class: value === null ? "soft" : null }, shown(value))));
  });
  return element("div", { class: "card scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {}, head)))), element("tbody", {}, ...rows)));
}

/* A long name may be broken after a dot or an underscore. */
function breakable(name) {
  return name.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]);
}

function showSettings() {
  const differing = data.settings.filter((field) => field.differs);
  const one = runs.length === 1;
  const sentence = differing.length ? (one ? "Fields that differ from their defaults:" : "Fields that differ between the runs:")
    : (one ? "Every field has its default." : "The runs have the same settings.");
  byId("differences").append(element("p", { class: "soft", style: "margin-bottom: 8px" }, sentence));
  if (differing.length) byId("differences").append(settingsTable(differing, one));
  byId("config").append(settingsTable(data.settings, true));
}

function showCurves() {
  showPanels(data.panels, byId("panels"), byId("flat"));
  byId("curves").hidden = !data.panels.length && !data.other.length;
  byId("smooth").addEventListener("input", () => { view.smooth = byId("smooth").checked; redraw(); });
  timeBars(); tokenTable();
  if (!data.other.length) return;
  byId("other").append(folded([`All other metrics (${data.other.length})`], () => {
    const [grid, flat] = [element("div", { class: "panels small" }), element("div", { class: "flats" })];
    showPanels(data.other, grid, flat);
    return [grid, flat];
  }));
}

function showPage() {
  const title = runs.length > 3 ? `${runs.length} runs compared` : runs.map((run) => run.name).join(" · ");
  byId("title").textContent = title;
  document.title = `${title} – Solera report`;
  byId("footer").textContent = `Made ${data.made} by solera report. Charts by uPlot ${data.uplot} (MIT licence).`;
  showDiagnosis();
  byId("runs").append(...runs.map(runCard));
  showCurves();
  const groups = new Groups(byId("groups"));
  if (runs.length > 1) chips(byId("legend"), runs.map((run) => run.name), (r) => {
    byId("runs").children[r].classList.toggle("off", hidden.has(r));
    groups.show();
  });
  showSettings();
  themeButton();
}
showPage();
