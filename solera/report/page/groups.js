const AT_ONCE = 16;
const SORTS = {
  step: ["step", "latest first", "earliest first"],
  spread: ["spread of rewards", "largest first", "smallest first"],
  age: ["age", "oldest first", "newest first"],
  longest: ["length", "longest first", "shortest first"],
};

const AUTHORS = { policy: "policy", greedy: "policy, greedy (not trained on)", tool: "tool", environment: "environment", prompt: "prompt, rendered anew", given: "given" };

/* The list of groups. Everything that a model wrote is inserted as text, never as HTML. */
class Groups {
  constructor(host) {
    this.all = runs.flatMap((run, r) => run.groups.map((group) => ({ ...group, r, ...this.spread(group) })));
    this.range = runs.map((run) => run.groups.flatMap((group) => group.members).reduce(
      ([low, high], m) => [Math.min(low, m.reward ?? 0), Math.max(high, m.reward ?? 0)], [0, 1e-9]));
    this.list = element("div", { class: runs.length > 1 ? "several" : null });
    this.more = element("button", { class: "chip", type: "button", style: "margin-top: 10px" });
    this.more.addEventListener("click", () => { this.limit += AT_ONCE; this.show(); });
    this.count = element("p", { class: "soft" });
    if (!this.all.length) return host.append(element("p", { class: "soft" }, "There are no groups in this page."));
    const steps = [...new Set(this.all.map((group) => group.step))].sort((a, b) => a - b);
    this.run = this.select("Run", runs.map((run, r) => [r, run.name]), "all runs");
    this.step = this.select("Step", steps.map((step) => [step, `step ${step}`]), "all steps");
    this.differ = element("input", { type: "checkbox" });
    this.search = element("input", { type: "search", placeholder: "search prompts and responses", "aria-label": "Search" });
    const filters = element("div", { class: "filters" }, this.step, this.search, element("label", {}, this.differ, "only groups that differ"));
    if (runs.length > 1) filters.prepend(this.run);
    filters.addEventListener("input", () => { this.limit = AT_ONCE; this.show(); });
    host.append(element("p", { class: "soft", style: "margin-bottom: 10px" }, this.explained()), filters, this.sorting(), this.count, this.list, this.more);
    this.limit = AT_ONCE;
    this.show();
  }

  /* Buttons that sort the groups. A second press reverses the order. */
  sorting() {
    this.by = { key: "step", down: true };
    this.buttons = Object.entries(SORTS).map(([key, [label]]) => {
      const button = element("button", { class: "chip", type: "button", "data-sort": key }, label);
      button.addEventListener("click", () => {
        this.by = { key, down: this.by.key === key ? !this.by.down : true };
        this.show();
      });
      return button;
    });
    return element("div", { class: "sorts", role: "group", "aria-label": "Sort groups" }, element("span", { class: "soft" }, "Sort by"), ...this.buttons);
  }

  showSorting() {
    for (const button of this.buttons) {
      const [label, down, up] = SORTS[button.dataset.sort], chosen = button.dataset.sort === this.by.key;
      button.setAttribute("aria-pressed", String(chosen));
      button.textContent = chosen ? `${label}: ${this.by.down ? `${down} ↓` : `${up} ↑`}` : label;
    }
  }

  explained() {
    const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
    const taken = runs.map((run) => many(run.groups.length, "group") + (runs.length > 1 ? ` of ${run.name}` : "")
      + ` from ${many(new Set(run.groups.map((group) => group.step)).size, "step")}`);
    return `A sample: ${taken.join(", ")}, evenly spaced. From each step, mostly groups whose rewards differ. ` +
      "Each bar is a response: its height is the reward; blue means an advantage above 0, orange below 0, grey none. The number is the mean reward ± its standard deviation in the group.";
  }

