// The tokens of a sample: drawn in their colours, and one at a time with all its values.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { number } from "./format.js";

const MORE_TOKENS = 4000,
  LEVELS = 6;
const LOGPROBS = [-0.05, -0.3, -0.7, -1.5, -3],
  MISMATCHES = [0.01, 0.03, 0.1, 0.3, 1];
const LOGPROB_LEGEND = [["l0", "certain"], ...LOGPROBS.map((bound, at) => [`l${at + 1}`, `< ${bound}${unit(at)}`])];

function unit(at) {
  return at === LEVELS - 2 ? " nats" : "";
}

/** Ways to colour tokens: which class a token has, and what the classes mean. A mode without values is not offered. */
export function modesOf(group) {
  const samples = group.samples,
    parts = samples.flatMap((sample) => sample.parts);
  const versions = [...new Set(samples.flatMap((sample) => Object.keys(sample.tokens_by_version).map(Number)))].sort(
    (a, b) => b - a,
  );
  const place = new Map(versions.map((version, at) => [version, Math.min(at, LEVELS - 1)]));
  const modes = [
    {
      id: "version",
      title: "version",
      of: (token) => (token.version === null ? "" : `v${place.get(token.version) ?? LEVELS - 1}`),
      legend: versions.map((version) => [`v${place.get(version)}`, `version ${version}`]),
    },
    {
      id: "mask",
      title: "loss mask",
      of: (token) => (token.counts ? "m1" : "m0"),
      legend: [
        ["m1", "the loss counts it"],
        ["m0", "masked"],
      ],
    },
    {
      id: "logprob",
      title: "logprob",
      of: (token) => (token.logprob === null ? "" : `l${level(token.logprob)}`),
      legend: LOGPROB_LEGEND,
    },
  ];
  if (samples.some((sample) => sample.advantage !== null))
    modes.push({
      id: "advantage",
      title: "advantage",
      of: (_token, sample) => (sample.advantage > 0 ? "plus" : sample.advantage < 0 ? "minus" : ""),
      legend: [
        ["plus", "above 0"],
        ["minus", "below 0"],
      ],
    });
  for (const name of new Set(parts.flatMap((part) => Object.keys(part.annotations)))) {
    const values = parts.flatMap((part) => part.annotations[name] ?? []).filter((value) => value !== null);
    const { of, legend } = scaleOf(name, values);
    modes.push({
      id: `annotation-${name}`,
      title: name,
      of: ({ annotations }) => (annotations[name] === null ? "m0" : of(annotations[name])),
      legend: [...legend, ["m0", "not trained"]],
    });
  }
  return modes;
}

/** The classes of the values of a column that the trainer has written, and what they mean. */
function scaleOf(name, values) {
  if (name === "trainer logprob") return { of: (value) => `l${level(value)}`, legend: LOGPROB_LEGEND };
  if (name === "mismatch")
    return {
      of: (value) => `l${MISMATCHES.filter((bound) => Math.abs(value) >= bound).length}`,
      legend: [
        ["l0", `< ${MISMATCHES[0]}`],
        ...MISMATCHES.map((bound, at) => [`l${at + 1}`, `from ${bound}${unit(at)}`]),
      ],
    };
  if (typeof values[0] === "boolean")
    return {
      of: (value) => (value ? "l5" : "l0"),
      legend: [
        ["l0", "no"],
        ["l5", "yes"],
      ],
    };
  const middle = name === "ratio" ? 1 : 0,
    top = Math.max(1e-9, ...values.map((value) => Math.abs(value - middle)));
  return {
    of: (value) => `l${Math.min(LEVELS - 1, Math.floor((Math.abs(value - middle) / top) * LEVELS))}`,
    legend: [
      ["l0", `near ${middle}`],
      ["l5", `${top.toPrecision(2)} away`],
    ],
  };
}

function level(logprob) {
  const at = LOGPROBS.findIndex((bound) => logprob >= bound);
  return at < 0 ? LEVELS - 1 : at;
}

