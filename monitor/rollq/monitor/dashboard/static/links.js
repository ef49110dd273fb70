// The addresses of lists, groups and comparisons. A list's address determines its content, so a link shows the same.

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
/** Filters of single samples: a group is listed if one sample matches all of them. */
const OF_SAMPLES = ["min_reward", "max_reward", "min_tokens", "max_tokens", "finish"];

/** The filters in the query of an address: all that are not empty, in a fixed order. */
export function wantedOf(query) {
  const given = new URLSearchParams(query ?? "");
  return Object.fromEntries(NAMES.filter((name) => given.get(name)).map((name) => [name, given.get(name)]));
}

/** The query of an address, with its question mark; "" without filters. Empty values are left out. */
export function queryOf(wanted) {
  const given = Object.entries(wanted).filter(([, value]) => value !== "" && value !== null && value !== undefined),
    query = new URLSearchParams(given).toString();
  return query ? `?${query}` : "";
}

/** The address of the list with these filters. */
export function listAddress(wanted) {
  return `#/rollouts${queryOf(wanted)}`;
}

/** Whether the filters search for single samples. */
export function searchesSamples(wanted) {
  return OF_SAMPLES.some((name) => wanted[name]);
}

/** The address of a group, with the filters of the list from which it is opened. `row`: {task, group}. */
export function addressOf(row, wanted = {}) {
  return `#/rollouts/${encodeURIComponent(row.task)}/${row.group}${queryOf(wanted)}`;
}

/** The address of the page that compares two groups. */
export function compareAddress(...rows) {
  return `#/compare/${rows.map(({ task, group }) => `${encodeURIComponent(task)}/${group}`).join("/")}`;
}
