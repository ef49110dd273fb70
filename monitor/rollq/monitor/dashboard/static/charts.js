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
/** Units that the legend repeats behind a value. */
const SAID = ["s", "steps"];

/** A place on the axis that several charts share: the one under the pointer, or one that was pinned. */
export class Cursor {
  /** `onHold(at)` is called when somebody pins a place, or with null releases it. */
  constructor(onHold = () => {}) {
    [this.pointed, this.pinned, this.followed] = [null, null, null];
    Object.assign(this, { onHold, watchers: [] });
  }

  get at() {
    return this.pointed ?? this.pinned;
  }

  /** Call `onMove(at)` at each move; null: nothing is pointed at. */
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

  /** All charts follow once a frame, however often the pointer moves. */
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

/** The frame of a chart, which is drawn again when its width changes. */
export class Frame {
  constructor(title, unit, note, redraw) {
    this.width = FIRST_WIDTH;
    this.when = h("span", { class: "when" });
    this.legend = h("ul", { class: "legend" });
    this.cross = h("div", { class: "cross", hidden: true }); // no part of the picture, which is not painted again
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

  /** Lines and texts of both axes; `toX` and `toY` give the place of a value. */
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

  /** What the chart says in its middle while there is nothing to draw. */
  middle(text) {
    return svg("text", { x: (LEFT + this.width) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, text);
  }
}

/** Lines over an axis, or areas one above the other; its legend shows the values at the cursor, or the last ones. */
export class LineChart {
  /** `name`: of a place of the axis: value => text. `least`: the least distance of marks. */
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

  /** Draw anew. lines: [{name, xs, values, kind, dash, isDots, breaks}], `xs` rising, a value or null for each,
   * broken before the places in the set `breaks`, those of one name in one entry of the legend; axis: the horizontal
   * one; bound: {name, value}; changes: [{x, text}]; aside: [{name, value}], in the legend alone. */
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

  /** Lines of one name in the legend: the key and the value of each. */
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

  /** The place of the axis under the pointer that has a value. */
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

  /** A value as the legend says it: with the unit where that is short, and with decimals where the axis has some. */
  #said(value) {
    if (value === null) return "-";
    const text = Number.isInteger(value) ? number(value, this.vertical.isWhole ? 0 : 2) : short(value);
    return SAID.includes(this.unit) ? `${text} ${this.unit}` : text;
  }
}

/** The places of lines by their names, in the order of the first of each. */
function entriesOf(lines) {
  const places = new Map();
  for (const [i, { name }] of lines.entries()) places.set(name, [...(places.get(name) ?? []), i]);
  return [...places.values()];
}

/** How a line is drawn, as names of classes. */
function look({ dash = 0, isDots = false }) {
  return `dash${dash}${isDots ? " dots" : ""}`;
}

/** The value of a line at a place of the axis, or its last one; null where it has none there. */
function valueAt({ xs, values, isDots }, at) {
  if (at === null) return values.findLast((value) => value !== null) ?? null;
  const i = nearest(xs, at);
  if (isDots && xs[i] !== at) return null;
  return i < 0 || at < xs[0] || at > xs.at(-1) ? null : values[i];
}

/** The index of the number that is nearest to a value, in rising numbers; -1 in none. */
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

/** The least and the largest of the values; both null without any. */
function extent(columns, others) {
  let [low, high] = [Infinity, -Infinity];
  for (const values of [...columns, others])
    for (const value of values) if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low > high ? [null, null] : [low, high];
}

/** The points of a line that can be seen: of those that share a pixel the first, the least, the largest and the last;
 * null where the line is broken. */
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

/** The path of a line, joined over places without a value; or of dots. A lonely point is a dot. */
function path(points, toX, toY, { isDots }) {
  let drawn = "",
    isDown = false;
  for (const point of points) {
    if (point) drawn += `${isDown ? "L" : "M"}${toX(point[0])} ${toY(point[1])}${isDown ? "" : "h0.01"}`;
    isDown = point !== null && !isDots;
  }
  return drawn;
}

/** The upper edges of areas that stand on each other. */
function stacked(lines) {
  const tops = [];
  for (const line of lines) tops.push(line.values.map((value, at) => (value ?? 0) + (tops.at(-1)?.[at] ?? 0)));
  return tops;
}
