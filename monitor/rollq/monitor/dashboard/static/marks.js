// Marks of samples: a small square whose shape and colour show the reward, so that 0 and 1 differ even without colour.

import { h, svg } from "./dom.js";
import { number, plural } from "./format.js";

const SIZE = 9,
  STEP = 12,
  A_LINE = 16,
  HEIGHT = 14;

/** The kind of a sample: `failed`, `none` without a reward, `zero` for 0 or less, `full` for 1 or more, else `between`. */
export function kindOf(reward, isValid) {
  if (!isValid) return "failed";
  if (reward === null) return "none";
  if (reward <= 0) return "zero";
  return reward >= 1 ? "full" : "between";
}

/** The mark of one sample. */
export function mark(reward, isValid) {
  return drawn([{ kind: kindOf(reward, isValid), reward }], null);
}

/** The marks of the samples in a row of the list, one path per kind. In a search for samples, matching samples are
 * underlined. */
export function marks(samples, isSearch = false) {
  const read = samples.map(([, reward, , , isValid, matches]) => {
    return { kind: kindOf(reward, isValid), reward, isFound: isSearch && matches };
  });
  return drawn(read, inWords(read, isSearch));
}

/** The meanings of the marks, as a list. */
export function legendOfMarks() {
  const kinds = [
    ["reward 1", 1, true],
    ["between", 0.5, true],
    ["0", 0, true],
    ["failed", null, false],
  ];
  return h(
    "ul",
    { class: "legend" },
    kinds.map(([name, reward, isValid]) => h("li", null, mark(reward, isValid), name)),
  );
}

/** The samples of a row as a sentence. */
function inWords(read, isSearch) {
  const many = (kind, words) => {
    const count = read.filter((one) => one.kind === kind).length;
    return count ? [`${number(count)} ${words}`] : [];
  };
  const said = [
    ...many("full", "of reward 1"),
    ...many("between", "between 0 and 1"),
    ...many("zero", "of reward 0"),
    ...many("none", "without reward"),
    ...many("failed", "failed"),
    ...(isSearch ? [`${number(read.filter((one) => one.isFound).length)} found`] : []),
  ];
  return `${plural(read.length, "sample")}: ${said.join(", ")}`;
}

function drawn(read, label) {
  const paths = {};
  const add = (kind, d) => {
    paths[kind] = (paths[kind] ?? "") + d;
  };
  read.forEach(({ kind, reward, isFound }, at) => {
    const x = (at % A_LINE) * STEP + 1.5,
      y = Math.floor(at / A_LINE) * HEIGHT + 1.5;
    if (kind === "zero") add("zero", `M${x + 1} ${y + 1}l7 7m0-7l-7 7`);
    else if (kind === "none") add("none", `M${x + 3} ${y + 4.5}h3`);
    else add(kind === "failed" ? "failed" : "edge", `M${x} ${y}h${SIZE}v${SIZE}h-${SIZE}z`);
    if (kind === "full") add("full", `M${x} ${y}h${SIZE}v${SIZE}h-${SIZE}z`);
    if (kind === "between") {
      const high = Math.max(1, Math.round(reward * SIZE));
      add("between", `M${x} ${y + SIZE}v-${high}h${SIZE}v${high}z`);
    }
    if (isFound) add("found", `M${x - 0.5} ${y + SIZE + 2}h${SIZE + 1}`);
  });
  const width = Math.min(read.length, A_LINE) * STEP,
    height = Math.ceil(read.length / A_LINE) * HEIGHT;
  const shapes = Object.entries(paths).map(([kind, d]) => svg("path", { class: kind, d }));
  const named = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  const picture = svg("svg", { class: "marks", viewBox: `0 0 ${width} ${height}`, width, height, ...named }, shapes);
  return label ? h("span", { title: label }, picture) : picture;
}