/** The tokens of one sample. `onToken(token, sample)` is called for the one under the pointer or the cursor. */
export class Tokens {
  constructor(group, sample, onToken) {
    Object.assign(this, { group, sample, onToken, tokens: [], spans: [], current: -1 });
    this.box = h("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": `tokens of sample ${sample.index}: arrow keys show their values`,
    });
    this.more = h("button", { type: "button", onclick: () => this.#readMore() });
    this.element = h("div", null, this.box, this.more);
    this.box.addEventListener("pointerover", (event) => this.#point(event.target, false));
    this.box.addEventListener("click", (event) => this.#point(event.target, true));
    this.box.addEventListener("focus", () => {
      if (this.current < 0) this.select(0);
      else this.select(this.current);
    });
    this.box.addEventListener("keydown", (event) => {
      const to = {
        ArrowRight: this.current + 1,
        ArrowLeft: this.current - 1,
        ArrowDown: this.current + 10,
        ArrowUp: this.current - 10,
        Home: 0,
        End: this.tokens.length - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.select(to);
    });
    this.#add(sample.parts);
  }

  colour(mode) {
    this.mode = mode;
    this.spans.forEach((span, at) => {
      span.className = this.#classOf(this.tokens[at]);
    });
    this.#mark();
  }

  select(at) {
    if (!this.tokens.length) return;
    this.current = Math.max(0, Math.min(this.tokens.length - 1, at));
    this.#mark();
    this.onToken(this.tokens[this.current], this.sample);
  }

  #classOf(token) {
    return `t ${this.mode ? this.mode.of(token, this.sample) : ""}`;
  }

  #mark() {
    this.marked?.classList.remove("current");
    this.marked = this.spans[this.current];
    if (!this.marked) return;
    this.marked.classList.add("current");
    this.marked.scrollIntoView({ block: "nearest" });
  }

  #point(target, isChosen) {
    if (target.at === undefined) return;
    if (isChosen) this.select(target.at);
    else this.onToken(this.tokens[target.at], this.sample);
  }

  #add(parts) {
    for (const part of parts) {
      if (part.segment > 0 && part.segment !== this.segment)
        this.box.append(h("hr", { "aria-label": `segment ${part.segment}` }));
      this.segment = part.segment;
      part.ids.forEach((id, i) => {
        const token = {
          id,
          piece: part.pieces?.[i] ?? null,
          version: part.versions?.[i] ?? null,
          counts: part.counts[i],
          logprob: part.logprobs[i],
          place: part.start + i,
          segment: part.segment,
          annotations: Object.fromEntries(Object.entries(part.annotations).map(([name, values]) => [name, values[i]])),
        };
        const span = h("span", { class: this.#classOf(token) }, textOf(token));
        span.at = this.tokens.push(token) - 1;
        this.spans.push(span);
        this.box.append(span, ...(token.piece === null ? [" "] : []));
      });
    }
    const left = this.sample.tokens - this.tokens.length;
    this.more.hidden = left <= 0;
    setText(this.more, `Show more: ${number(left)} tokens are left`);
  }

  async #readMore() {
    this.more.disabled = true;
    const path = `api/groups/${encodeURIComponent(this.group.task)}/${this.group.group_id}/tokens`;
    try {
      const found = await get(path, { sample: this.sample.index, start: this.tokens.length, count: MORE_TOKENS });
      this.#add(found.parts);
    } catch (error) {
      setText(this.more, error.message);
    }
    this.more.disabled = false;
  }
}

/** The text of a token as it is drawn: characters that act on the text around them are shown, not obeyed. */
function textOf(token) {
  if (token.piece === null) return String(token.id);
  if (token.piece === "") return "\u00b7";
  return token.piece.replaceAll("\n", "\u23ce\n").replace(/(?![\t\n])\p{Cc}|\p{Bidi_Control}/gu, "\ufffd");
}
