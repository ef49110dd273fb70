// Numbers and times in readable form.

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A number with about three significant digits. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (size >= 100 || Number.isInteger(value)) return number(value);
  if (size < 0.01) return value.toPrecision(2);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value > 0 && value < 0.1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  const minutes = value / 60;
  return minutes < 120 ? `${minutes.toFixed(0)} min` : `${(minutes / 60).toFixed(0)} h`;
}

/** A number of bytes in a suitable unit. */
export function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${number(size)} ${unit}`;
    size /= 1024;
  }
  return `${number(size, 1)} GiB`;
}

export function percent(value) {
  return value === null || value === undefined ? "-" : `${Math.round(value * 100)}%`;
}

/** The time of day, from milliseconds since 1970. */
export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
