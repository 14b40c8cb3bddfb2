const byId = (id) => document.getElementById(id);

function runCard(run, r) {
  const [before, after] = run.accuracies;
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const accuracy = before
    ? [element("b", {}, percent(after[1])), element("span", { class: "soft" }, `held-out accuracy at step ${after[0]}${after[0] > before[0] ? `; ${percent(before[1])} at step ${before[0]}` : ""}`)]
    : [element("span", { class: "soft" }, "no evaluation")];
  const seconds = Object.values(run.seconds).reduce((a, b) => a + b, 0);
  const facts = { ...run.facts, "time in steps": duration(seconds) };
  const state = `${run.learned}${run.planned ? ` of ${run.planned}` : ""} steps, ${run.finished ? "finished" : "not finished"}`;
  return element("article", { class: "run card", style: colour(r) },
    element("div", { class: "name" }, runs.length > 1 ? element("h3", {}, run.name) : "", element("span", { class: "state" }, state)),
    element("div", { class: "accuracy" }, ...accuracy),
    element("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, figure(value))))),
    ...run.notes.map((note) => element("p", { class: "note" }, note)));
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

function legend(groups) {
  if (runs.length > 1) runs.forEach((run, r) => {
    const chip = element("button", { class: "chip", type: "button", title: "Show or hide this run", "aria-pressed": "true" }, swatch(r), run.name);
    byId("legend").append(chip);
    chip.addEventListener("click", () => {
      if (!hidden.delete(r)) hidden.add(r);
      chip.setAttribute("aria-pressed", String(!hidden.has(r)));
      byId("runs").children[r].classList.toggle("off", hidden.has(r));
      charts.forEach((chart) => chart.draw());
      groups.show();
    });
  });
}

function themeButton() {
  const order = ["system", "light", "dark"];
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" }[name];
  };
  byId("theme").addEventListener("click", () => set(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
  set("system");
}

function showPage() {
  const title = runs.length > 3 ? `${runs.length} runs compared` : runs.map((run) => run.name).join(" · ");
  byId("title").textContent = title;
  document.title = `${title} – Solera report`;
  byId("footer").textContent = `Made ${data.made} by solera report.`;
  byId("runs").append(...runs.map(runCard));
  byId("panels").append(...data.panels.map((panel) => new Chart(panel).host));
  byId("other").hidden = !data.other.length;
  byId("other").firstElementChild.textContent = `All other metrics (${data.other.length})`;
  byId("other").lastElementChild.append(...data.other.map((panel) => new Chart(panel).host));
  byId("smooth").addEventListener("input", () => charts.forEach((chart) => chart.draw()));
  byId("curves").hidden = !data.panels.length && !data.other.length;
  timeBars();
  legend(new Groups(byId("groups")));
  showSettings();
  themeButton();
}
showPage();
