// The list of rollouts: groups selected by filters, sorted by a column.

import { addressOf, listAddress, queryOf, searchesSamples } from "./links.js";
import { get } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { Filters } from "./filters.js";
import { clock, number, plural } from "./format.js";
import { legendOfMarks, marks } from "./marks.js";
import { Table } from "./table.js";

const FIRST_PAGE = 50,
  PAGE = 200;
const NOT_ALL = "older groups were not searched: choose a task, a status or a step";

/** Titles of the columns that cover only matching samples in a search for samples. */
const HEADS = { reward: ["mean reward", "mean reward found"], tokens: ["longest", "longest found"] };

/** A table of groups; a click, or Enter, opens one. `wanted()` returns the list's filters; `onSort`: see `Table`. */
export function groupTable(label, empty = "no groups", { wanted = () => ({}), onSort = null } = {}) {
  return new Table(
    label,
    [
      {
        title: "group",
        cell: (row) => h("a", { href: addressOf(row, wanted()), tabindex: "-1" }, `${row.task} ${row.group}`),
        same: (row) => addressOf(row, wanted()),
      },
      { title: "step", sort: "step", cell: (row) => number(row.step), number: true },
      {
        title: "samples",
        cell: (row) => (row.samples.length ? marks(row.samples, searchesSamples(wanted())) : "-"),
        same: (row) => `${searchesSamples(wanted())} ${row.samples}`,
      },
      {
        title: HEADS.reward[0],
        sort: "reward",
        cell: (row) => number(numbersOf(row, wanted()).reward, 3),
        number: true,
      },
      {
        title: HEADS.tokens[0],
        hint: "tokens of the longest answer",
        sort: "tokens",
        cell: (row) => number(numbersOf(row, wanted()).longest),
        number: true,
      },
      {
        title: "status",
        cell: (row) => (row.archived && row.status !== "archived" ? `${row.status}, archived` : row.status),
        mark: (row) => `status ${row.status}`,
      },
      { title: "tries", sort: "tries", cell: (row) => number(row.tries), number: true, spare: true },
      { title: "worker", cell: (row) => row.worker, spare: true, roomy: true },
      { title: "time", sort: "at", cell: (row) => (row.at_ms ? clock(row.at_ms) : "-"), number: true, spare: true },
      {
        title: "prompt, or error",
        cell: (row) => (row.error ? `error: ${row.error}` : row.prompt),
        long: true,
        mark: (row) => (row.error ? "bad" : ""),
      },
    ],
    (row) => `${row.task} ${row.group}`,
    {
      open: (row) => {
        location.hash = addressOf(row, wanted());
      },
      empty,
      onSort,
    },
  );
}

/** The mean reward, and the tokens of the longest sample; in a search for samples, of the matching samples. */
function numbersOf(row, wanted) {
  if (!searchesSamples(wanted)) return { reward: row.reward, longest: row.tokens };
  const found = row.samples.filter(([, , , , , matches]) => matches);
  const known = (at) => found.map((one) => one[at]).filter((value) => value !== null),
    [rewards, tokens] = [known(1), known(2)];
  return {
    reward: rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null,
    longest: tokens.length ? Math.max(...tokens) : null,
  };
}

export class RolloutsView {
  /** `about`: facts of the run, with its statuses. */
  constructor(root, about) {
    this.filters = new Filters(about, (wanted) => this.#address(wanted));
    this.wanted = {};
    this.isOld = true;
    this.table = groupTable("Groups", "no groups", {
      wanted: () => this.wanted,
      onSort: (sort) => this.#address({ ...this.filters.given(), sort }),
    });
    this.said = h("p", { class: "note", role: "status" });
    this.more = h("button", { type: "button", onclick: () => this.#read(this.after) }, "More");
    root.append(
      h("h1", { class: "hidden" }, "Rollouts"),
      this.filters.element,
      this.table.element,
      h("div", { class: "bar" }, this.said, this.more, legendOfMarks()),
    );
    this.rows = [];
    this.asked = 0;
  }

  /** Offer tasks; see `Filters`. */
  tasks(tasks) {
    this.filters.tasks(tasks);
  }

  /** Show the list with the filters of `wantedOf`. The link to the list leads here until the filters change. */
  async show(wanted) {
    if (!this.isOld && queryOf(wanted) === queryOf(this.wanted)) return;
    [this.wanted, this.isOld, this.rows] = [wanted, false, []];
    this.filters.show(wanted);
    this.table.sorted(wanted.sort ?? "");
    for (const [sort, heads] of Object.entries(HEADS)) this.table.rename(sort, heads[Number(searchesSamples(wanted))]);
    document.querySelector("nav a[data-view=rollouts]").href = listAddress(wanted);
    await this.#read("");
  }

  /** Read the list again when it is shown next. */
  forget() {
    this.isOld = true;
  }

  /** A group's place in the list with these filters: rows {row, before, after}, each null if it is absent. A group that
   * was not opened from the list has no filters, and does not change the list. */
  async around(wanted, task, group) {
    if (!queryOf(wanted) && queryOf(this.wanted)) return { row: null, before: null, after: null };
    const place = () => this.rows.findIndex((row) => row.task === task && String(row.group) === group);
    await this.show(wanted);
    const at = place();
    if (at >= 0 && at === this.rows.length - 1 && this.after !== null) await this.#read(this.after);
    const near = (to) => (at < 0 ? null : (this.rows[to] ?? null));
    return { row: near(at), before: near(at - 1), after: near(at + 1) };
  }

  #address(wanted) {
    const given = Object.fromEntries(Object.entries(wanted).filter(([, value]) => value)),
      address = listAddress(given);
    this.isOld = true;
    if (location.hash === address) this.show(given);
    else location.hash = address;
  }

  async #read(after) {
    const asked = ++this.asked;
    this.more.hidden = true;
    setText(this.said, "reading ...");
    let found;
    try {
      found = await get("api/groups", { ...this.wanted, after, limit: after ? PAGE : FIRST_PAGE });
    } catch (error) {
      if (asked === this.asked) {
        setText(this.said, error.message);
        this.more.hidden = !after;
      }
      return;
    }
    if (asked !== this.asked) return;
    this.after = found.after;
    this.read = (after ? this.read : 0) + found.read;
    this.rows.push(...found.groups);
    this.table.show(this.rows);
    this.more.hidden = found.after === null;
    const isAll = found.after === null && !found.partial;
    const shown = `${plural(this.rows.length, "group")} shown${isAll ? ", which are all" : ""}`;
    setText(
      this.said,
      [shown, `${number(this.read)} read`, found.note || (found.partial && NOT_ALL)].filter(Boolean).join("; "),
    );
    byId("search").setAttribute("aria-description", this.said.textContent);
  }
}
