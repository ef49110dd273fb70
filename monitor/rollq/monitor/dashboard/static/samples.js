// Samples as cards: their rewards and facts, and their tokens in colours, with the values of one token above them.

import { h } from "./dom.js";
import { number, plural, seconds } from "./format.js";
import { kindOf, mark } from "./marks.js";
import { modesOf, Tokens } from "./tokens.js";

const KEPT = "rollq-colour";

/** The samples of one group, or of several: choices of colour and form, the values of a token, and a card for each. */
export class Samples {
  /** `named(group)` returns the text before a sample's number in its card. */
  constructor(groups, named = () => "") {
    this.modes = modesOf(groups);
    this.inspector = h(
      "dl",
      { class: "inspector", "aria-live": "polite" },
      h("p", { class: "note" }, "Point at a token, or use the arrow keys in a sample, to see its values."),
    );
    this.parts = [];
    this.cards = new Map(groups.map((group) => [group, group.samples.map((one) => this.#card(group, one, named))]));
    this.box = h("div", { class: "samples" });
    this.legend = h("ul", { class: "legend" });
    const colours = this.modes.map((mode) => [mode.id, mode.title]),
      forms = [
        ["tokens", "tokens"],
        ["turns", "conversation"],
      ],
      talks = groups.some((group) => group.samples.some((sample) => sample.turns.length));
    this.controls = h(
      "div",
      { class: "bar controls" },
      this.#choice("Colour", colours, (id) => {
        sessionStorage.setItem(KEPT, id);
        this.#colour(id);
      }),
      this.legend,
      talks
        ? this.#choice("Show", forms, (id) => {
            this.box.dataset.shown = id;
          })
        : "",
    );
    this.box.dataset.shown = "tokens";
    const kept = sessionStorage.getItem(KEPT);
    this.#colour(this.#offered(kept));
  }

  /** The colouring that was chosen last, or advantage or reward if its values are absent here. */
  #offered(kept) {
    if (this.modes.some((mode) => mode.id === kept)) return kept;
    return kept ? this.modes.find((mode) => ["advantage", "reward"].includes(mode.id)).id : "version";
  }

  #card(group, sample, named) {
    const tokens = new Tokens(group, sample, (token, one) => this.#inspect(token, one, named(group)));
    this.parts.push(tokens);
    return card(sample, tokens, named(group));
  }

  #choice(label, options, choose) {
    const name = `choice-${label}`;
    return h(
      "fieldset",
      { class: "choice" },
      h("legend", null, label),
      options.map(([id, title], at) =>
        h(
          "label",
          null,
          h("input", { type: "radio", name, value: id, checked: at === 0, onchange: () => choose(id) }),
          title,
        ),
      ),
    );
  }

  #colour(id) {
    const mode = this.modes.find((one) => one.id === id);
    this.controls.querySelector(`input[value="${CSS.escape(id)}"]`).checked = true;
    for (const part of this.parts) part.colour(mode);
    this.legend.replaceChildren(
      ...mode.legend.map(([kind, name]) => h("li", null, h("span", { class: `t ${kind}` }, name))),
    );
  }

  #inspect(token, sample, name) {
    const shown = {
      sample: name ? `${name}, ${sample.index}` : sample.index,
      token: token.place,
      text: token.piece === null ? "-" : JSON.stringify(token.piece),
      id: token.id,
      version: token.version === null ? "-" : token.version,
      "loss mask": token.counts ? "counted" : "masked",
      logprob: token.logprob === null ? "-" : token.logprob.toFixed(4),
      probability: token.logprob === null ? "-" : Math.exp(token.logprob).toFixed(4),
      reward: number(sample.reward, 3),
      ...Object.fromEntries(
        Object.entries(sample.reward_parts).map(([name, value]) => [`part ${name}`, number(value, 3)]),
      ),
      ...(sample.advantage === null ? {} : { advantage: number(sample.advantage, 3) }),
      ...Object.fromEntries(Object.entries(token.annotations).map(([name, value]) => [name, annotated(value)])),
    };
    this.inspector.replaceChildren(
      ...Object.entries(shown).map(([name, value]) =>
        h("div", null, h("dt", null, name), h("dd", null, String(value))),
      ),
    );
  }
}

