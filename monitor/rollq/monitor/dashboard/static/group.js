// One group: its life, its prompt, and its samples side by side, down to single tokens.

import { get } from "./api.js";
import { groupButtons } from "./changes.js";
import { h } from "./dom.js";
import { clock, number, plural, seconds } from "./format.js";
import { modesOf, Tokens } from "./tokens.js";

const KEPT = "rollq-colour";

export class GroupView {
  /** `onMoved` is called when a group was moved by hand. */
  constructor(root, onMoved) {
    this.root = root;
    this.onMoved = onMoved;
    this.asked = 0;
  }

  async show(task, number) {
    const asked = ++this.asked;
    this.root.replaceChildren(h("p", { class: "note" }, "reading ..."));
    try {
      const group = await get(`api/groups/${encodeURIComponent(task)}/${number}`);
      if (asked === this.asked) this.#draw(group);
    } catch (error) {
      if (asked === this.asked)
        this.root.replaceChildren(back(), h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #draw(group) {
    this.modes = modesOf(group);
    this.inspector = h(
      "dl",
      { class: "inspector", "aria-live": "polite" },
      h("p", { class: "note" }, "Point at a token, or use the arrow keys in a sample, to see its values."),
    );
    this.parts = group.samples.map((sample) => new Tokens(group, sample, (token, one) => this.#inspect(token, one)));
    this.legend = h("ul", { class: "legend" });
    const talks = group.samples.some((sample) => sample.turns.length);
    this.cards = h(
      "div",
      { class: "samples" },
      group.samples.map((sample, at) => card(sample, this.parts[at])),
    );
    this.root.replaceChildren(
      back(),
      h(
        "div",
        { class: "bar" },
        h("h1", null, `${group.task} ${group.group_id}`),
        h("span", { class: `pill status ${group.status}` }, group.status),
        h("span", null, group.reward === null ? "" : `reward ${number(group.reward, 3)}`),
        h("span", null, group.step === null ? "" : `step ${group.step}`),
        groupButtons(group, (order) => {
          this.onMoved();
          if (order === "drop") location.hash = "#/rollouts";
          else this.show(group.task, group.group_id);
        }),
      ),
      group.error ? h("p", { class: "problem" }, `error: ${group.error}`) : "",
      group.problem ? h("p", { class: "problem" }, `samples are not shown: ${group.problem}`) : "",
      h(
        "div",
        { class: "two" },
        life(group),
        h(
          "section",
          { class: "part" },
          h("h2", null, "Prompt"),
          talk(group.prompt),
          group.images ? h("p", { class: "note" }, `with ${plural(group.images, "image")}`) : "",
          group.answer === null ? "" : h("p", null, h("span", { class: "note" }, "answer "), textual(group.answer)),
        ),
      ),
      h(
        "div",
        { class: "bar controls" },
        this.#choice(
          "Colour",
          this.modes.map((mode) => [mode.id, mode.title]),
          (id) => this.#colour(id),
        ),
        this.legend,
        talks
          ? this.#choice(
              "Show",
              [
                ["tokens", "tokens"],
                ["turns", "conversation"],
              ],
              (id) => {
                this.cards.dataset.shown = id;
              },
            )
          : "",
      ),
      group.annotations ? h("p", { class: "note", id: "annotations" }, group.annotations) : "",
      this.inspector,
      this.cards,
      h("p", { class: "note" }, group.texts),
    );
    this.cards.dataset.shown = "tokens";
    const kept = sessionStorage.getItem(KEPT);
    this.#colour(this.modes.some((mode) => mode.id === kept) ? kept : "version");
    this.root.querySelector("h1").tabIndex = -1;
    this.root.querySelector("h1").focus({ preventScroll: true });
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
    sessionStorage.setItem(KEPT, id);
    this.root.querySelector(`input[value="${CSS.escape(id)}"]`).checked = true;
    for (const part of this.parts) part.colour(mode);
    this.legend.replaceChildren(
      ...mode.legend.map(([kind, name]) => h("li", null, h("span", { class: `t ${kind}` }, name))),
    );
  }

  #inspect(token, sample) {
    const shown = {
      sample: sample.index,
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

function back() {
  return h(
    "p",
    { class: "back" },
    h(
      "a",
      {
        href: "#/rollouts",
        onclick: (event) => {
          if (history.length > 1) {
            event.preventDefault();
            history.back();
          }
        },
      },
      "\u2190 back",
    ),
    h("kbd", null, "Esc"),
  );
}

function life(group) {
  const start = group.events.find((event) => event.at_ms !== null)?.at_ms ?? group.now_ms;
  const since = (event) => (event.at_ms === null ? "now" : `+${seconds((event.at_ms - start) / 1000)}`);
  return h(
    "section",
    { class: "part" },
    h("h2", null, "Life"),
    h("p", { class: "note" }, `since ${new Date(start).toLocaleDateString("en-CA")} ${clock(start)}`),
    h(
      "ol",
      { class: "life" },
      group.events.map((event) => h("li", null, h("time", null, since(event)), h("span", null, event.text))),
    ),
  );
}

function card(sample, tokens) {
  const facts = [
    sample.finish_reason ? `ended by ${sample.finish_reason}` : "",
    plural(sample.tokens, "token"),
    `the loss counts ${number(sample.counted_tokens)}`,
    sample.worker ? `by ${sample.worker}` : "",
    sample.judge ? `judged by ${sample.judge}${sample.judge_s === null ? "" : ` in ${seconds(sample.judge_s)}`}` : "",
  ];
  return h(
    "article",
    { class: "sample", "aria-label": `sample ${sample.index}` },
    h(
      "header",
      null,
      h("h3", null, `Sample ${sample.index}`),
      h("span", { class: `pill status ${sample.status}` }, sample.status),
      h("b", { class: "reward" }, sample.reward === null ? "no reward" : number(sample.reward, 3)),
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

function talk(turns) {
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

function textual(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
