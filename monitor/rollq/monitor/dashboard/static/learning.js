// The section on learning: curves over train steps or time, evaluations, changes, and a second run.

import { get } from "./api.js";
import { elapsedAxis, offsetAxis, stepAxis } from "./axes.js";
import { Cursor, LineChart, nearest } from "./charts.js";
import { bounds, choiceOf, linesOf, pointsOf, setsOf } from "./compared.js";
import { h, setText } from "./dom.js";
import { clock, number, seconds } from "./format.js";
import { headlineOf } from "./headline.js";
import { listAddress, queryOf } from "./links.js";
import { Table } from "./table.js";

const READ_MS = 5000;
const GROUPS = {
  learning: "Reward and evaluations",
  lengths: "Lengths of answers",
  optimisation: "Optimisation",
  freshness: "Freshness",
  speed: "Speed",
};
const FOLDED = ["freshness", "speed"];
const RANGES = "\u0000ranges";
const RANGES_SAID = "first range solid, second dashed; +10: 10 steps after the start of each";

export class Learning {
  /** `onCompared(isCompared)` is called when two runs, or two ranges, are compared, and when they no longer are. */
  constructor(isShown, onCompared) {
    Object.assign(this, {
      isShown,
      onCompared,
      isCompared: false,
      own: null,
      other: null,
      charts: new Map(),
      problem: null,
    });
    this.choice = choiceOf({});
    this.cursor = new Cursor((at) => this.#hold(at));
    this.cursor.watch(() => this.#say());
    this.said = h("p", { class: "note", role: "status" });
    this.headline = h("dl", { class: "facts headline" });
    this.readout = h("p", { class: "readout" });
    this.held = h("p", { class: "held" });
    this.groups = Object.fromEntries(Object.entries(GROUPS).map(([name, title]) => [name, this.#group(name, title)]));
    const [first, ...others] = Object.values(this.groups);
    this.sides = h("ul", { class: "legend", hidden: true });
    this.alone = h("p", { class: "note", hidden: true });
    this.changes = new Table(
      "Changes",
      [
        { title: "step", cell: (row) => number(row.step) },
        { title: "time", cell: (row) => clock(row.time_s * 1000) },
        { title: "task", cell: (row) => row.task || "-" },
        { title: "change", cell: (row) => row.text, long: true },
      ],
      (row) => `${row.step} ${row.task} ${row.text}`,
      { open: (row) => this.cursor.hold(this.sets[0].place(row.step, row.time_s)) },
    );
    this.changed = h("div", { class: "changed", hidden: true }, h("h3", null, "Changes"), this.changes.element);
    this.element = h(
      "section",
      { class: "part learning", "aria-label": "Learning" },
      h("div", { class: "bar" }, h("h2", null, "Learning"), this.#controls(), this.sides),
      this.said,
      this.headline,
      h("div", { class: "bar" }, this.readout, this.held),
      h("div", { class: "groups" }, first.element),
    );
    this.more = h(
      "section",
      { class: "part learning", "aria-label": "More curves", hidden: true },
      h("h2", null, "More curves"),
      h(
        "div",
        { class: "groups" },
        others.map((group) => group.element),
      ),
      this.changed,
      this.alone,
    );
    document.addEventListener("keydown", (event) => this.#onKey(event));
    setInterval(() => this.read(), READ_MS);
  }

  #group(name, title) {
    const element = h("details", { class: "group", open: !FOLDED.includes(name), hidden: true }),
      charts = h("div", { class: "charts" });
    element.append(h("summary", null, h("h3", null, title)), charts);
    element.addEventListener("toggle", () => {
      if (element.open) this.#draw();
    });
    return { element, charts };
  }

  #controls() {
    const choose = () => this.#choose();
    this.over = h(
      "select",
      { "aria-label": "Axis of the curves", onchange: choose },
      h("option", { value: "" }, "over train steps"),
      h("option", { value: "time" }, "over time"),
    );
    this.with = h("select", { "aria-label": "Compare with", onchange: choose });
    const range = (label) =>
      h("input", { "aria-label": label, placeholder: "from-to", size: 9, pattern: "\\d+-\\d+", onchange: choose });
    this.ranges = [range("First steps"), range("Second steps")];
    const said = h("span", { class: "note" }, RANGES_SAID);
    this.rangesShown = h("span", { class: "bar", hidden: true }, this.ranges[0], "and", this.ranges[1], said);
    return [this.over, this.with, this.rangesShown];
  }

  /** Show the curves that an address asks for. */
  show(query) {
    const before = this.choice;
    this.choice = choiceOf(Object.fromEntries(new URLSearchParams(query)));
    document.querySelector("nav a[data-view=run]").href = `#/${query && `?${query}`}`;
    this.over.value = this.choice.over === "time" ? "time" : "";
    this.#offer();
    this.cursor.pin(this.choice.at);
    if (before.other !== this.choice.other) this.other = null;
    this.#draw();
    this.read();
  }

  /** Offer the server's runs for comparison. */
  async #offerRuns() {
    this.runs = (await get("api/runs").catch(() => ({ runs: [] }))).runs;
    this.#offer();
  }

  #offer() {
    const { other, ranges } = this.choice,
      runs = new Set([...(this.runs ?? []), ...(other ? [other] : [])]);
    runs.delete(this.own?.run);
    const options = [["", "compare with ..."], [RANGES, "two ranges of steps"], ...[...runs].map((run) => [run, run])];
    if (options.join("\n") !== this.offered) {
      this.offered = options.join("\n");
      this.with.replaceChildren(...options.map(([value, name]) => h("option", { value }, name)));
    }
    this.with.value = other || (ranges ? RANGES : "");
    this.rangesShown.hidden = this.with.value !== RANGES;
    for (const [at, range] of (ranges ?? []).entries())
      if (this.ranges[at] !== document.activeElement) this.ranges[at].value = range.join("-");
  }

  #choose() {
    const isRanges = this.with.value === RANGES;
    if (isRanges && this.rangesShown.hidden) this.#proposeRanges();
    const [first, second] = isRanges ? this.ranges.map((field) => field.value.replaceAll(" ", "")) : [],
      query = { over: this.over.value, other: isRanges ? "" : this.with.value, first, second };
    if (isRanges && !choiceOf(query).ranges) setText(this.said, "Give two ranges of steps, such as 1-40.");
    else location.hash = `#/${queryOf(query)}`;
  }

  /** Put the held place into the address. */
  #hold(at) {
    location.hash = this.#addressAt(at);
  }

  /** The address of the current choice with `at` as the held place; null: without a held place. */
  #addressAt(at) {
    const { over, other, ranges } = this.choice,
      [first, second] = (ranges ?? []).map((range) => range.join("-"));
    return `#/${queryOf({ over: over === "time" ? over : "", other, first, second, at })}`;
  }

