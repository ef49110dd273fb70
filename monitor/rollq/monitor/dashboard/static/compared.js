// Curves that are compared: one run, two runs, or two ranges of steps of one run, on one axis. Pure.

/** The choices in an address: {over: "step" or "time", other: a run, ranges: [[from, to], [from, to]] or null, at: a
 * place on the axis or null}. */
export function choiceOf({ over, other = "", first, second, at }) {
  const ranges = [rangeOf(first), rangeOf(second)];
  return {
    over: over === "time" ? "time" : "step",
    other,
    ranges: ranges.every(Boolean) ? ranges : null,
    at: at && Number.isFinite(Number(at)) ? Number(at) : null,
  };
}

function rangeOf(text) {
  const [, from, to] = text?.match(/^(\d+)-(\d+)$/) ?? [];
  return from && Number(from) <= Number(to) ? [Number(from), Number(to)] : null;
}

/** The curves that a choice puts on one axis, as sets: {label, dash, xs, steps, time_s, series, points, start}. `xs` are
 * places on the axis; points: [{name, xs, values}] of evaluations; start: [step, time] of the place 0. */
export function setsOf({ over, other, ranges }, own, others) {
  if (ranges)
    return ranges.map(([from, to], dash) =>
      cut(own, over, dash, { label: `${from}\u2013${to}`, from, to, isAligned: true }),
    );
  const sets = [cut(own, over, 0, { label: other ? own.run : "" })];
  return other && others ? [...sets, cut(others, over, 1, { label: other })] : sets;
}

function cut(curves, over, dash, { label, from = -Infinity, to = Infinity, isAligned = false }) {
  const within = (step) => step >= from && step <= to,
    first = curves.steps.findIndex(within),
    end = curves.steps.findLastIndex(within) + 1,
    slice = (values) => (first < 0 ? [] : values.slice(first, end)),
    [steps, time_s] = [slice(curves.steps), slice(curves.time_s)];
  const start = [isAligned ? from : 0, time_s[0] ?? 0],
    place = (step, time) => (over === "time" ? time - start[1] : step - start[0]);
  const points = Object.entries(curves.evaluations).map(([name, found]) => {
    const at = found.steps.map((step, i) => [step, i]).filter(([step]) => within(step));
    return {
      name,
      xs: at.map(([step, i]) => place(step, found.time_s[i])),
      values: at.map(([, i]) => found.reward[i]),
    };
  });
  const series = Object.fromEntries(Object.entries(curves.series).map(([name, values]) => [name, slice(values)])),
    xs = steps.map((step, i) => place(step, time_s[i]));
  return { label, dash, xs, steps, time_s, series, points, start, place };
}

/** The least and the largest place of all sets. */
export function bounds(sets) {
  const all = sets.flatMap(({ xs, points }) => [xs, ...points.map((each) => each.xs)]).filter((xs) => xs.length);
  return all.length ? [Math.min(...all.map((xs) => xs[0])), Math.max(...all.map((xs) => xs.at(-1)))] : [0, 1];
}

/** The lines of a chart: each series in the colour of its index, and dashed for the second set. Both lines of a series
 * have the same name. */
export function linesOf(sets, { name, title, lines }) {
  // with a single task, the task's reward is the overall reward
  const series = name === "reward" && lines.length === 2 ? lines.slice(0, 1) : lines;
  return series.flatMap((one, i) =>
    sets
      .filter((set) => set.series[one]?.some((value) => value !== null))
      .map((set) => ({
        name: series.length > 1 ? labelOf(one) : set.label || title.toLowerCase(),
        xs: set.xs,
        values: set.series[one],
        kind: `c${i % 8}`,
        dash: set.dash,
      })),
  );
}

/** A series in words: the part of its name after the chart's name. */
function labelOf(series) {
  const own = series.includes("/") ? series.slice(series.indexOf("/") + 1) : series;
  return own.replace(/_s$/, "").replaceAll("_", " ");
}

/** Evaluations as points, in colours that the lines of the chart do not have. */
export function pointsOf(sets, colours) {
  return sets.flatMap((set) =>
    set.points
      .filter(({ xs }) => xs.length)
      .map(({ name, xs, values }, i) => ({
        name,
        xs,
        values,
        kind: `c${(colours + i) % 8}`,
        dash: set.dash,
        isDots: true,
      })),
  );
}
