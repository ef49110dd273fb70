// Charts of lines, areas and points over one axis. A chart draws few paths, however many values it has.

import { valueAxis } from "./axes.js";
import { h, setText, svg } from "./dom.js";
import { number, short } from "./format.js";

export const HEIGHT = 140,
  LEFT = 44,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 18;
const FIRST_WIDTH = 350;
/** Units that the legend repeats after a value. */
const SAID = ["s", "steps"];

/** A place on the axis that several charts share: the place under the pointer, or a pinned place. */
export class Cursor {
  /** `onHold(at)` is called when the user pins a place, and with null when the user releases it. */
  constructor(onHold = () => {}) {
    [this.pointed, this.pinned, this.followed] = [null, null, null];
    Object.assign(this, { onHold, watchers: [] });
  }

  get at() {
    return this.pointed ?? this.pinned;
  }

  /** Call `onMove(at)` on each move; `at` is null without a place. */
  watch(onMove) {
    this.watchers.push(onMove);
  }

  point(at) {
    this.#move(() => {
      this.pointed = at;
    });
  }

  pin(at) {
    this.#move(() => {
      [this.pinned, this.pointed] = [at, null];
    });
  }

  hold(at) {
    this.pin(at);
    this.onHold(at);
  }

  /** All charts follow at most once per animation frame, however often the pointer moves. */
  #move(change) {
    change();
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      if (this.at === this.followed) return;
      this.followed = this.at;
      for (const onMove of this.watchers) onMove(this.at);
    });
  }
}

const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.onwidth?.(Math.round(contentRect.width));
});

/** The frame of a chart. The chart is redrawn when its width changes. */
export class Frame {
  constructor(title, unit, note, redraw) {
    this.width = FIRST_WIDTH;
    this.when = h("span", { class: "when" });
    this.legend = h("ul", { class: "legend" });
    this.cross = h("div", { class: "cross", hidden: true }); // outside the picture, which need not be painted again
    this.picture = svg("svg", { height: HEIGHT, role: "img", "aria-label": title });
    this.picture.onwidth = (width) => {
      if (!width || width === this.width) return;
      this.width = width;
      redraw();
    };
    resized.observe(this.picture);
    this.element = h(
      "figure",
      { class: "chart", "aria-label": title },
      h(
        "figcaption",
        null,
        h("span", { class: "title" }, title),
        h("span", { class: "unit" }, unit),
        note && h("span", { class: "note" }, note),
        this.when,
      ),
      h("div", { class: "plot" }, this.picture, this.cross),
      this.legend,
    );
  }

  /** The lines and labels of both axes; `toX` and `toY` return the position of a value. */
  axes(horizontal, toX, vertical, toY) {
    const right = this.width - RIGHT;
    const grid = vertical.marks.map((value) => `M${LEFT} ${toY(value)}H${right}`).join("");
    const anchor = (x) => (x < LEFT + 14 ? "start" : x > right - 14 ? "end" : "middle");
    return [
      svg("path", { class: "grid", d: grid }),
      ...vertical.marks.map((value) =>
        svg("text", { x: LEFT - 6, y: toY(value) + 3, "text-anchor": "end" }, vertical.text(value)),
      ),
      ...horizontal.marks.map((value) =>
        svg("text", { x: toX(value), y: HEIGHT - 5, "text-anchor": anchor(toX(value)) }, horizontal.text(value)),
      ),
    ];
  }