  /** Escape releases the held place. */
  #onKey(event) {
    if (event.key !== "Escape" || this.cursor.pinned === null || !this.isShown()) return;
    if (event.target.matches?.("input, textarea, select") || document.querySelector("dialog[open]")) return;
    this.cursor.hold(null);
  }

  /** Propose the two halves of the run as ranges. */
  #proposeRanges() {
    const [first, last] = [this.own?.steps[0] ?? 1, this.own?.steps.at(-1) ?? 2],
      middle = Math.floor((first + last) / 2);
    this.ranges[0].value = `${first}-${middle}`;
    this.ranges[1].value = `${middle + 1}-${last}`;
  }

  /** Read the curves, and draw them. Only one read runs at a time; a read that is requested during it follows. */
  async read() {
    if (!this.isShown()) return;
    if (this.isReading) {
      this.isAsked = true;
      return;
    }
    this.isReading = true;
    const { other } = this.choice,
      reads = [get("api/curves"), other ? get("api/curves", { run: other }) : null],
      [own, second] = await Promise.allSettled(reads);
    if (own.status === "fulfilled") this.own = own.value;
    if (other === this.choice.other) this.other = second.value ?? this.other;
    this.problem = [own, second]
      .map(({ reason }) => reason && `the curves cannot be read: ${reason.message}`)
      .find(Boolean);
    this.isReading = false;
    this.#draw();
    if (!this.runs) this.#offerRuns();
    if (this.isAsked) {
      this.isAsked = false;
      this.read();
    }
  }

  #draw() {
    const { own, other, choice } = this;
    setText(this.said, this.problem || this.#note());
    if (!own) return;
    this.sets = setsOf(choice, own, other);
    const axis = (choice.over === "time" ? elapsedAxis : choice.ranges ? offsetAxis : stepAxis)(...bounds(this.sets)),
      changes = choice.ranges ? [] : own.changes.map((each) => this.#tick(each)).filter(({ x }) => x >= axis.low),
      curves = own.curves.map((curve) => ({ ...curve, shown: linesOf(this.sets, this.#withOther(curve)) }));
    for (const [name, group] of Object.entries(this.groups))
      this.#drawGroup(
        group,
        curves.filter((curve) => curve.group === name && curve.shown.length),
        axis,
        changes,
      );
    this.changed.hidden = !own.changes.length;
    this.more.hidden = !own.changes.length && curves.every(({ group, shown }) => group === "learning" || !shown.length);
    this.changes.show(own.changes.toReversed());
    this.#sayCompared();
    const facts = headlineOf(own.curves, this.sets, (at) => this.#place(at));
    this.headline.replaceChildren(...facts.map(shown));
    this.#say();
  }

  /** Name the two sides that are compared, once for all charts. */
  #sayCompared() {
    const isCompared = this.sets.length > 1;
    this.sides.hidden = this.alone.hidden = !isCompared;
    this.sides.replaceChildren(
      ...this.sets.map(({ label, dash }) => h("li", null, h("i", { class: `side dash${dash}` }), label)),
    );
    setText(this.alone, `All below is of the run ${this.own.run} alone.`);
    if (isCompared === this.isCompared) return;
    this.isCompared = isCompared;
    for (const part of [this.element, this.more]) part.classList.toggle("compared", isCompared);
    this.onCompared(isCompared);
  }

  /** A chart that includes the lines that only the other run has. */
  #withOther(curve) {
    const lines = this.other?.curves.find((each) => each.name === curve.name)?.lines ?? [];
    return { ...curve, lines: [...new Set([...curve.lines, ...lines])] };
  }

  #drawGroup(group, curves, axis, changes) {
    group.element.hidden = !curves.length;
    group.element.style.setProperty("--charts", curves.length);
    const charts = curves.map((curve) => [curve, this.#chart(curve)]),
      elements = charts.map(([, chart]) => chart.element);
    if (
      elements.some((element, i) => group.charts.children[i] !== element) ||
      group.charts.children.length > elements.length
    )
      group.charts.replaceChildren(...elements);
    if (!group.element.open) return;
    for (const [curve, chart] of charts) {
      const points = curve.name === "reward" ? pointsOf(this.sets, curve.lines.length) : [];
      chart.show({ lines: [...curve.shown, ...points], axis, changes });
    }
  }

  #chart({ name, title, unit }) {
    if (!this.charts.has(name))
      this.charts.set(name, new LineChart(title, { unit, cursor: this.cursor, name: (at) => this.#place(at) }));
    return this.charts.get(name);
  }

  #tick({ step, time_s, task, text }) {
    return { x: this.sets[0].place(step, time_s), text: `step ${step}: ${task && `${task} `}${text}` };
  }

  /** A place on the axis in words. */
  #place(at) {
    const [first, second] = this.sets;
    if (this.choice.over === "time") return seconds(at);
    if (this.choice.ranges) return `steps ${first.start[0] + at} and ${second.start[0] + at}`;
    return `step ${at}`;
  }

  /** Link from the held place to the rollouts of its step (of both steps with two ranges), and to its release. */
  #sayHeld() {
    const at = this.cursor.pinned,
      own = (this.choice.ranges ? this.sets : this.sets?.slice(0, 1)) ?? [],
      steps = own
        .filter(({ xs }) => at !== null && at >= xs[0] && at <= xs.at(-1))
        .map((set) => set.steps[nearest(set.xs, at)]),
      release = this.#addressAt(null),
      shown = at === null ? "" : `${steps} ${release}`;
    if (this.held.dataset.shown === shown) return;
    this.held.dataset.shown = shown;
    this.held.replaceChildren();
    if (at === null) return;
    const links = steps.map((step) => [
      `Step ${number(step)} is held: `,
      h("a", { href: listAddress({ step }) }, "its rollouts"),
      " \u00b7 ",
    ]);
    this.held.append(...(links.length ? links.flat() : ["A place without a step is held: "]));
    this.held.append(h("a", { href: release }, "release"));
  }

  /** Show the cursor's place, its time, and the changes there. */
  #say() {
    this.#sayHeld();
    const { at } = this.cursor;
    if (at === null || !this.sets?.[0]?.xs.length) {
      setText(
        this.readout,
        "Point at a chart, or use the arrow keys: all charts show the same step. A click holds it.",
      );
      return;
    }
    const set = this.sets[0],
      i = nearest(set.xs, at);
    const found = this.choice.ranges ? [] : this.own.changes.filter((each) => this.#index(each) === i);
    const isStep = this.choice.over === "step" && !this.choice.ranges;
    const parts = [
      ...(isStep ? [] : [this.#place(at)]),
      `step ${set.steps[i]} at ${clock(set.time_s[i] * 1000)}`,
      ...found.map(({ task, text }) => `${task} ${text}`.trim()),
    ];
    setText(this.readout, parts.join(" \u00b7 "));
  }

  #index({ step, time_s }) {
    const set = this.sets[0];
    return nearest(set.xs, set.place(step, time_s));
  }

  #note() {
    const { own, choice } = this;
    if (!own) return "reading the curves ...";
    if (choice.other && !this.other) return `reading the curves of ${choice.other} ...`;
    if (own.source === "files") {
      const last = own.steps.at(-1);
      return `The server does not have the run: these curves are from the trainer's files${last ? `, up to step ${last}` : ""}.`;
    }
    return own.steps.length ? "" : "no train step has ended yet";
  }
}

/** A figure of the headline as an element. */
function shown({ name, value, notes }) {
  const notesShown = notes.map(({ text, kind = "" }) => h("span", { class: `moved ${kind}` }, text));
  return h("div", null, h("dt", null, name), h("dd", null, value, notesShown));
}
