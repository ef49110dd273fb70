// The view of the run: facts, charts, trainer, tasks, workers, errors, and the latest rollouts.

import { get } from "./api.js";
import { buttons, columns as orders } from "./changes.js";
import { BarChart, LineChart } from "./charts.js";
import { h, setText } from "./dom.js";
import { bytes, number, percent, seconds, short } from "./format.js";
import { groupTable } from "./rollouts.js";
import { Table } from "./table.js";

const MOST_WORKERS = 60;
const HISTORY_MS = 10_000,
  LATEST_MS = 5_000,
  LATEST_TASKS = 4,
  MOST_POINTS = 360;
/** The statuses that are drawn, from below, and their colours. */
const SHOWN = {
  completed: 2,
  claimed: 3,
  running: 1,
  pending: 0,
  aborted: 4,
  expired: 5,
  gathered: 7,
  cooling: 4,
  leaving: 5,
  failed: 6,
};
/** From this silence on, a trainer is shown by what it did when it was heard. */
const QUIET_S = 2;
const NONE_LEFT =
  "no groups here: those that are trained leave at the next checkpoint, for the archive if the run has one " +
  "(rollq dashboard --archive)";

export class RunView {
  constructor(root) {
    this.facts = h("dl", { class: "facts" });
    this.tasks = taskTable();
    this.workers = workerTable();
    this.all = h("button", {
      type: "button",
      onclick: () => {
        this.showsAll = !this.showsAll;
        this.show(this.status);
      },
    });
    this.trainer = h("dl", { class: "facts" });
    this.errors = new Table(
      "Last errors",
      [
        { title: "where", cell: (row) => row.where },
        { title: "age", cell: (row) => row.age, number: true },
        { title: "error", cell: (row) => row.text, long: true },
      ],
      (row) => row.where,
      { empty: "no errors" },
    );
    this.latest = groupTable("Latest rollouts", NONE_LEFT);
    this.swaps = new Swaps();
    this.task = h("select", { "aria-label": "Task of the charts", onchange: () => this.#draw() });
    this.minutes = h(
      "select",
      { "aria-label": "Time of the charts", onchange: () => this.#readHistory() },
      [
        ["60", "last hour"],
        ["360", "last 6 hours"],
        ["1440", "last day"],
      ].map(([value, name]) => h("option", { value }, name)),
    );
    this.charts = {
      depth: new LineChart("Groups by status", "groups", "one above the other", true),
      tokens: new LineChart("Tokens per second", "tokens/s", "mean of a minute"),
      reward: new LineChart("Reward", "reward", "mean of finished samples"),
      times: new LineChart("Time of a group", "s", "mean of a minute"),
      staleness: new LineChart("Staleness", "steps", "mean of the trained groups of a minute"),
      ready: new BarChart("Ready groups by staleness", "groups", "now"),
      groups: new LineChart("Groups per second", "groups/s", "mean of a minute"),
      pauses: new LineChart("Pause of a swap", "s", "since the page was opened"),
    };
    this.read = h(
      "div",
      { class: "charts" },
      Object.values(this.charts).map((chart) => chart.element),
    );
    const part = (title, ...content) => h("section", { class: "part" }, h("h2", null, title), ...content);
    root.append(
      h("div", { class: "top" }, this.facts, buttons("run")),
      h("div", { class: "two" }, part("Trainer", this.trainer), part("Last errors", this.errors.element)),
      h(
        "section",
        { class: "part" },
        h("div", { class: "bar" }, h("h2", null, "History"), this.task, this.minutes),
        this.read,
      ),
      part("Tasks", this.tasks.element),
      part("Workers", this.workers.element, this.all),
      part("Latest rollouts", this.latest.element),
    );
    this.isShown = () => !root.hidden && !document.hidden;
    document.addEventListener("visibilitychange", () => {
      if (this.isShown()) this.refresh();
    });
    setInterval(() => this.#readHistory(), HISTORY_MS);
    setInterval(() => this.#readLatest(), LATEST_MS);
    this.#readHistory();
  }

  show(status) {
    const isFirst = !this.status,
      { tasks, trainer, model } = status;
    this.status = status;
    if (isFirst) this.#readLatest();
    this.swaps.note(status.workers);
    if (!this.isShown()) return;
    const workers = Object.entries(status.workers).map(([name, report]) => ({ name, ...report }));
    const alive = workers.filter((worker) => worker.condition === "alive").length;
    const { share, limit, is_full, used_bytes, limit_bytes } = status.fullness;
    const size = limit_bytes ? ` (${bytes(used_bytes)} of ${bytes(limit_bytes)})` : "";
    const guilty = [alive === 0 && status.wanted_workers !== 0 && "workers", is_full && "memory"];
    const found = {
      "live weights": model ? `version ${model.version}` : "none yet",
      "next step": Math.max(0, ...tasks.filter((task) => task.kind === "train").map((task) => task.step)) || "-",
      workers: workersInWords(alive, status.wanted_workers),
      "tokens/s": short(tasks.reduce((sum, task) => sum + (task.rates?.tokens ?? 0), 0)),
      tickets: number(status.tickets),
      memory: share ? `${percent(share)} of ${limit}${size}` : "no limit",
    };
    facts(this.facts, found, guilty);
    const isGone = status.diagnosis.state === "trainer gone" || trainer?.phase === "failed";
    facts(this.trainer, trainerFacts(trainer), isGone ? ["phase", "ended", "last heard"] : []);
    const isFailing = status.diagnosis.state === "failing";
    this.tasks.show(tasks.map((task) => ({ ...task, isFailing: isFailing && task.statuses.failed > 0 })));
    workers.sort((a, b) => (a.condition === "alive") - (b.condition === "alive") || (a.name < b.name ? -1 : 1));
    this.workers.show(this.showsAll ? workers : workers.slice(0, MOST_WORKERS));
    this.all.hidden = workers.length <= MOST_WORKERS;
    setText(this.all, this.showsAll ? `Show the first ${MOST_WORKERS}` : `Show all ${number(workers.length)} workers`);
    this.errors.show([
      ...tasks
        .filter((task) => task.last_error)
        .map((task) => ({ where: task.task, age: seconds(task.last_error.age_s), text: task.last_error.text })),
      ...workers
        .filter((worker) => worker.refused_weights)
        .map((worker) => ({ where: worker.name, age: seconds(worker.age_s), text: worker.refused_weights })),
      ...(trainer?.error ? [{ where: "trainer", age: seconds(trainer.silent_s), text: trainer.error }] : []),
    ]);
    const names = tasks.map((task) => task.task);
    if (names.join("\n") !== [...this.task.options].map((option) => option.value).join("\n")) {
      const chosen = names.includes(this.task.value) ? this.task.value : busiestFirst(tasks)[0]?.task;
      this.task.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
      this.task.hidden = names.length < 2;
      this.#draw();
    }
    this.charts.ready.show(
      tasks.filter((task) => task.kind === "train").map((task) => ({ name: task.task, values: task.by_staleness })),
      "no ready groups",
    );
  }

  /** Read again what was not read while the view was hidden. */
  refresh() {
    if (this.status) this.show(this.status);
    this.#readHistory();
    this.#readLatest();
  }

  async #readHistory() {
    if (!this.isShown()) return;
    this.history = await get("api/history", { minutes: this.minutes.value }).catch(() => this.history);
    this.#draw();
  }

  async #readLatest() {
    if (!this.isShown() || !this.status) return;
    const tasks = busiestFirst(this.status.tasks).filter(hasGroups).slice(0, LATEST_TASKS),
      limit = Math.ceil(8 / tasks.length);
    const found = await Promise.all(tasks.map(({ task }) => latest(task, limit).catch(() => null)));
    if (found.every(Boolean)) this.latest.show(found.flat());
  }

  #draw() {
    const one = this.history?.[this.task.value];
    if (!one) return;
    const task = this.status?.tasks.find((each) => each.task === this.task.value);
    const { depth, tokens, reward, times, staleness, groups, pauses } = this.charts;
    const statuses = Object.keys(SHOWN).filter((status) => one.statuses[status]);
    depth.show(
      one.at_ms,
      statuses.map((status) => ({ name: status, values: one.statuses[status], kind: SHOWN[status] })),
      task && task.kind === "train" ? { name: "staleness bound", value: task.limit - task.trained } : null,
    );
    const all = Object.entries(this.history).filter(([, each]) => each.at_ms.length === one.at_ms.length);
    tokens.show(
      one.at_ms,
      all.map(([name, each]) => ({ name, values: each.tokens })),
    );
    reward.show(
      one.at_ms,
      all.map(([name, each]) => ({ name, values: each.reward })),
    );
    staleness.show(
      one.at_ms,
      all.map(([name, each]) => ({ name, values: each.staleness })),
    );
    times.show(
      one.at_ms,
      [
        ["queued", one.queued_s],
        ["worked", one.worked_s],
        ["waited", one.waited_s],
      ].map(([name, values]) => ({ name, values })),
    );
    pauses.show(this.swaps.times, [{ name: "mean of all workers", values: this.swaps.means }]);
    groups.show(one.at_ms, [
      { name: "finished well", values: one.groups.map((all, at) => less(all, one.failed[at])), kind: 0 },
      { name: "trained", values: one.trained, kind: 2 },
      { name: "failed", values: one.failed, kind: 6 },
    ]);
  }
}

/** The mean pause of engines at changes of weights, a point each 10 s, from the totals that workers report. */
class Swaps {
  constructor() {
    [this.times, this.means, this.before] = [[], [], null];
  }

  note(workers) {
    if (Date.now() - (this.times.at(-1) ?? 0) < HISTORY_MS) return;
    const before = this.before ?? workers;
    let count = 0,
      pauses = 0;
    for (const [name, report] of Object.entries(workers)) {
      count += (report.swaps ?? 0) - (before[name]?.swaps ?? 0);
      pauses += (report.swap_pause_s ?? 0) - (before[name]?.swap_pause_s ?? 0);
    }
    this.before = workers;
    this.times = [...this.times, Date.now()].slice(-MOST_POINTS);
    this.means = [...this.means, count > 0 ? pauses / count : null].slice(-MOST_POINTS);
  }
}

/** Tasks in the order in which they are worth looking at: those that are made and trained now, by their tokens a second. */
function busiestFirst(tasks) {
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

function hasGroups(task) {
  return Object.values(task.statuses).some(Boolean);
}

/** The newest groups of a task: up to half of them trained, and others that are finished. */
async function latest(task, limit) {
  const read = async (status, most) => (await get("api/groups", { task, status, limit: most })).groups;
  const trained = await read("claimed,archived,leaving", Math.ceil(limit / 2));
  const others = await read("completed,failed", limit - trained.length);
  return [...others, ...trained].sort((one, other) => (other.at_ms ?? 0) - (one.at_ms ?? 0));
}

function less(all, part) {
  return all === null || part === null ? null : Math.max(0, all - part);
}

/** The workers that are alive, and how many are wanted, as `rollq status` says it. */
function workersInWords(alive, wanted) {
  if (wanted === null) return alive ? number(alive) : "0 (1 or more wanted)";
  return wanted ? `${number(alive)} (${number(wanted)} wanted)` : `${number(alive)}, nothing to make now`;
}

/** Show facts by name; those that are guilty of the state of the run in red. */
function facts(list, found, guilty) {
  const names = Object.keys(found);
  if (names.join() !== [...list.querySelectorAll("dt")].map((one) => one.textContent).join())
    list.replaceChildren(...names.map((name) => h("div", null, h("dt", null, name), h("dd"))));
  names.forEach((name, at) => {
    const value = list.children[at].lastChild;
    setText(value, String(found[name]));
    value.className = guilty.includes(name) ? "bad" : "";
  });
}

function trainerFacts(trainer) {
  if (!trainer) return { phase: "no trainer has started" };
  const report = trainer.report ?? {},
    mismatch = report.mismatch ?? {};
  const phase = `${trainer.phase ?? "starting"}, step ${trainer.step}`,
    heard = `${seconds(trainer.silent_s)} ago`;
  const hasEnded = ["finished", "stopped", "failed"].includes(trainer.phase);
  const isQuiet = !hasEnded && (trainer.silent_s > QUIET_S || !trainer.lease_left_s);
  const found = isQuiet ? { "last heard": heard, "doing then": phase } : { phase };
  if (hasEnded) found.ended = heard;
  else if (!isQuiet) Object.assign(found, { for: seconds(trainer.for_s), "last heard": heard });
  if (!hasEnded && !trainer.lease_left_s) found.lease = "over";
  if (trainer.busy_s !== null)
    found["a step"] = `${seconds(trainer.busy_s)}, after a wait of ${seconds(trainer.waited_s ?? 0)}`;
  if (report.reward !== undefined) found.reward = number(report.reward, 3);
  if (mismatch.mean !== undefined) found.mismatch = `mean ${mismatch.mean.toPrecision(2)} nats`;
  return found;
}

function taskTable() {
  const link = (task, status, count) =>
    h("a", { href: `#/rollouts?task=${encodeURIComponent(task)}&status=${status}` }, number(count));
  const counted = (status) => ({
    title: status,
    mark: (task) => (status === "failed" && task.isFailing ? "bad" : ""),
    number: true,
    redraw: true,
    cell: (task) => (task.statuses[status] ? link(task.task, status, task.statuses[status]) : "0"),
  });
  return new Table(
    "Tasks",
    [
      { title: "task", cell: (task) => task.task },
      {
        title: "state",
        cell: (task) => task.state,
        mark: (task) => (["run", "retired"].includes(task.state) ? "" : "warn"),
      },
      { title: "step", cell: (task) => number(task.step), number: true },
      { title: "ready", cell: (task) => `${number(task.ready)} / ${number(task.batch_groups)}`, number: true },
      {
        title: "bound",
        cell: (task) => `${number(task.scheduled - task.trained)} / ${number(task.limit - task.trained)}`,
        number: true,
        spare: true,
      },
      ...["pending", "running", "completed", "claimed", "failed"].map(counted),
      { title: "groups/s", roomy: true, cell: (task) => (task.rates ? short(task.rates.groups) : "-"), number: true },
      { title: "tokens/s", cell: (task) => (task.rates ? short(task.rates.tokens) : "-"), number: true },
      { title: "kept", cell: (task) => (task.outcomes ? percent(task.kept / task.outcomes) : "-"), number: true },
      {
        title: "producer",
        cell: (task) => (task.producer_silent_s === null ? "never seen" : `${seconds(task.producer_silent_s)} ago`),
        number: true,
        spare: true,
      },
      ...orders("task", (task) => task.task),
    ],
    (task) => task.task,
    { empty: "the run has no tasks yet" },
  );
}

function workerTable() {
  return new Table(
    "Workers",
    [
      { title: "worker", cell: (worker) => worker.name },
      {
        title: "state",
        cell: (worker) => (worker.condition === "alive" ? (worker.state ?? "alive") : worker.condition),
        mark: (worker) => ({ alive: "", silent: "warn", dead: "bad" })[worker.condition],
      },
      { title: "process", cell: (worker) => (worker.host ? `${worker.host}:${worker.pid}` : "-"), spare: true },
      { title: "engine", cell: (worker) => worker.engine ?? "-", roomy: true },
      { title: "version", cell: (worker) => number(worker.version), number: true },
      {
        title: "samples",
        cell: (worker) => `${number(worker.samples_in_flight)} / ${number(worker.capacity)}`,
        number: true,
      },
      { title: "groups", cell: (worker) => number(worker.in_flight), number: true, roomy: true },
      { title: "tokens/s", cell: (worker) => short(worker.tokens_per_s ?? null), number: true },
      {
        title: "of batch",
        cell: (worker) => (worker.batch_share === undefined ? "-" : percent(worker.batch_share)),
        number: true,
      },
      { title: "generate", cell: (worker) => seconds(worker.generate_s ?? null), number: true, spare: true },
      { title: "judge", cell: (worker) => seconds(worker.judge_s ?? null), number: true, spare: true },
      {
        title: "swap pause",
        cell: (worker) => (worker.swaps ? seconds(worker.swap_pause_s / worker.swaps) : "-"),
        number: true,
        spare: true,
      },
      { title: "done groups", cell: (worker) => number(worker.groups), number: true },
      { title: "failed samples", cell: (worker) => number(worker.failed_samples), number: true },
      { title: "heard", cell: (worker) => `${seconds(worker.age_s)} ago`, number: true },
      ...orders("worker", (worker) => worker.name),
    ],
    (worker) => worker.name,
    { empty: "no worker has reported lately" },
  );
}
