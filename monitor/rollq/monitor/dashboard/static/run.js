// The view of the run: learning, facts, trainer, errors, tasks, workers, more curves, the buffer, the latest rollouts.

import { get } from "./api.js";
import { buttons } from "./changes.js";
import { h, setText } from "./dom.js";
import { bytes, number, percent, plural, seconds, short } from "./format.js";
import { BufferHistory, busiestFirst } from "./history.js";
import { Learning } from "./learning.js";
import { groupTable } from "./rollouts.js";
import { judged, taskTable, workerTable } from "./run_tables.js";
import { Table } from "./table.js";

const MOST_WORKERS = 60,
  MOST_PRODUCERS = 3;
const LATEST_MS = 5_000,
  LATEST_TASKS = 4;
/** After this many seconds of silence, a trainer is shown with its last reported activity. */
const QUIET_S = 2;
const NONE_LEFT =
  "no groups here: those that are trained leave at the next checkpoint; Rollouts lists them if the run has an archive";

export class RunView {
  constructor(root) {
    this.isShown = () => !root.hidden && !document.hidden;
    this.learning = new Learning(this.isShown, (isCompared) => this.#placeCurves(isCompared));
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
    this.errors = new Errors();
    this.latest = groupTable("Latest rollouts", NONE_LEFT);
    this.buffer = new BufferHistory(this.isShown, () => this.#showTasks());
    const part = (title, ...content) => h("section", { class: "part" }, h("h2", null, title), ...content);
    root.append(
      this.learning.element,
      h("div", { class: "top part" }, this.facts, buttons("run")),
      part("Trainer", this.trainer),
      this.errors.element,
      part("Tasks", this.tasks.element),
      part("Workers", this.workers.element, this.all),
      this.learning.more,
      this.buffer.element,
      part("Latest rollouts", this.latest.element),
    );
    document.addEventListener("visibilitychange", () => {
      if (this.isShown()) this.refresh();
    });
    setInterval(() => this.#readLatest(), LATEST_MS);
  }

  /** Curves of two runs are together; otherwise, a worker in trouble appears before most curves. */
  #placeCurves(isCompared) {
    const { element, more } = this.learning;
    if (isCompared) element.after(more);
    else this.buffer.element.before(more);
  }

  show(status) {
    const isFirst = !this.status,
      { tasks, trainer, model } = status;
    this.status = status;
    this.buffer.note(status);
    if (isFirst) this.#readLatest();
    if (!this.isShown()) return;
    const workers = Object.entries(status.workers).map(([name, report]) => ({ name, ...report }));
    const alive = workers.filter((worker) => worker.condition === "alive").length;
    const { share, limit, is_full, used_bytes, limit_bytes } = status.fullness;
    const size = limit_bytes ? ` (${bytes(used_bytes)} of ${bytes(limit_bytes)})` : "";
    const guilty = [alive === 0 && status.wanted_workers !== 0 && "workers", is_full && "memory"];
    const found = {
      "live weights": model ? `version ${model.version}` : "none yet",
      "next step": Math.max(0, ...tasks.filter((task) => task.kind === "train").map((task) => task.step)) || "-",
      workers: workersInWords(alive, workers.length, status.wanted_workers),
      "tokens/s": short(tasks.reduce((sum, task) => sum + (task.rates?.tokens ?? 0), 0)),
      "tickets in the queue": number(status.tickets),
      memory: share ? `${percent(share)} of ${limit}${size}` : "no limit",
    };
    const producers = producersInWords(tasks);
    if (producers) found[producers.includes(",") ? "producers" : "producer"] = producers;
    facts(this.facts, found, guilty);
    const isGone = status.diagnosis.state === "trainer gone" || trainer?.phase === "failed";
    facts(this.trainer, trainerFacts(trainer), isGone ? ["phase", "ended", "last heard"] : []);
    this.#showTasks();
    workers.sort((a, b) => (a.condition === "alive") - (b.condition === "alive") || (a.name < b.name ? -1 : 1));
    this.workers.show(this.showsAll ? workers : workers.slice(0, MOST_WORKERS));
    this.all.hidden = workers.length <= MOST_WORKERS;
    setText(this.all, this.showsAll ? `Show the first ${MOST_WORKERS}` : `Show all ${number(workers.length)} workers`);
    this.errors.show(tasks, workers, trainer);
    this.buffer.show(status);
  }

  #showTasks() {
    if (!this.status) return;
    const { tasks, diagnosis } = this.status,
      isFailing = diagnosis.state === "failing";
    this.tasks.show(
      judged(tasks, this.buffer.history).map((task) => ({
        ...task,
        isFailing: isFailing && task.statuses.failed > 0,
      })),
    );
  }

  /** Show the curves that the query of an address asks for. */
  open(query) {
    this.learning.show(query);
    this.refresh();
  }

  /** Read everything that was not read while the view was hidden. */
  refresh() {
    if (this.status) this.show(this.status);
    this.learning.read();
    this.buffer.read();
    this.#readLatest();
  }

  async #readLatest() {
    if (!this.isShown() || !this.status) return;
    const tasks = busiestFirst(this.status.tasks).filter(hasGroups).slice(0, LATEST_TASKS),
      limit = Math.ceil(8 / tasks.length);
    const found = await Promise.all(tasks.map(({ task }) => latest(task, limit).catch(() => null)));
    if (found.every(Boolean)) this.latest.show(found.flat());
  }
}

