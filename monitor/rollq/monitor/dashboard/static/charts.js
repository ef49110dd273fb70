// Small charts of lines and bars, drawn as SVG.

import { h, setText, svg } from "./dom.js";
import { clock, short } from "./format.js";

const WIDTH = 340,
  HEIGHT = 130,
  LEFT = 48,
  RIGHT = 6,
  TOP = 8,
  BOTTOM = 18;

/** Units that the legend repeats behind a value. */
const SAID = ["s", "steps"];

/** The next of 1, 2, 5, 10, 20, ... that is not below a value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999) ?? value;
}

/** The unit of the y axis, beside it. */
function unitMark(unit) {
  const y = (TOP + HEIGHT - BOTTOM) / 2;
  return svg("text", { class: "unit", x: 10, y, transform: `rotate(-90 10 ${y})`, "text-anchor": "middle" }, unit);
}

/** What a chart says in its middle while there is nothing to draw. */
function inTheMiddle(text) {
  return svg("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, text);
}

/** Lines over time, or areas one above the other, with a legend that shows the values under the pointer, or the last ones. */
export class LineChart {
  constructor(title, unit, note = "", isStacked = false) {
    this.unit = unit;
    this.isStacked = isStacked;
    this.legend = h("ul", { class: "legend" });
    this.when = h("span", { class: "when" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.element = h(
      "figure",
      { class: "chart", tabindex: "0", "aria-label": `${title}: arrow keys show values` },
      h(
        "figcaption",
        null,
        h("span", { class: "title" }, title),
        note && h("span", { class: "note" }, note),
        this.when,
      ),
      this.picture,
      this.legend,
    );
    this.at = null;
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      this.#point(Math.round(share * (this.times.length - 1)));
    });
    this.picture.addEventListener("pointerleave", () => this.#point(null));
    this.element.addEventListener("blur", () => this.#point(null));
    this.element.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.times?.length) return;
      event.preventDefault();
      this.#point((this.at ?? this.times.length - 1) + step);
    });
  }

  /** lines: [{name, values, kind}] with a value, or null, for each of `times` (ms). bound: {name, value}. */
  show(times, lines, bound = null) {
    Object.assign(this, { times, lines, bound });
    const tops = this.isStacked ? stacked(lines) : lines.map((line) => line.values);
    const known = tops.flat().filter((value) => value !== null);
    this.top = ceiling(Math.max(0, ...known, bound?.value ?? 0));
    const marks = [0, this.top / 2, this.top].map((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: this.#y(value), y2: this.#y(value) }),
      svg("text", { x: LEFT - 5, y: this.#y(value) + 3, "text-anchor": "end" }, short(value)),
    ]);
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
    this.picture.replaceChildren(
      ...marks.flat(),
      ...(bound
        ? [
            svg("line", {
              class: "bound",
              x1: LEFT,
              x2: WIDTH - RIGHT,
              y1: this.#y(bound.value),
              y2: this.#y(bound.value),
            }),
          ]
        : []),
      unitMark(this.unit),
      ...(known.length ? [] : [inTheMiddle(this.isStacked && times.length ? "none" : "no data yet")]),
      ...lines.map((line, i) => {
        const kind = `c${line.kind ?? i % 8}`;
        if (!this.isStacked) return svg("path", { class: `line dashed${i % 3} ${kind}`, d: this.#path(tops[i]) });
        const below = i ? tops[i - 1] : times.map(() => 0);
        return svg("path", { class: `area bar ${kind}`, d: this.#area(below, tops[i]) });
      }),
      svg("text", { x: LEFT, y: HEIGHT - 5 }, times.length ? clock(times[0]) : ""),
      svg(
        "text",
        { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" },
        times.length > 1 ? clock(times.at(-1)) : "a point each 10 s",
      ),
      this.cross,
    );
    this.legend.replaceChildren(
      ...lines.map((line, i) =>
        h("li", null, h("i", { class: `key c${line.kind ?? i % 8}` }), line.name, h("b", null)),
      ),
      ...(bound ? [h("li", null, h("i", { class: "key dashed" }), bound.name, h("b", null, short(bound.value)))] : []),
    );
    this.#point(this.at);
  }

  #x(at) {
    return LEFT + (WIDTH - LEFT - RIGHT) * (this.times.length < 2 ? 1 : at / (this.times.length - 1));
  }
  #y(value) {
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / this.top);
  }

  #path(values) {
    let path = "",
      isDown = false;
    values.forEach((value, at) => {
      if (value === null) {
        isDown = false;
        return;
      }
      path += `${isDown ? "L" : "M"}${this.#x(at).toFixed(1)} ${this.#y(value).toFixed(1)}`;
      if (!isDown) path += "h0.01"; // a value between unknown ones is a dot
      isDown = true;
    });
    return path;
  }

  #area(below, above) {
    const at = (values) => values.map((value, i) => `${this.#x(i).toFixed(1)} ${this.#y(value).toFixed(1)}`);
    return above.length ? `M${[...at(above), ...at(below).reverse()].join("L")}Z` : "";
  }

  #point(at) {
    if (!this.times) return;
    this.at = at === null ? null : Math.max(0, Math.min(this.times.length - 1, at));
    const x = this.at === null ? -9 : this.#x(this.at);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    setText(this.when, this.at === null || !this.times.length ? "" : clock(this.times[this.at]));
    this.lines.forEach((line, i) => {
      const value = this.at === null ? line.values.findLast((one) => one !== null) : line.values[this.at];
      setText(
        this.legend.children[i].lastChild,
        `${short(value ?? null)}${value === null || value === undefined || !SAID.includes(this.unit) ? "" : ` ${this.unit}`}`,
      );
    });
  }
}

/** The upper edges of areas that stand on each other. */
function stacked(lines) {
  const tops = [];
  for (const line of lines) tops.push(line.values.map((value, at) => (value ?? 0) + (tops.at(-1)?.[at] ?? 0)));
  return tops;
}

/** Bars side by side: how many there are of each. */
export class BarChart {
  constructor(title, unit, note = "") {
    this.unit = unit;
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.legend = h("ul", { class: "legend" });
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", null, h("span", { class: "title" }, title), note && h("span", { class: "note" }, note)),
      this.picture,
      this.legend,
    );
  }

  /** sets: [{name, values: {label: count}}] */
  show(sets, empty) {
    const labels = [...new Set(sets.flatMap((set) => Object.keys(set.values)))].sort((a, b) => a - b);
    const top = ceiling(Math.max(1, ...sets.flatMap((set) => Object.values(set.values))));
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / top);
    const slot = (WIDTH - LEFT - RIGHT) / Math.max(1, labels.length);
    const thick = Math.min(34, (slot * 0.8) / Math.max(1, sets.length));
    const bars = labels.flatMap((label, i) =>
      sets.map((set, j) => {
        const value = set.values[label] ?? 0;
        const x = LEFT + slot * (i + 0.5) + thick * (j - sets.length / 2);
        return svg(
          "rect",
          { class: `bar c${j % 8}`, x, y: y(value), width: Math.max(1, thick - 1), height: HEIGHT - BOTTOM - y(value) },
          svg("title", null, `${set.name}, ${label}: ${value}`),
        );
      }),
    );
    this.picture.replaceChildren(
      ...(top < 2 ? [0, top] : [0, top / 2, top]).flatMap((value) => [
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, short(value)),
      ]),
      ...bars,
      ...labels.map((label, i) =>
        svg("text", { x: LEFT + slot * (i + 0.5), y: HEIGHT - 5, "text-anchor": "middle" }, label),
      ),
      unitMark(this.unit),
      ...(sets.some((set) => Object.values(set.values).some(Boolean)) ? [] : [inTheMiddle(empty)]),
    );
    this.legend.replaceChildren(
      ...sets.map((set, i) =>
        h(
          "li",
          null,
          h("i", { class: `key c${i % 8}` }),
          set.name,
          h("b", null, short(Object.values(set.values).reduce((sum, value) => sum + value, 0))),
        ),
      ),
    );
  }
}
