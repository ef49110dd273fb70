// The latest figures of a run, and how they have moved or compare. Pure.

import { plural, short } from "./format.js";

const MOST_WINDOW = 10;

/** Figures as {name, value, notes: [{text, kind}]}: the latest reward and length, and evaluations; for two sets, each
 * figure at the last place that both sets have. `place` returns a place on the axis in words. */
export function headlineOf(curves, sets, place) {
  const curve = (name) => curves.find((each) => each.name === name || each.group === name),
    figures = [curve("reward"), curve("lengths")].filter(Boolean);
  if (sets.length > 1) return [...figures.flatMap((one) => compared(one, sets, place)), ...bothEvaluated(sets, place)];
  return [...figures.flatMap((one) => latest(one, sets[0])), ...sets[0].points.flatMap((one) => evaluated(one, place))];
}

function latest({ name, title, lines }, set) {
  const found = means(set, lines[0]);
  if (!found) return [];
  const { value, before, start, window } = found,
    many = window > 1 ? `${window} steps` : "step",
    notes = [
      moved(value, before, `the ${many} before`, name === "reward"),
      moved(value, start, `the first ${many}`, name === "reward"),
    ];
  return [{ name: `${title}, mean of ${plural(window, "step")}`, value: short(value), notes }];
}

function compared({ name, title, lines }, [first, second], place) {
  const end = Math.min(first.xs.at(-1) ?? 0, second.xs.at(-1) ?? 0),
    [one, other] = [means(first, lines[0], end), means(second, lines[0], end)];
  if (!one || !other) return [];
  const value = `${first.label} ${short(one.value)} \u00b7 ${second.label} ${short(other.value)}`,
    windows = [...(one.window === other.window ? [] : [`${one.window} and`]), plural(other.window, "step")];
  return [
    {
      name: `${title}, means of ${windows.join(" ")} up to ${place(end)}`,
      value,
      notes: [moved(other.value, one.value, first.label, name === "reward")],
    },
  ];
}

function evaluated({ name, xs, values }, place) {
  if (!values.length) return [];
  const notes = values.length > 1 ? [moved(values.at(-1), values[0], "the first time", true)] : [];
  return [{ name: `${name}, evaluated at ${place(xs.at(-1))}`, value: short(values.at(-1)), notes }];
}

/** The evaluations that two sets have, each at the last place where both were evaluated. */
function bothEvaluated([first, second], place) {
  return first.points.flatMap(({ name, xs, values }) => {
    const other = second.points.find((each) => each.name === name),
      i = xs.findLastIndex((x) => other?.xs.includes(x));
    if (i < 0) return [];
    const [one, two] = [values[i], other.values[other.xs.indexOf(xs[i])]],
      value = `${first.label} ${short(one)} \u00b7 ${second.label} ${short(two)}`;
    return [{ name: `${name}, evaluated at ${place(xs[i])}`, value, notes: [moved(two, one, first.label, true)] }];
  });
}

/** Means of a series over its last steps, over as many steps before these, and over its first steps; null with fewer
 * than two values. `end` is the last place that counts. */
function means(set, series, end = Infinity) {
  const values = (set.series[series] ?? []).filter((value, i) => value !== null && set.xs[i] <= end);
  if (values.length < 2) return null;
  const window = Math.max(1, Math.min(MOST_WINDOW, Math.floor(values.length / 3))),
    mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
  return {
    value: mean(values.slice(-window)),
    before: mean(values.slice(-2 * window, -window)),
    start: mean(values.slice(0, window)),
    window,
  };
}

/** The difference of two values in words, with a colour if more is better. */
function moved(value, other, than, isBetter) {
  const by = value - other;
  if (Math.abs(by) < 0.01 * Math.max(Math.abs(value), 0.5)) return { text: `= as ${than}`, kind: "" };
  const text = `${by > 0 ? "\u25b2" : "\u25bc"} ${short(Math.abs(by))} ${by > 0 ? "higher" : "lower"} than ${than}`;
  return { text, kind: isBetter ? (by > 0 ? "good" : "bad") : "" };
}
