// The tables of the run: its tasks, evaluations included, and its workers.

import { columns as orders } from "./changes.js";
import { h } from "./dom.js";
import { number, percent, seconds, short } from "./format.js";
import { Table } from "./table.js";

/** The number of history rows over which a task's reward is averaged: about a minute. */
const RECENT = 6;

/** The tasks of a status, evaluations last, with the reward and the answer length of the last step or evaluation; if
 * the status has none, of the last minute of the history. `isWorst`: no other trained task has a lower reward, and at
 * least one has a higher reward. */
export function judged(tasks, history) {
  const rows = tasks.map((task) => {
    const { reward = [], tokens = [], groups = [] } = history?.[task.task] ?? {},
      last = groups.findLastIndex(Boolean);
    return {
      ...task,
      reward: task.evaluation?.reward ?? task.reward ?? mean(reward.filter((value) => value !== null).slice(-RECENT)),
      length: task.response_tokens ?? (last < 0 ? null : tokens[last] / groups[last] / task.group_size),
    };
  });
  const trained = rows.filter((row) => row.kind === "train" && !row.is_retired && row.reward !== null),
    rewards = new Set(trained.map((row) => row.reward)),
    worst = rewards.size > 1 ? Math.min(...rewards) : null;
  for (const row of rows) row.isWorst = worst !== null && row.reward === worst && trained.includes(row);
  return rows.sort((one, other) => (other.kind === "train") - (one.kind === "train"));
}

/** The state of an evaluation; null if it is unknown. */
function evaluated(evaluation) {
  if (!evaluation) return "evaluation";
  const { is_running, finished, prompts, version } = evaluation;
  if (is_running) return `evaluating ${number(finished)} / ${number(prompts)}`;
  return version === null ? "evaluation" : `evaluated at step ${number(version)}`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** The part that most samples failed at, and how many failed at others. */
function failures(failed) {
  const [[most, count] = [], ...others] = Object.entries(failed),
    rest = others.reduce((sum, [, more]) => sum + more, 0);
  return most ? `${number(count)} ${most}${rest ? ` + ${number(rest)}` : ""}` : "-";
}

export function taskTable() {
  const link = (task, status, count) =>
    h("a", { href: `#/rollouts?task=${encodeURIComponent(task)}&status=${status}` }, number(count));
  const counted = (status) => ({
    title: status,
    mark: (task) => (status === "failed" && task.isFailing ? "bad" : ""),
    number: true,
    redraw: true,
    cell: (task) => (task.statuses[status] ? link(task.task, status, task.statuses[status]) : "0"),
  });
  const trained = (text) => (task) => (task.kind === "train" ? text(task) : "-");
  return new Table(
    "Tasks",
    [
      { title: "task", cell: (task) => task.task },
      {
        title: "state",
        cell: (task) => (task.kind === "train" ? task.state : evaluated(task.evaluation)),
        mark: (task) => (["run", "retired"].includes(task.state) ? "" : "warn"),
      },
      {
        title: "reward",
        cell: (task) => `${task.isWorst ? "lowest " : ""}${number(task.reward, 3)}`,
        mark: (task) => (task.isWorst ? "warn" : ""),
        number: true,
      },
      { title: "length", cell: (task) => short(task.length && Math.round(task.length)), number: true },
      { title: "step", cell: trained((task) => number(task.step)), number: true },
      {
        title: "ready",
        cell: trained((task) => `${number(task.ready)} / ${number(task.batch_groups)}`),
        number: true,
      },
      {
        title: "untrained",
        hint: "groups that are not trained yet, of those that the staleness bound allows",
        cell: trained((task) => `${number(task.scheduled - task.trained)} / ${number(task.limit - task.trained)}`),
        number: true,
        spare: true,
      },
      ...["pending", "running", "completed", "claimed", "failed"].map(counted),
      {
        title: "failed samples",
        hint: "samples that failed so far, by the part that failed",
        cell: (task) => failures(task.failed_samples),
        roomy: true,
      },
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

export function workerTable() {
  const CONDITIONS = { alive: "", silent: "warn", dead: "bad" };
  const marked = (worker) => CONDITIONS[worker.condition];
  return new Table(
    "Workers",
    [
      { title: "worker", cell: (worker) => worker.name },
      { title: "host", cell: (worker) => worker.host ?? "-" },
      { title: "process", cell: (worker) => `${worker.pid ?? "-"}`, number: true, spare: true },
      { title: "GPU", cell: (worker) => worker.gpus || "-", spare: true },
      {
        title: "state",
        cell: (worker) => (worker.condition === "alive" ? (worker.state ?? "alive") : worker.condition),
        mark: marked,
      },
      { title: "heard", cell: (worker) => `${seconds(worker.age_s)} ago`, mark: marked, number: true },
      {
        title: "samples",
        cell: (worker) => `${number(worker.samples_in_flight)} / ${number(worker.capacity)}`,
        number: true,
      },
      { title: "tokens/s", cell: (worker) => short(worker.tokens_per_s ?? null), number: true },
      {
        title: "of batch",
        cell: (worker) => (worker.batch_share === undefined ? "-" : percent(worker.batch_share)),
        number: true,
      },
      { title: "version", cell: (worker) => number(worker.version), number: true },
      { title: "done", cell: (worker) => number(worker.groups), number: true },
      { title: "failed", cell: (worker) => number(worker.failed_samples), number: true },
      { title: "generate", cell: (worker) => seconds(worker.generate_s ?? null), number: true, roomy: true },
      { title: "judge", cell: (worker) => seconds(worker.judge_s ?? null), number: true, roomy: true },
      {
        title: "swap",
        cell: (worker) => (worker.swaps ? seconds(worker.swap_pause_s / worker.swaps) : "-"),
        number: true,
        roomy: true,
      },
      { title: "groups", cell: (worker) => number(worker.in_flight), number: true, roomy: true },
      { title: "engine", cell: (worker) => worker.engine ?? "-", roomy: true },
      ...orders("worker", (worker) => worker.name),
    ],
    (worker) => worker.name,
    { empty: "no worker has reported lately" },
  );
}
