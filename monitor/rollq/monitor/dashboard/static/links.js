// The addresses of lists, groups and comparisons. All that a list shows is in its address, so that a link shows the same.

const NAMES = [
  "task",
  "status",
  "step",
  "min_reward",
  "max_reward",
  "min_tokens",
  "max_tokens",
  "finish",
  "prompt",
  "q",
  "sort",
];
/** Each says of single samples which are wanted: a group is listed for one of them. */
const OF_SAMPLES = ["min_reward", "max_reward", "min_tokens", "max_tokens", "finish"];

/** What the query of an address asks for: what it names and is not empty, in one order. */
export function wantedOf(query) {
  const given = new URLSearchParams(query ?? "");
  return Object.fromEntries(NAMES.filter((name) => given.get(name)).map((name) => [name, given.get(name)]));
}

/** The query of an address, with its question mark; "" where everything is wanted. Empty values are left out. */
export function queryOf(wanted) {
  const given = Object.entries(wanted).filter(([, value]) => value !== "" && value !== null && value !== undefined),
    query = new URLSearchParams(given).toString();
  return query ? `?${query}` : "";
}

/** The address of the list of what is wanted. */
export function listAddress(wanted) {
  return `#/rollouts${queryOf(wanted)}`;
}

/** Whether single samples are searched for. */
export function searchesSamples(wanted) {
  return OF_SAMPLES.some((name) => wanted[name]);
}

/** The address of a group, and of the list from which it is opened. `row`: {task, group}. */
export function addressOf(row, wanted = {}) {
  return `#/rollouts/${encodeURIComponent(row.task)}/${row.group}${queryOf(wanted)}`;
}

/** The address of the page that compares two groups. */
export function compareAddress(...rows) {
  return `#/compare/${rows.map(({ task, group }) => `${encodeURIComponent(task)}/${group}`).join("/")}`;
}
