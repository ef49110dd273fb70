// Axes of charts: where they begin and end, their round marks, and one format for all marks. Pure.

const CLOSE = 0.3;
/** Seconds between marks of time that read well. */
const TIMES_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];
const LARGE = [
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** A round step, at least `least`, that divides a range into about `parts` parts. */
function roundStep(range, parts, least) {
  const rough = Math.max(range / parts, least, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

/** The multiples of a step from one value to another, both included. */
function multiples(low, high, step) {
  const first = Math.ceil(low / step - 1e-6),
    last = Math.floor(high / step + 1e-6);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step);
}

/** The axis of values: {low, high, marks, text, isWhole}. It contains zero, unless all values are close together and
 * far from zero. */
export function valueAxis(low, high, { least = 0, isFromZero = false } = {}) {
  const isClose = !isFromZero && high > low && high - low < CLOSE * Math.max(Math.abs(low), Math.abs(high));
  const from = isClose ? low : Math.min(0, low),
    to = isClose ? high : Math.max(0, high);
  const step = roundStep(to - from || 1, 3, least),
    start = Math.floor(from / step + 1e-6) * step,
    end = Math.max(Math.ceil(to / step - 1e-6) * step, start + step);
  const marks = multiples(start, end, step);
  return { low: start, high: end, marks, text: formatOf(step, Math.max(Math.abs(start), end)), isWhole: step >= 1 };
}

/** The format of all values of an axis, with the decimals, the factor or the power that its step needs. */
function formatOf(step, top) {
  const decimals = (size) => Math.max(0, -Math.floor(Math.log10(size) + 1e-6));
  if (top >= 1e4) {
    const [factor, letter] = LARGE.find(([each]) => top >= each);
    return (value) => `${(value / factor).toFixed(decimals(step / factor))}${value ? letter : ""}`;
  }
  if (step >= 1e-3) return (value) => value.toFixed(decimals(step));
  const power = Math.floor(Math.log10(top) + 1e-6);
  return (value) => (value ? `${(value / 10 ** power).toFixed(decimals(step / 10 ** power))}e${power}` : "0");
}

/** The axis of train steps. */
export function stepAxis(low, high) {
  const step = roundStep(high - low || 1, 5, 1);
  return { low, high, marks: multiples(low, high, step), text: (value) => value.toFixed(0) };
}

/** The axis of train steps since a start. */
export function offsetAxis(low, high) {
  return { ...stepAxis(low, high), text: (value) => `+${value.toFixed(0)}` };
}

/** The axis of seconds since a start. */
export function elapsedAxis(low, high) {
  const step = timeStep(high - low),
    [unit, name] = step < 60 ? [1, "s"] : step < 3600 ? [60, "min"] : [3600, "h"];
  return { low, high, marks: multiples(low, high, step), text: (value) => `${(value / unit).toFixed(0)} ${name}` };
}

/** The axis of the time of day, in milliseconds since 1970. */
export function clockAxis(low, high) {
  const step = timeStep((high - low) / 1000) * 1000,
    shift = new Date(high).getTimezoneOffset() * 60_000;
  const marks = multiples(low - shift, high - shift, step).map((value) => value + shift);
  const form = { hour: "2-digit", minute: "2-digit", second: step < 60_000 ? "2-digit" : undefined };
  return { low, high, marks, text: (value) => new Date(value).toLocaleTimeString("en-GB", form) };
}

function timeStep(range) {
  return TIMES_S.find((step) => step >= range / 4) ?? TIMES_S.at(-1) * Math.ceil(range / 4 / TIMES_S.at(-1));
}