  spread(group) {
    const rewards = group.members.map((m) => m.reward).filter((reward) => reward !== null);
    const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
    const ages = group.members.map((m) => m.age).filter((age) => age !== null);
    return {
      mean: rewards.length ? mean : null,
      spread: Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length || 1)),
      age: ages.length ? Math.max(...ages) : null,
      ages: [...new Set([Math.min(...ages), Math.max(...ages)])].join("–"),
      longest: Math.max(...group.members.map((m) => m.length)),
      text: [group.prompt, group.key, group.expected ?? "", ...group.members.flatMap((m) => m.turns.map((turn) => turn.text))].join("\n").toLowerCase(),
    };
  }

  select(label, options, all) {
    const made = options.map(([value, name]) => element("option", { value }, name));
    return element("select", { "aria-label": label }, element("option", { value: "" }, all), ...made);
  }

  show() {
    if (!this.search) return;
    const words = this.search.value.toLowerCase();
    const shown = this.all.filter((group) => !hidden.has(group.r)
      && (this.run.value === "" || group.r === +this.run.value)
      && (this.step.value === "" || group.step === +this.step.value)
      && (!this.differ.checked || group.differs)
      && group.text.includes(words));
    const { key, down } = this.by;
    shown.sort((a, b) => (down ? 1 : -1) * ((b[key] ?? -1) - (a[key] ?? -1)) || b.step - a.step || a.r - b.r);
    this.showSorting();
    this.count.textContent = shown.length === this.all.length ? "" : `${shown.length} of ${this.all.length} groups`;
    this.list.replaceChildren(...shown.slice(0, this.limit).map((group) => this.card(group, words)));
    this.more.hidden = shown.length <= this.limit;
    this.more.textContent = `Show more (${shown.length - this.limit})`;
  }

  card(group, words) {
    const [low, high] = this.range[group.r];
    const bars = group.members.map((m) => element("i", {
      class: this.side(m.advantage), style: `height: ${(100 * ((m.reward ?? low) - low)) / (high - low)}%`,
    }));
    const age = group.age === null ? "" : ` · age ${group.ages}`;
    const whose = runs.length > 1 ? ` · ${runs[group.r].name}` : "";
    const summary = element("summary", {},
      element("span", { class: "soft when" }, `step ${group.step}${whose}`),
      element("span", { class: "opening" }, ...marked(opening(group), words)),
      element("span", { class: "expected" }, ...(group.expected === null ? [] : ["expected ", element("b", {}, ...marked(group.expected, words))])),
      element("span", { class: "bars", "aria-hidden": "true" }, ...bars),
      element("span", { class: "mean" }, `${figure(group.mean)} ± ${figure(group.spread)}${age}`),
      element("span", { class: `tag${group.masked || !group.differs ? "" : " no"}` }, group.masked ? "masked" : "all equal"));
    const details = element("details", { class: "group card", style: colour(group.r) }, summary);
    details.addEventListener("toggle", () => details.children.length === 1 && details.append(this.inside(group, words)), { once: true });
    return details;
  }

  side(advantage) { return advantage === null || advantage === 0 ? "" : advantage > 0 ? "up" : "down"; }

  inside(group, words) {
    const heads = ["response", "reward", "advantage", "age", "version", "finish", "tokens", "origin"];
    const members = together(group.members).sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    const largest = Math.max(...members.map((m) => Math.abs(m.advantage ?? 0)), 1e-9);
    return element("div", { class: "inside" },
      element("pre", { class: "prompt" }, ...marked(group.prompt, words)),
      ...(group.expected === null ? [] : [element("p", { class: "answer" }, "Expected answer: ", element("span", { class: "text" }, ...marked(group.expected, words)))]),
      element("table", { class: "members" },
        element("thead", {}, element("tr", {}, ...heads.map((head, i) => element("th", { class: i ? "figure" : null }, head)))),
        element("tbody", {}, ...members.map((m) => this.member(m, largest, words)))));
  }

  member(m, largest, words) {
    const advantage = element("span", { class: "advantage" },
      element("i", { class: this.side(m.advantage), style: `--size: ${Math.abs(m.advantage ?? 0) / largest}` }),
      m.advantage === null ? "none" : figure(m.advantage));
    const parts = Object.entries(m.parts).map(([part, value]) => element("div", { class: "soft" }, `${part} ${figure(value)}`));
    const cell = (label, ...content) => element("td", { class: "figure", "data-label": label }, ...content);
    return element("tr", {}, element("td", {}, this.text(m, words)),
      cell("reward", m.reward === null ? "none" : figure(m.reward), ...parts), cell("advantage", advantage), cell("age", figure(m.age)),
      cell("version", m.versions.join("–") || "–"), cell("finish", m.finish), cell("tokens", figure(m.length)), cell("origin", m.origin));
  }

  /* What one version of the weights wrote. Neighbouring parts are shaded differently. */
  part(version, text, i, words) {
    return [element("sup", { class: "version" }, `v${version}`),
      element("span", { class: i % 2 ? "part odd" : "part", title: `written by version ${version}` }, ...marked(text, words))];
  }

  /* An episode of several turns: who wrote each, its tokens, its rewards, and the calls that it answers. */
  episode(m, words) {
    return element("ol", { class: "turns" }, ...m.turns.map((turn, t) => {
      const calls = turn.calls ? [`${turn.calls} call${turn.calls === 1 ? "" : "s"}`] : [];
      const failed = turn.failed ? [element("span", { class: "failed" }, `${turn.failed} failed`)] : [];
      const rewards = Object.entries(turn.rewards).map(([part, value]) => element("span", { class: "earned" }, `${part} ${figure(value)}`));
      const about = [`${turn.tokens} token${turn.tokens === 1 ? "" : "s"}`, ...calls, ...failed, ...rewards];
      return element("li", { class: `turn ${turn.author}` },
        element("div", { class: "who" }, element("b", {}, AUTHORS[turn.author] ?? turn.author), ...about.flatMap((one) => [" · ", one])),
        element("pre", { class: "text" }, ...this.spoken(m, turn, t, words)));
    }), ...(m.times > 1 ? [element("li", {}, element("span", { class: "tag" }, `× ${m.times}`))] : []));
  }

  spoken(m, turn, t, words) {
    if (!turn.text) return [element("span", { class: "empty" }, "(empty)")];
    return m.by_version[t]?.length ? m.by_version[t].flatMap((part, i) => this.part(...part, i, words)) : marked(turn.text, words);
  }

  text(m, words) {
    if (m.turns.length > 1) return this.episode(m, words);
    const turns = m.turns.map((turn, t) => element("span", { class: turn.written ? null : "given" },
      ...(m.by_version[t]?.length ? m.by_version[t].flatMap((part, i) => this.part(...part, i, words)) : marked(turn.text, words))));
    if (!m.turns.some((turn) => turn.text)) turns.push(element("span", { class: "empty" }, "(empty)"));
    if (m.times > 1) turns.push(element("span", { class: "tag" }, `× ${m.times}`));
    return element("pre", { class: "text" }, ...turns);
  }
}

/* Join responses that differ only in their id in the store, and count them. */
function together(members) {
  const found = new Map();
  for (const m of members) {
    const same = JSON.stringify({ ...m, id: null });
    found.set(same, { ...m, times: (found.get(same)?.times ?? 0) + 1 });
  }
  return [...found.values()];
}

/* Show the end of a prompt, because a chat template gives all prompts the same beginning. */
function opening(group) {
  const line = group.prompt.replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").trim();
  return line.length > 80 ? `…${line.slice(-80)}` : line;
}

function marked(text, words) {
  if (!words) return [text];
  const found = [], low = text.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(words); at >= 0; at = low.indexOf(words, from)) {
    found.push(text.slice(from, at), element("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...found, text.slice(from)];
}
