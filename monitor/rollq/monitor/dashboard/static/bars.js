// Charts of bars side by side.

import { valueAxis } from "./axes.js";
import { BOTTOM, Frame, HEIGHT, LEFT, RIGHT, TOP } from "./charts.js";
import { h, svg } from "./dom.js";
import { short } from "./format.js";

const THICKEST = 34;

/** Bars side by side, each as high as its count. */
export class BarChart {
  constructor(title, unit, note = "") {
    this.sets = [];
    this.frame = new Frame(title, unit, note, () => this.#draw());
    this.element = this.frame.element;
  }

  /** sets: [{name, values: {label: count}, kind}]; empty: the chart's text if all counts are 0. */
  show(sets, empty) {
    Object.assign(this, { sets, empty });
    this.#draw();
  }

  #draw() {
    const { frame, sets } = this,
      labels = [...new Set(sets.flatMap((set) => Object.keys(set.values)))].sort((a, b) => a - b),
      vertical = valueAxis(0, Math.max(1, ...sets.flatMap((set) => Object.values(set.values))), { least: 1 }),
      slot = (frame.width - LEFT - RIGHT) / Math.max(1, labels.length),
      thick = Math.min(THICKEST, (slot * 0.8) / Math.max(1, sets.length)),
      toX = (at) => LEFT + slot * (at + 0.5),
      toY = (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / vertical.high);
    const bars = labels.flatMap((label, i) =>
      sets.map(({ name, values, kind }, j) => {
        const value = values[label] ?? 0,
          x = toX(i) + thick * (j - sets.length / 2);
        return svg(
          "rect",
          { class: `area ${kind}`, x, y: toY(value), width: Math.max(1, thick - 1), height: toY(0) - toY(value) },
          svg("title", null, `${name}, ${label}: ${value}`),
        );
      }),
    );
    const isEmpty = !sets.some((set) => Object.values(set.values).some(Boolean));
    frame.picture.setAttribute("viewBox", `0 0 ${frame.width} ${HEIGHT}`);
    frame.picture.replaceChildren(
      ...frame.axes({ marks: labels.map((_, i) => i), text: (i) => labels[i] }, toX, vertical, toY),
      ...bars,
      ...(isEmpty ? [frame.middle(this.empty)] : []),
    );
    frame.legend.replaceChildren(
      ...sets.map(({ name, values, kind }) => {
        const all = Object.values(values).reduce((sum, value) => sum + value, 0);
        return h("li", null, h("i", { class: `key ${kind}` }), name, h("b", null, short(all)));
      }),
    );
  }
}
