// The filters of the list: a form that shows and changes the filters in the list's address.

import { wantedOf } from "./links.js";
import { h, setText } from "./dom.js";
import { number } from "./format.js";

const FINISHES = ["stop", "length", "tool_calls", "abort", "error"];

/** The filters that are set, in a few words each. */
function inWords(wanted) {
  const range = (name, low, high) => {
    if (!low && !high) return [];
    if (low === high) return [`${name} ${low}`];
    return [high ? (low ? `${name} ${low} to ${high}` : `${name} up to ${high}`) : `${name} from ${low}`];
  };
  return [
    ...(wanted.task ? [wanted.task] : []),
    ...(wanted.status ? [wanted.status] : []),
    ...(wanted.step ? [`step ${wanted.step}`] : []),
    ...range("reward", wanted.min_reward, wanted.max_reward),
    ...range("tokens", wanted.min_tokens, wanted.max_tokens),
    ...(wanted.finish ? [`ended by ${wanted.finish}`] : []),
    ...(wanted.prompt ? [`\u201c${wanted.prompt}\u201d in the prompt`] : []),
    ...(wanted.q ? [`\u201c${wanted.q}\u201d in the answers`] : []),
  ];
}

/** The order of the list, in words. */
function orderInWords(sort) {
  if (!sort) return [];
  const name = sort.replace("-", "");
  return [`by ${{ at: "time", tokens: "length" }[name] ?? name}, ${sort.startsWith("-") ? "highest" : "lowest"} first`];
}

/** The form. `elsewhere` lists the statuses of groups that may be only in the archive, which are not counted.
 * `onWanted(wanted)` is called when the filters change. */
export class Filters {
  constructor({ statuses, elsewhere }, onWanted) {
    Object.assign(this, { elsewhere, onWanted });
    this.wanted = {};
    this.task = choice("task", "Task", "all tasks", []);
    this.status = choice("status", "Status", "any status", statuses);
    const finish = choice("finish", "Ended by", "any end", FINISHES);
    this.presets = ["0", "1"].map((reward) =>
      h(
        "button",
        { type: "button", "aria-label": `Samples of reward ${reward}`, onclick: () => this.#preset(reward) },
        `= ${reward}`,
      ),
    );
    this.clear = h("button", { type: "button", onclick: () => onWanted({}) }, "Clear");
    this.form = h(
      "form",
      { class: "filters", role: "search", id: "filters" },
      h("label", null, "Task", this.task),
      h("label", null, "Status", this.status),
      field("step", "Step", { type: "number", min: "1" }),
      range("Sample reward", "reward", { step: "any" }, this.presets),
      range("Tokens of a sample", "tokens", { min: "0" }),
      h("label", null, "Ended by", finish),
      h(
        "div",
        { class: "texts" },
        field("prompt", "In the prompt", { type: "search" }),
        field("q", "In the answers", { type: "search", id: "search", placeholder: "press / to search" }),
        h("button", { type: "submit" }, "Show"),
        this.clear,
      ),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      onWanted(this.given());
      this.#open(false);
    });
    for (const one of [this.task, this.status, finish]) one.addEventListener("change", () => onWanted(this.given()));
    this.opener = h(
      "button",
      { type: "button", class: "opener", "aria-controls": "filters", onclick: () => this.#open() },
      "Filter",
    );
    this.said = h("span", { class: "wanted" });
    this.element = h("div", { class: "filtering" }, h("div", { class: "bar" }, this.opener, this.said), this.form);
    this.#open(false);
  }

  /** The form's filters, including typed text that was not submitted yet. */
  given() {
    return wantedOf(new URLSearchParams([...new FormData(this.form), ["sort", this.wanted.sort ?? ""]]));
  }

  /** Show filters in the form. */
  show(wanted) {
    this.wanted = wanted;
    for (const { name } of this.form.elements) if (name) this.form.elements[name].value = wanted[name] ?? "";
    for (const [at, button] of this.presets.entries())
      button.ariaPressed = wanted.min_reward === String(at) && wanted.max_reward === String(at);
    const words = inWords(wanted);
    this.clear.classList.toggle("unseen", !Object.keys(wanted).length); // it keeps its space, so that nothing moves
    setText(this.opener, words.length ? `Filter (${words.length})` : "Filter");
    setText(this.said, [...words, ...orderInWords(wanted.sort)].join(", "));
  }

  /** Offer tasks, with the number of groups of each status, if all of them are counted. */
  tasks(tasks) {
    const names = tasks.map((task) => task.task);
    const offered = [...this.task.options].slice(1).map((option) => option.value);
    if (names.join("\n") !== offered.join("\n")) {
      this.task.replaceChildren(this.task.options[0], ...names.map((name) => h("option", { value: name }, name)));
      this.task.value = this.wanted.task ?? "";
    }
    if (!tasks.every((task) => task.statuses)) return;
    for (const option of [...this.status.options].slice(1)) {
      if (this.elsewhere.includes(option.value)) continue;
      const groups = tasks
        .filter((task) => !this.task.value || task.task === this.task.value)
        .reduce((sum, task) => sum + (task.statuses[option.value] ?? 0), 0);
      setText(option, `${option.value} (${number(groups)})`);
    }
  }

  #preset(reward) {
    const { min_reward, max_reward, ...others } = this.given();
    const isChosen = min_reward === reward && max_reward === reward;
    this.onWanted(isChosen ? others : { ...others, min_reward: reward, max_reward: reward });
  }

  /** Open or close the form, on a narrow page. */
  #open(isOpen = this.opener.ariaExpanded !== "true") {
    this.opener.ariaExpanded = String(isOpen);
    this.element.classList.toggle("open", isOpen);
  }
}

function choice(name, label, every, values) {
  return h(
    "select",
    { name, "aria-label": label },
    h("option", { value: "" }, every),
    values.map((value) => h("option", { value }, value)),
  );
}

function field(name, label, attributes) {
  return h("label", { class: name }, label, h("input", { name, autocomplete: "off", ...attributes }));
}

/** Two numbers, from and to, and buttons for common ranges. */
function range(label, name, attributes, buttons = []) {
  const end = (which, word) =>
    h("input", {
      name: `${which}_${name}`,
      type: "number",
      autocomplete: "off",
      "aria-label": `${label}, ${word}`,
      placeholder: word,
      ...attributes,
    });
  return h(
    "div",
    { class: "range", role: "group", "aria-label": label },
    h("span", null, label),
    h("div", null, end("min", "from"), end("max", "to"), buttons),
  );
}
