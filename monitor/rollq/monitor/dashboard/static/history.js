// The section of the buffer: how many groups there are, how fast they come and go, over the last hour or day.

import { get } from "./api.js";
import { clockAxis } from "./axes.js";
import { BarChart } from "./bars.js";
import { Cursor, LineChart } from "./charts.js";
import { h, setText } from "./dom.js";
import { clock, number } from "./format.js";

const HISTORY_MS = 10_000,
  MOST_POINTS = 360;
/** The statuses that are drawn, from the bottom; and the statuses of groups that are only kept for inspection. */
const SHOWN = ["completed", "claimed", "running", "pending", "aborted", "expired", "gathered", "cooling", "leaving"];
const KEPT = ["failed", "filtered"];

export class BufferHistory {
  /** `onRead(history)` is called after each read. */
  constructor(isShown, onRead) {
    Object.assign(this, { isShown, onRead, status: null, history: null });
    this.swaps = new Swaps();
    this.task = h("select", { "aria-label": "Task of the charts", onchange: () => this.#draw() });
    this.minutes = h(
      "select",
      { "aria-label": "Time of the charts", onchange: () => this.read() },
      [
        ["60", "last hour"],
        ["360", "last 6 hours"],
        ["1440", "last day"],
      ].map(([value, name]) => h("option", { value }, name)),
    );
    const cursor = new Cursor(),
      chart = (title, unit, note, more = {}) => new LineChart(title, { unit, note, cursor, name: clock, ...more });
    this.charts = {
      depth: chart("Groups by status", "groups", "one above the other", { isStacked: true, least: 1 }),
      groups: chart("Groups per second", "groups/s", "mean of a minute"),
      tokens: chart("Tokens per second", "tokens/s", "mean of a minute"),
      times: chart("Time of a group", "s", "mean of a minute"),
      reward: chart("Reward", "", "mean of finished samples"),
      staleness: chart("Staleness", "steps", "mean of trained groups"),
      ready: new BarChart("Ready groups by staleness", "groups", "now"),
      pauses: chart("Pause of a swap", "s", "since the page was opened"),
    };
    this.said = h("span", { class: "note" });
    this.element = h(
      "details",
      { class: "part" },
      h("summary", null, h("h2", null, "Buffer"), this.said),
      h("div", { class: "bar" }, this.task, this.minutes),
      h(
        "div",
        { class: "charts" },
        Object.values(this.charts).map((one) => one.frame.element),
      ),
    );
    this.element.addEventListener("toggle", () => {
      if (this.element.open) this.#draw();
    });
    this.element.querySelector("summary").addEventListener("click", () => {
      this.isChosen = true;
    });
    setInterval(() => this.read(), HISTORY_MS);
  }

  /** Note a status for the charts, whether or not they are shown. */
  note(status) {
    this.swaps.note(status.workers);
  }

  /** Show the buffer's current status. The section is folded while the buffer is empty, unless the user opens it. */
  show(status) {
    this.status = status;
    const { tasks } = status,
      depth = tasks.flatMap((task) => SHOWN.map((name) => task.statuses[name] ?? 0)).reduce((sum, n) => sum + n, 0);
    setText(this.said, depth ? `${number(depth)} groups` : "nothing in it now");
    if (!this.isChosen) this.element.open = depth > 0;
    const names = tasks.map((task) => task.task);
    if (names.join("\n") !== [...this.task.options].map((option) => option.value).join("\n")) {
      const chosen = names.includes(this.task.value) ? this.task.value : busiestFirst(tasks)[0]?.task;
      this.task.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
      this.task.hidden = names.length < 2;
      this.#draw();
    } else this.#drawDepth();
    this.charts.ready.show(
      tasks
        .filter((task) => task.kind === "train")
        .map((task) => ({ name: task.task, values: task.by_staleness, kind: this.#kind(task.task) })),
      "no ready groups",
    );
  }

  async read() {
    if (!this.isShown()) return;
    this.history = await get("api/history", { minutes: this.minutes.value }).catch(() => this.history);
    if (this.history) this.onRead(this.history);
    this.#draw();
  }

  /** The colour of a task, the same in all charts. */
  #kind(task) {
    return `c${Math.max(0, this.status?.tasks.findIndex((each) => each.task === task) ?? 0) % 8}`;
  }

  /** Groups by status, up to the current status. */
  #drawDepth() {
    const one = this.history?.[this.task.value],
      task = this.status?.tasks.find((each) => each.task === this.task.value);
    if (!one || !task || !this.element.open) return;
    const now = this.status.at_ms,
      known = one.at_ms.filter((at) => at < now),
      last = known.at(-1) ?? now;
    // without a producer, no rows are added: the current numbers hold since soon after the last row
    const xs = [...known, ...(now - last > 2 * HISTORY_MS ? [last + HISTORY_MS] : []), now],
      column = (name) => xs.map((_, at) => (at < known.length ? (one.statuses[name]?.[at] ?? 0) : task.statuses[name]));
    const lines = SHOWN.map((name) => ({
      name,
      xs,
      values: column(name),
      breaks: gapsOf(known),
      kind: `s-${name}`,
    })).filter((line) => line.values.some(Boolean));
    this.charts.depth.show({
      lines,
      axis: clockAxis(xs[0], xs.at(-1)),
      bound: task.kind === "train" ? { name: "untrained, at most", value: task.limit - task.trained } : null,
      aside: KEPT.filter((name) => task.statuses[name]).map((name) => ({
        name: `${name}, kept for inspection`,
        value: task.statuses[name],
      })),
    });
  }

  #draw() {
    const one = this.history?.[this.task.value];
    if (!one || !this.element.open) return;
    this.#drawDepth();
    const xs = one.at_ms,
      axis = clockAxis(xs[0] ?? 0, xs.at(-1) ?? 1),
      { tokens, reward, times, staleness, groups, pauses } = this.charts;
    const byTask = (name) =>
      Object.entries(this.history)
        .filter(([, each]) => each[name].some((value) => value !== null))
        .map(([task, each], i) => ({
          name: task,
          xs: each.at_ms,
          values: each[name],
          breaks: gapsOf(each.at_ms),
          kind: this.#kind(task),
          dash: i % 3,
        }));
    tokens.show({ axis, lines: byTask("tokens") });
    reward.show({ axis, lines: byTask("reward") });
    staleness.show({ axis, lines: byTask("staleness") });
    const breaks = gapsOf(xs),
      line = (name, values, kind, dash) => ({ name, xs, values, kind, dash, breaks });
    times.show({
      axis,
      lines: [
        line("queued", one.queued_s, "s-pending", 0),
        line("worked", one.worked_s, "s-running", 1),
        line("waited", one.waited_s, "s-completed", 2),
      ],
    });
    groups.show({
      axis,
      lines: [
        line(
          "finished well",
          one.groups.map((all, at) => less(all, one.failed[at])),
          "s-completed",
          0,
        ),
        line("trained", one.trained, "s-claimed", 1),
        line("failed", one.failed, "s-failed", 2),
      ],
    });
    const { at, means } = this.swaps;
    pauses.frame.element.hidden = !means.some((value) => value !== null);
    pauses.show({
      axis: clockAxis(at[0] ?? 0, at.at(-1) ?? 1),
      lines: [{ name: "mean of all workers", xs: at, values: means, kind: "c0" }],
    });
  }
}

/** The indices before which the history has a gap of three times the usual distance, because the run was idle. */
function gapsOf(xs) {
  const distances = xs.slice(1).map((x, i) => x - xs[i]),
    usual = [...distances].sort((one, other) => one - other)[distances.length >> 1];
  return new Set(distances.flatMap((distance, i) => (distance > 3 * usual ? [i + 1] : [])));
}

/** The mean pause of engines at changes of weights, a point every 10 s, from the totals that workers report. */
class Swaps {
  constructor() {
    [this.at, this.means, this.before] = [[], [], null];
  }

  note(workers) {
    if (Date.now() - (this.at.at(-1) ?? 0) < HISTORY_MS) return;
    const before = this.before ?? workers;
    let count = 0,
      pauses = 0;
    for (const [name, report] of Object.entries(workers)) {
      count += (report.swaps ?? 0) - (before[name]?.swaps ?? 0);
      pauses += (report.swap_pause_s ?? 0) - (before[name]?.swap_pause_s ?? 0);
    }
    this.before = workers;
    this.at = [...this.at, Date.now()].slice(-MOST_POINTS);
    this.means = [...this.means, count > 0 ? pauses / count : null].slice(-MOST_POINTS);
  }
}

/** Tasks in order of interest: first those that are sampled and trained now, by tokens per second. */
export function busiestFirst(tasks) {
  const rank = (task) => [
    task.kind === "train" && !task.is_retired,
    !task.offline,
    task.rates?.tokens ?? 0,
    task.statuses.running + task.statuses.completed,
  ];
  const ranked = tasks.map((task) => ({ task, rank: rank(task) }));
  const order = (one, other) => {
    const at = one.rank.findIndex((value, i) => value !== other.rank[i]);
    return at < 0 ? 0 : other.rank[at] - one.rank[at];
  };
  return ranked.sort(order).map(({ task }) => task);
}

function less(all, part) {
  return all === null || part === null ? null : Math.max(0, all - part);
}