function annotated(value) {
  if (value === null || value === undefined) return "not trained";
  return typeof value === "boolean" ? (value ? "yes" : "no") : number(value, 4);
}

/** Messages, one below another. */
export function talk(turns) {
  return h(
    "div",
    { class: "talk" },
    turns.map((turn) =>
      h(
        "div",
        { class: `turn ${/^[a-z]+$/.test(turn.role) ? turn.role : ""}` },
        h("b", null, turn.role, turn.name ? ` ${turn.name}` : ""),
        h("div", { class: "text" }, textual(turn.text)),
      ),
    ),
  );
}

/** The tools that a model was offered: their names, and their definitions on demand. */
export function tools(offered) {
  return offered.names.length
    ? h(
        "details",
        { class: "note tools" },
        h("summary", null, `tools: ${offered.names.join(", ")}`),
        offered.definitions.map((tool) => h("pre", { class: "text" }, JSON.stringify(tool, null, 2))),
      )
    : "";
}

/** A value as a string; other values as JSON. */
export function textual(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function card(sample, tokens, name) {
  const isValid = sample.status === "completed";
  const facts = [
    sample.finish_reason ? `ended by ${sample.finish_reason}` : "",
    plural(sample.tokens, "token"),
    `the loss counts ${number(sample.counted_tokens)}`,
    sample.worker ? `by ${sample.worker}` : "",
    sample.judge ? `judged by ${sample.judge}${sample.judge_s === null ? "" : ` in ${seconds(sample.judge_s)}`}` : "",
  ];
  return h(
    "article",
    {
      class: `sample ${kindOf(sample.reward, isValid)}`,
      "aria-label": name ? `sample ${sample.index} of ${name}` : `sample ${sample.index}`,
    },
    h(
      "header",
      null,
      mark(sample.reward, isValid),
      h("h3", null, name ? `${name}, sample ${sample.index}` : `Sample ${sample.index}`),
      isValid
        ? ""
        : h(
            "span",
            { class: `pill status ${sample.status}` },
            sample.failure ? `${sample.status}: ${sample.failure}` : sample.status,
          ),
      h("b", { class: "reward" }, sample.reward === null ? "no reward" : `reward ${number(sample.reward, 3)}`),
    ),
    h(
      "dl",
      { class: "rewards" },
      Object.entries(sample.reward_parts).map(([name, value]) =>
        h("div", null, h("dt", null, name), h("dd", null, number(value, 3))),
      ),
    ),
    h("p", { class: "note" }, facts.filter(Boolean).join(", ")),
    sample.error ? h("p", { class: "problem" }, sample.error) : "",
    tools(sample.tools),
    sample.calls.length
      ? h(
          "details",
          { class: "calls", open: true },
          h("summary", null, plural(sample.calls.length, "call")),
          calls(sample),
        )
      : "",
    h(
      "div",
      { class: "as-tokens" },
      sample.tokens ? tokens.element : h("p", { class: "note" }, "no tokens"),
      sample.tokens && sample.parts[0]?.pieces === null && sample.text
        ? h("details", { open: true }, h("summary", null, "text"), h("div", { class: "text" }, textual(sample.text)))
        : "",
    ),
    h(
      "div",
      { class: "as-turns" },
      sample.turns.length ? talk(sample.turns) : h("div", { class: "text" }, textual(sample.text)),
    ),
    Object.keys(sample.sampling).length
      ? h("details", { class: "note" }, h("summary", null, "sampling"), textual(sample.sampling))
      : "",
  );
}

function calls(sample) {
  return h(
    "ol",
    null,
    sample.calls.map((call) => {
      const after = call.parent === null ? "" : ` after ${call.parent}`;
      const where = call.segment === null ? `not trained, ${call.left_out}` : `segment ${call.segment}`;
      const text = `call ${call.number}${after}: ${plural(call.tokens, "token")}, ${where}`;
      return h("li", { class: call.segment === null ? "untrained" : "", "data-depth": Math.min(call.depth, 8) }, text);
    }),
  );
}
