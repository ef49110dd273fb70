// One group: its life, its prompt, its samples side by side down to single tokens, and its neighbours in the list.

import { addressOf, listAddress, searchesSamples } from "./links.js";
import { get } from "./api.js";
import { groupButtons } from "./changes.js";
import { h } from "./dom.js";
import { clock, number, plural, seconds } from "./format.js";
import { SamePrompt } from "./same_prompt.js";
import { Samples, talk, textual, tools } from "./samples.js";

/** Keys that open the previous and the next group of the list. */
const KEYS = { k: "before", j: "after" };
/** A card is not scrolled to if this many pixels of its head are visible. */
const SEEN = 60;

export class GroupView {
  /** `list`: the rollouts from which groups are opened. */
  constructor(root, list) {
    this.root = root;
    this.list = list;
    this.asked = 0;
    document.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Show a group; `wanted` holds the filters of the list from which it was opened. */
  async show(task, number, wanted) {
    const asked = ++this.asked;
    this.wanted = wanted;
    this.place = {};
    this.root.replaceChildren(h("p", { class: "note" }, "reading ..."));
    try {
      const group = await get(`api/groups/${encodeURIComponent(task)}/${number}`);
      if (asked !== this.asked) return;
      this.#draw(group);
      const place = await this.list.around(wanted, task, number);
      if (asked === this.asked) this.#place(place);
    } catch (error) {
      if (asked === this.asked)
        this.root.replaceChildren(back(wanted), h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #draw(group) {
    this.samples = new Samples([group]);
    this.cards = this.samples.cards.get(group);
    this.longest = longestOf(group.samples);
    this.ringed = h("p", { class: "note ringed", hidden: true });
    this.steps = h("span", { class: "steps" });
    this.same = new SamePrompt(group);
    this.root.replaceChildren(
      h("div", { class: "bar" }, back(this.wanted), this.steps),
      h(
        "div",
        { class: "bar group-name" },
        h("h1", null, `${group.task} ${group.group_id}`),
        h("span", { class: `pill status ${group.status}` }, group.status),
        h("span", null, group.reward === null ? "" : `reward ${number(group.reward, 3)}`),
        h("span", null, group.step === null ? "" : `step ${group.step}`),
        groupButtons(group, (order) => {
          this.list.forget();
          if (order === "drop") location.hash = listAddress(this.wanted);
          else this.show(group.task, String(group.group_id), this.wanted);
        }),
      ),
      group.error ? h("p", { class: "problem" }, `error: ${group.error}`) : "",
      group.problem ? h("p", { class: "problem" }, `samples are not shown: ${group.problem}`) : "",
      h("div", { class: "two" }, life(group), h("div", null, prompt(group), this.same.element)),
      this.samples.controls,
      group.annotations ? h("p", { class: "note", id: "annotations" }, group.annotations) : "",
      this.samples.inspector,
      this.ringed,
      this.samples.box,
      h("p", { class: "note" }, group.texts),
    );
    this.samples.box.append(...this.cards);
    if (this.longest !== null) this.#tag(this.longest, "longest");
    this.root.querySelector("h1").tabIndex = -1;
    this.root.querySelector("h1").focus({ preventScroll: true });
  }

  #tag(index, text) {
    this.cards[index].querySelector("h3").after(h("span", { class: "tag" }, text));
  }

  /** Link to the neighbours, and ring the samples for which the list has the group; scroll to the longest of these
   * samples if it is not visible. */
  #place(place) {
    this.place = place;
    const step = (key, word) => {
      const row = place[KEYS[key]],
        attributes = { "aria-keyshortcuts": key, title: row ? `${row.task} ${row.group}` : "" };
      if (!row) return h("span", { class: "note" }, word);
      const open = (event) => {
        event.preventDefault();
        this.#open(row);
      };
      return h("a", { href: addressOf(row, this.wanted), onclick: open, ...attributes }, word, h("kbd", null, key));
    };
    if (place.row) this.steps.append(step("k", "previous"), step("j", "next"));
    const isSearch = searchesSamples(this.wanted);
    if (!isSearch && this.wanted.sort !== "-tokens") return;
    const found = (place.row?.samples ?? []).filter(
      ([index, , tokens, , , matches]) => (matches || !isSearch) && tokens !== null && this.cards[index],
    );
    if (!found.length) return;
    const longest = longestOf(found.map(([index, , tokens]) => ({ index, tokens })));
    if (isSearch) this.#ring(found.map(([index]) => index));
    if (longest !== null && longest !== this.longest) this.#tag(longest, "longest found");
    const card = this.cards[longest ?? found[0][0]];
    if (card.getBoundingClientRect().top > window.innerHeight - SEEN) card.scrollIntoView({ block: "start" });
  }

  /** Ring the samples that match the list's filters, and say so. */
  #ring(indexes) {
    for (const index of indexes) this.cards[index].classList.add("found");
    const many = indexes.length;
    this.ringed.textContent = `Ringed: the ${many === 1 ? "sample that matches" : `${many} samples that match`} the list's filters`;
    this.ringed.hidden = false;
  }

  /** Open a neighbour in place of this group in the browser's history, so that Back leads to the list. */
  #open(row) {
    location.replace(addressOf(row, this.wanted));
  }

  #onKey(event) {
    const row = this.place?.[KEYS[event.key]];
    if (!row || this.root.hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches?.("input, textarea, select") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    this.#open(row);
  }
}

/** The index of the longest of some samples, {index, tokens}; null if all have the same length. */
function longestOf(samples) {
  const lengths = samples.map((one) => one.tokens),
    most = Math.max(...lengths);
  return lengths.some((length) => length !== most) ? samples[lengths.indexOf(most)].index : null;
}

/** The link back to the list. */
export function back(wanted) {
  return h(
    "p",
    { class: "back" },
    h(
      "a",
      {
        href: listAddress(wanted),
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

/** The prompt of a group, and its reference answer. */
export function prompt(group) {
  return h(
    "section",
    { class: "part" },
    h("h2", null, "Prompt"),
    talk(group.prompt),
    tools(group.tools),
    group.images ? h("p", { class: "note" }, `with ${plural(group.images, "image")}`) : "",
    group.answer === null ? "" : h("p", null, h("span", { class: "note" }, "answer "), textual(group.answer)),
  );
}