  /** The text in the middle of a chart without data. */
  middle(text) {
    return svg("text", { x: (LEFT + this.width) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, text);
  }
}

/** Lines over an axis, or stacked areas. The legend shows the values at the cursor, or else the last values. */
export class LineChart {
  /** `name` names a place on the axis: value => text. `least` is the smallest distance between marks. */
  constructor(title, { unit, note = "", isStacked = false, cursor = new Cursor(), name, least = 0 }) {
    Object.assign(this, { unit, isStacked, cursor, name, least, lines: [], toX: null });
    this.frame = new Frame(title, unit, note, () => this.#draw());
    this.element = this.frame.element;
    this.element.tabIndex = 0;
    this.element.ariaLabel = `${title}: arrow keys show values`;
    const { picture } = this.frame;
    picture.addEventListener("pointermove", (event) => this.cursor.point(this.#under(event)));
    picture.addEventListener("pointerleave", () => this.cursor.point(null));
    picture.addEventListener("click", (event) => {
      this.cursor.hold(this.cursor.pinned === null ? this.#under(event) : null);
    });
    this.element.addEventListener("blur", () => this.cursor.point(null));
    this.element.addEventListener("keydown", (event) => this.#step(event));
    cursor.watch((at) => this.#point(at));
  }

  /** Draw the chart again. lines: [{name, xs, values, kind, dash, isDots, breaks}]: `xs` rise, each with a value or
   * null; a line is broken before the indices in the set `breaks`; lines of one name share a legend entry. axis: the
   * horizontal axis; bound: {name, value}; changes: [{x, text}]; aside: [{name, value}], only in the legend. */
  show({ lines, axis, bound = null, changes = [], aside = [] }) {
    Object.assign(this, { lines, axis, bound, changes, aside });
    this.#draw();
  }

  #draw() {
    if (!this.axis) return;
    const { frame, axis, lines, bound } = this,
      tops = this.isStacked ? stacked(lines) : lines.map((line) => line.values),
      [low, high] = extent(tops, bound ? [bound.value] : []),
      vertical = valueAxis(low ?? 0, high ?? 1, { least: this.least, isFromZero: this.isStacked }),
      place =
        (from, size, { low, high }) =>
        (value) =>
          Math.round((from + (size * (value - low)) / (high - low || 1)) * 10) / 10;
    this.vertical = vertical;
    this.toX = place(LEFT, frame.width - LEFT - RIGHT, axis);
    const toY = place(HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT, vertical);
    frame.picture.setAttribute("viewBox", `0 0 ${frame.width} ${HEIGHT}`);
    frame.picture.replaceChildren(
      ...frame.axes(axis, this.toX, vertical, toY),
      ...this.changes.map(({ x, text }) =>
        svg("path", { class: "change", d: `M${this.toX(x)} ${TOP}V${HEIGHT - BOTTOM}` }, svg("title", null, text)),
      ),
      ...(bound ? [svg("path", { class: "bound", d: `M${LEFT} ${toY(bound.value)}H${frame.width - RIGHT}` })] : []),
      ...(low === null ? [frame.middle("none")] : []),
      ...lines.map((line, i) => this.#shape(line, tops[i], i ? tops[i - 1] : null, toY)),
    );
    this.values = lines.map(() => h("b"));
    this.frame.legend.replaceChildren(
      ...entriesOf(lines).map((places) => h("li", null, this.#entry(places))),
      ...(bound ? [h("li", null, h("i", { class: "key dashed" }), bound.name, h("b", null, short(bound.value)))] : []),
      ...this.aside.map(({ name, value }) => h("li", { class: "aside" }, name, h("b", null, short(value)))),
    );
    this.#point(this.cursor.at);
  }

  /** The legend's entry for lines of one name: the key and the value of each. */
  #entry(places) {
    const key = (i) => h("i", { class: `key ${this.lines[i].kind} ${look(this.lines[i])}` }),
      [first, ...others] = places;
    return [
      key(first),
      this.lines[first].name,
      this.values[first],
      ...others.flatMap((i) => [" ", key(i), this.values[i]]),
    ];
  }

  #shape(line, values, below, toY) {
    const { xs, kind, breaks } = line,
      { toX } = this;
    if (!this.isStacked)
      return svg("path", { class: `line ${kind} ${look(line)}`, d: path(thinned(line, toX), toX, toY, line) });
    const edge = (ys, from, to) => xs.slice(from, to).map((x, i) => `${toX(x)} ${toY(ys?.[from + i] ?? 0)}`);
    const starts = [0, ...(breaks ?? [])],
      piece = (from, i) => {
        const to = starts[i + 1] ?? xs.length;
        return `M${[...edge(values, from, to), ...edge(below, from, to).reverse()].join("L")}Z`;
      };
    return svg("path", { class: `area ${kind}`, d: xs.length ? starts.map(piece).join("") : "" });
  }

  /** The place with a value that is nearest to the pointer. */
  #under(event) {
    const xs = this.lines[0]?.xs;
    if (!xs?.length) return null;
    const box = this.frame.picture.getBoundingClientRect(),
      share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return xs[nearest(xs, this.axis.low + share * (this.axis.high - this.axis.low))];
  }

  #step(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key],
      xs = this.lines[0]?.xs;
    if (!step || !xs?.length) return;
    event.preventDefault();
    const at = this.cursor.at === null ? xs.length - 1 : nearest(xs, this.cursor.at) + step;
    this.cursor.point(xs[Math.max(0, Math.min(xs.length - 1, at))]);
  }

  #point(at) {
    if (!this.toX) return;
    const { cross } = this.frame;
    cross.hidden = at === null || at < this.axis.low || at > this.axis.high;
    if (!cross.hidden) cross.style.transform = `translateX(${this.toX(at)}px)`;
    setText(this.frame.when, at === null ? "" : this.name(at));
    this.lines.forEach((line, i) => {
      setText(this.values[i], this.#said(valueAt(line, at)));
    });
  }

  /** A value in the legend's form: with the unit if it is short, and with decimals if the axis has decimals. */
  #said(value) {
    if (value === null) return "-";
    const text = Number.isInteger(value) ? number(value, this.vertical.isWhole ? 0 : 2) : short(value);
    return SAID.includes(this.unit) ? `${text} ${this.unit}` : text;
  }
}

/** The indices of lines, grouped by name, in the order of each name's first line. */
function entriesOf(lines) {
  const places = new Map();
  for (const [i, { name }] of lines.entries()) places.set(name, [...(places.get(name) ?? []), i]);
  return [...places.values()];
}

/** The CSS classes that style a line. */
function look({ dash = 0, isDots = false }) {
  return `dash${dash}${isDots ? " dots" : ""}`;
}

/** The value of a line at a place on the axis or, without a place, its last value; null if there is no such value. */
function valueAt({ xs, values, isDots }, at) {
  if (at === null) return values.findLast((value) => value !== null) ?? null;
  const i = nearest(xs, at);
  if (isDots && xs[i] !== at) return null;
  return i < 0 || at < xs[0] || at > xs.at(-1) ? null : values[i];
}

/** The index of the number that is nearest to a value, in ascending numbers; -1 without numbers. */
export function nearest(xs, value) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle;
    else high = middle;
  }
  return high < 0 || value - xs[low] <= xs[high] - value ? Math.min(low, high) : high;
}

/** The least and the largest of the values; both null without values. */
function extent(columns, others) {
  let [low, high] = [Infinity, -Infinity];
  for (const values of [...columns, others])
    for (const value of values) if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low > high ? [null, null] : [low, high];
}

/** The visible points of a line: of points that share a pixel, the first, the smallest, the largest and the last; null
 * where the line is broken. */
function thinned({ xs, values, breaks }, toX) {
  const points = [];
  let pixel = null,
    kept = [];
  const flush = () => {
    points.push(...[...new Set(kept)].sort((one, other) => one - other).map((i) => [xs[i], values[i]]));
    [pixel, kept] = [null, []];
  };
  for (let i = 0; i < xs.length; i++) {
    if (breaks?.has(i)) {
      flush();
      points.push(null);
    }
    if (values[i] === null) continue;
    const at = Math.floor(toX(xs[i]));
    if (at !== pixel) {
      flush();
      [pixel, kept] = [at, [i, i, i, i]];
      continue;
    }
    if (values[i] < values[kept[1]]) kept[1] = i;
    if (values[i] > values[kept[2]]) kept[2] = i;
    kept[3] = i;
  }
  flush();
  return points;
}

/** The path of a line, joined across places without a value, or of dots. A single point is a dot. */
function path(points, toX, toY, { isDots }) {
  let drawn = "",
    isDown = false;
  for (const point of points) {
    if (point) drawn += `${isDown ? "L" : "M"}${toX(point[0])} ${toY(point[1])}${isDown ? "" : "h0.01"}`;
    isDown = point !== null && !isDots;
  }
  return drawn;
}

/** The upper edges of stacked areas. */
function stacked(lines) {
  const tops = [];
  for (const line of lines) tops.push(line.values.map((value, at) => (value ?? 0) + (tops.at(-1)?.[at] ?? 0)));
  return tops;
}
