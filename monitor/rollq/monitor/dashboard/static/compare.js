// Two groups of one prompt, usually of two steps: their samples side by side, the best samples first.

import { addressOf } from "./links.js";
import { get } from "./api.js";
import { h } from "./dom.js";
import { number, plural } from "./format.js";
import { back, prompt } from "./group.js";
import { marks } from "./marks.js";
import { Samples } from "./samples.js";
import { Table } from "./table.js";

export class CompareView {
  constructor(root) {
    this.root = root;
    this.asked = 0;
  }

  /** Show two groups, given as task, number, task, number. */
  async show(...names) {
    const asked = ++this.asked;
    this.root.replaceChildren(h("p", { class: "note" }, "reading ..."));
    try {
      const read = (task, group) => get(`api/groups/${encodeURIComponent(task)}/${encodeURIComponent(group)}`);
      const groups = await Promise.all([read(...names.slice(0, 2)), read(...names.slice(2, 4))]);
      if (asked === this.asked) this.#draw(groups);
    } catch (error) {
      if (asked === this.asked)
        this.root.replaceChildren(back({}), h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  #draw(groups) {
    const isOneGroup = groups[0].task === groups[1].task && groups[0].group_id === groups[1].group_id,
      samples = new Samples(groups, nameOf),
      facts = factsTable();
    const [first, second] = groups.map((group) => JSON.stringify([group.prompt, group.answer])),
      isOnePrompt = first === second;
    samples.box.classList.add("pairs");
    samples.box.append(...pairs(groups, samples.cards));
    facts.show(groups);
    this.root.replaceChildren(
      back({}),
      h("h1", { tabindex: "-1" }, groups.map(nameOf).join(" and ")),
      facts.element,
      isOneGroup ? h("p", { class: "problem" }, "this is one group: name two in the address") : "",
      isOnePrompt || isOneGroup ? "" : h("p", { class: "problem" }, "the prompts differ"),
      h("div", { class: isOnePrompt ? "" : "two" }, isOnePrompt ? prompt(groups[0]) : groups.map(prompt)),
      samples.controls,
      samples.inspector,
      samples.box,
      h("p", { class: "note" }, groups[0].texts),
    );
    this.root.querySelector("h1").focus({ preventScroll: true });
  }
}

function nameOf(group) {
  return `${group.task} ${group.group_id}`;
}

function factsTable() {
  const spread = (values, digits) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return "-";
    const [low, high] = [Math.min(...known), Math.max(...known)].map((value) => number(value, digits));
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    return low === high ? low : `${number(mean, Math.max(1, digits))} (${low} to ${high})`;
  };
  const versions = (group) => new Set(group.samples.flatMap((sample) => Object.keys(sample.tokens_by_version)));
  return new Table(
    "Groups compared",
    [
      {
        title: "group",
        cell: (row) => h("a", { href: addressOf({ task: row.task, group: row.group_id }) }, nameOf(row)),
      },
      { title: "step", cell: (row) => number(row.step), number: true },
      { title: "version", cell: (row) => [...versions(row)].join(", "), number: true },
      { title: "samples", cell: (row) => (row.samples.length ? marks(row.samples.map(rowOf)) : "-") },
      {
        title: "mean reward",
        cell: (row) =>
          spread(
            row.samples.map((one) => one.reward),
            3,
          ),
        number: true,
      },
      {
        title: "mean tokens",
        cell: (row) =>
          spread(
            row.samples.map((one) => one.tokens),
            0,
          ),
        number: true,
      },
      { title: "status", cell: (row) => row.status, mark: (row) => `status ${row.status}` },
    ],
    (row) => nameOf(row),
  );
}

/** A sample in the form that a row of the list has. */
function rowOf({ index, reward, tokens, finish_reason, status }) {
  return [index, reward, tokens, finish_reason, status === "completed", true];
}

/** The cards of two groups, alternating: the best of each, the second best, and so on; a note if a group has fewer. */
function pairs(groups, cards) {
  const ranked = groups.map((group) => {
    const order = group.samples.map((_, at) => at).sort((one, other) => rank(group, other) - rank(group, one));
    return order.map((at) => cards.get(group)[at]);
  });
  const many = Math.max(...ranked.map((one) => one.length));
  return Array.from({ length: many }, (_, at) =>
    ranked.map(
      (one, side) =>
        one[at] ??
        h("p", { class: "note" }, `${nameOf(groups[side])} has ${plural(groups[side].samples.length, "sample")}`),
    ),
  ).flat();
}

function rank(group, at) {
  return group.samples[at].reward ?? -Number.MAX_VALUE;
}