/** The last errors: a line with their number, and all of them on demand. */
class Errors {
  constructor() {
    this.said = h("span", { class: "note" });
    this.table = new Table(
      "Last errors",
      [
        { title: "where", cell: (row) => row.where },
        { title: "age", cell: (row) => seconds(row.age_s), number: true },
        { title: "error", cell: (row) => row.text, long: true },
      ],
      (row) => row.where,
    );
    this.element = h(
      "details",
      { class: "part errors", hidden: true },
      h("summary", null, h("h2", null, "Last errors"), this.said),
      this.table.element,
    );
  }

  show(tasks, workers, trainer) {
    const found = [
      ...tasks
        .filter((task) => task.last_error)
        .map((task) => ({ where: task.task, age_s: task.last_error.age_s, text: task.last_error.text })),
      ...workers
        .filter((worker) => worker.refused_weights)
        .map((worker) => ({ where: worker.name, age_s: worker.age_s, text: worker.refused_weights })),
      ...(trainer?.error ? [{ where: "trainer", age_s: trainer.silent_s, text: trainer.error }] : []),
    ].sort((one, other) => one.age_s - other.age_s);
    this.element.hidden = !found.length;
    if (!found.length) return;
    const [{ where, age_s, text }] = found;
    setText(this.said, `${plural(found.length, "error")}, the last ${seconds(age_s)} ago: ${where}: ${text}`);
    this.table.show(found);
  }
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

/** The number of live workers, out of all if some are not alive, and the number wanted, as in `rollq status`. */
function workersInWords(alive, known, wanted) {
  const said = alive && alive < known ? `${number(alive)} of ${number(known)}` : number(alive);
  if (wanted === null) return alive ? said : "0 (1 or more wanted)";
  return wanted ? `${said} (${number(wanted)} wanted)` : `${said}, with nothing to generate now`;
}

/** The places of all producers that any task has seen, latest first. */
function producersInWords(tasks) {
  const seen = new Map();
  for (const { place, silent_s } of tasks.flatMap((task) => task.producers)) {
    const name = `${place.host}:${place.pid}`;
    seen.set(name, Math.min(silent_s, seen.get(name) ?? Number.POSITIVE_INFINITY));
  }
  const names = [...seen.keys()].sort((one, other) => seen.get(one) - seen.get(other)),
    more = names.length - MOST_PRODUCERS;
  return [...names.slice(0, MOST_PRODUCERS), ...(more > 0 ? [`${more} more`] : [])].join(", ");
}

/** Show facts by name; facts that cause the run's state are red. */
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

/** The place of a role's process, and the GPUs that it may hold. */
function inPlace({ host, pid, gpus }) {
  return [`${host}:${pid}`, gpus && `GPU ${gpus}`].filter(Boolean).join(", ");
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
  if (trainer.place) found.process = inPlace(trainer.place);
  if (mismatch.mean !== undefined) found.mismatch = `mean ${mismatch.mean.toPrecision(2)} nats`;
  return found;
}
