// The tokens of a sample: drawn in their colours, and one at a time with all its values.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { number } from "./format.js";

const MORE_TOKENS = 4000,
  LEVELS = 6;
/** Larger differences between rewards are not just rounding. */
const NOISE = 1e-9;
const BLOCK = 250,
  AROUND = "170px 0px";
const LOGPROBS = [-0.05, -0.3, -0.7, -1.5, -3],
  MISMATCHES = [0.01, 0.03, 0.1, 0.3, 1];
const LOGPROB_LEGEND = [["l0", "certain"], ...LOGPROBS.map((bound, at) => [`l${at + 1}`, `< ${bound}${unit(at)}`])];

function unit(at) {
  return at === LEVELS - 2 ? " nats" : "";
}

/** Ways to colour tokens: a token's class, and the meanings of the classes. A mode without values is not offered. */
export function modesOf(groups) {
  const samples = groups.flatMap((group) => group.samples),
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
  modes.push(samples.some((sample) => sample.advantage !== null) ? byAdvantage() : byReward(groups));
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

function byAdvantage() {
  return {
    id: "advantage",
    title: "advantage",
    of: (_token, sample) => signOf(sample.advantage),
    legend: [
      ["plus", "above 0"],
      ["minus", "below 0"],
    ],
  };
}

/** If no advantage is known: whether the reward of a sample is above or below the mean of its group. */
function byReward(groups) {
  const difference = new Map();
  for (const { samples } of groups) {
    const rewarded = samples.filter((sample) => sample.reward !== null);
    const mean = rewarded.reduce((sum, sample) => sum + sample.reward, 0) / rewarded.length;
    for (const sample of rewarded) difference.set(sample, sample.reward - mean);
  }
  return {
    id: "reward",
    title: "reward",
    of: (_token, sample) => signOf(difference.get(sample) ?? 0),
    legend: [
      ["plus", "above the group's mean"],
      ["minus", "below it"],
    ],
  };
}

function signOf(value) {
  return value > NOISE ? "plus" : value < -NOISE ? "minus" : "";
}

/** The classes for the values of a column that the trainer wrote, and their meanings. */
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

/** The tokens of one sample. `onToken(token, sample)` is called for the token under the pointer or the cursor.
 *
 * They are drawn in blocks of up to `BLOCK`; a block far outside the view is empty, and keeps its height. */
export class Tokens {
  constructor(group, sample, onToken) {
    Object.assign(this, { group, sample, onToken, parts: [], blocks: [], count: 0, current: -1, height: 1 });
    this.box = h("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": `tokens of sample ${sample.index}: arrow keys show their values`,
    });
    this.more = h("button", { type: "button", onclick: () => this.#readMore() });
    this.element = h("div", null, this.box, this.more);
    this.seen = new IntersectionObserver((entries) => this.#follow(entries), { root: this.box, rootMargin: AROUND });
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
        End: this.count - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.select(to);
    });
    this.#add(sample.parts);
  }

  colour(mode) {
    this.mode = mode;
    for (const block of this.blocks)
      for (const span of block.element.children) span.className = this.#classOf(this.#token(span.at));
  }

  select(at) {
    if (!this.count) return;
    this.current = Math.max(0, Math.min(this.count - 1, at));
    const block = this.blocks.find((one) => this.current < one.end);
    this.#draw(block);
    this.box.querySelector(".current")?.classList.remove("current");
    const span = block.element.children[this.current - block.start];
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.onToken(this.#token(this.current), this.sample);
  }

  /** The values of a token, by its index among all tokens of the sample. */
  #token(at) {
    const part = this.parts.findLast((one) => one.start <= at),
      i = at - part.start;
    return {
      id: part.ids[i],
      piece: part.pieces?.[i] ?? null,
      version: part.versions?.[i] ?? null,
      counts: part.counts[i],
      logprob: part.logprobs[i],
      place: at,
      segment: part.segment,
      annotations: Object.fromEntries(Object.entries(part.annotations).map(([name, values]) => [name, values[i]])),
    };
  }

  #classOf(token) {
    const mark = token.place === this.current ? " current" : "";
    return `t ${this.mode ? this.mode.of(token, this.sample) : ""}${mark}`;
  }

  #point(target, isChosen) {
    if (target.at === undefined) return;
    if (isChosen) this.select(target.at);
    else this.onToken(this.#token(target.at), this.sample);
  }

  #add(parts) {
    for (const part of parts) {
      if (part.segment > 0 && part.segment !== this.segment)
        this.box.append(h("hr", { "aria-label": `segment ${part.segment}` }));
      this.segment = part.segment;
      this.parts.push(part);
      this.count = part.start + part.ids.length;
      for (let start = part.start; start < this.count; ) {
        const end = endOfBlock(part, start),
          block = { start, end, element: h("div", { class: "block" }) };
        block.element.style.height = `${(end - start) * this.height}px`;
        block.element.block = block;
        this.blocks.push(block);
        this.box.append(block.element);
        if (start === 0) this.#draw(block);
        this.seen.observe(block.element);
        start = end;
      }
    }
    const left = this.sample.tokens - this.count;
    this.more.hidden = left <= 0;
    setText(this.more, `Show more: ${number(left)} tokens are left`);
  }

  #draw(block) {
    if (block.element.firstChild) return;
    for (let at = block.start; at < block.end; at++) {
      const token = this.#token(at),
        span = h("span", { class: this.#classOf(token) }, textOf(token));
      span.at = at;
      block.element.append(span, ...(token.piece === null ? [" "] : []));
    }
    block.element.style.height = "";
  }

  /** Draw blocks near the view, and empty blocks far from it. */
  #follow(entries) {
    for (const { target, isIntersecting, boundingClientRect, rootBounds } of entries) {
      if (!rootBounds?.height) continue; // the samples are hidden
      if (isIntersecting) this.#draw(target.block);
      else if (target.firstChild) {
        this.height = boundingClientRect.height / (target.block.end - target.block.start);
        target.style.height = `${boundingClientRect.height}px`;
        target.replaceChildren();
      }
    }
  }

  async #readMore() {
    this.more.disabled = true;
    const path = `api/groups/${encodeURIComponent(this.group.task)}/${this.group.group_id}/tokens`;
    try {
      const found = await get(path, { sample: this.sample.index, start: this.count, count: MORE_TOKENS });
      this.#add(found.parts);
    } catch (error) {
      setText(this.more, error.message);
    }
    this.more.disabled = false;
  }
}

/** The end of the block of a part that begins at `start`: after a line break, if there is one in time. */
function endOfBlock(part, start) {
  const end = Math.min(part.start + part.ids.length, start + BLOCK);
  for (let at = end; at > start + BLOCK / 2; at--) if (part.pieces?.[at - 1 - part.start]?.includes("\n")) return at;
  return end;
}

/** The text of a token as it is drawn: control characters are shown, and have no effect. */
function textOf(token) {
  if (token.piece === null) return String(token.id);
  if (token.piece === "") return "\u00b7";
  return token.piece.replaceAll("\n", "\u23ce\n").replace(/(?![\t\n])\p{Cc}|\p{Bidi_Control}/gu, "\ufffd");
}
