// The rollout browser: groups by task, status, step, and texts.

import { get } from "./api.js";
import { byId, h, setText } from "./dom.js";
import { clock, number, plural } from "./format.js";
import { Table } from "./table.js";

const FIRST_PAGE = 50,
  PAGE = 200;

export function addressOf(row) {
  return `#/rollouts/${encodeURIComponent(row.task)}/${row.group}`;
}

/** A table of groups; a click, or Enter, opens one. */
export function groupTable(label, empty = "no groups") {
  return new Table(
    label,
    [
      {
        title: "group",
        cell: (row) => h("a", { href: addressOf(row), tabindex: "-1" }, `${row.task} ${row.group}`),
        redraw: false,
      },
      { title: "status", cell: (row) => row.status, mark: (row) => `status ${row.status}` },
      { title: "step", cell: (row) => number(row.step), number: true },
      { title: "reward", cell: (row) => number(row.reward, 3), number: true },
      { title: "tokens", cell: (row) => number(row.tokens), number: true },
      { title: "tries", cell: (row) => number(row.tries), number: true, spare: true },
      { title: "worker", cell: (row) => row.worker || "-", spare: true },
      { title: "time", cell: (row) => (row.at_ms ? clock(row.at_ms) : "-"), number: true, spare: true },
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
        location.hash = addressOf(row);
      },
      empty,
    },
  );
}

export class RolloutsView {
  constructor(root, statuses) {
    const field = (name, label, attributes) =>
      h("label", null, label, h("input", { name, type: "search", autocomplete: "off", ...attributes }));
    this.task = h("select", { name: "task", "aria-label": "Task" }, h("option", { value: "" }, "all tasks"));
    this.status = h(
      "select",
      { name: "status", "aria-label": "Status" },
      h("option", { value: "" }, "any status"),
      statuses.map((one) => h("option", { value: one }, one)),
    );
    this.form = h(
      "form",
      { class: "filters", role: "search" },
      h("label", null, "Task", this.task),
      h("label", null, "Status", this.status),
      field("step", "Step", { type: "number", min: "1", class: "narrow" }),
      field("prompt", "In the prompt"),
      field("q", "In the answers", { id: "search", placeholder: "press / to search" }),
      h("button", { type: "submit" }, "Show"),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#address();
    });
    for (const select of [this.task, this.status]) select.addEventListener("change", () => this.#address());
    this.table = groupTable("Groups");
    this.said = h("p", { class: "note", role: "status" });
    this.more = h("button", { type: "button", onclick: () => this.#read(this.after) }, "More");
    root.append(
      h("h1", { class: "hidden" }, "Rollouts"),
      this.form,
      this.table.element,
      h("div", { class: "bar" }, this.said, this.more),
    );
    this.rows = [];
    this.asked = 0;
  }

  /** Offer tasks, with the number of groups of each status where that is known. */
  tasks(tasks) {
    const names = tasks.map((task) => task.task);
    if (
      names.join("\n") !==
      [...this.task.options]
        .slice(1)
        .map((option) => option.value)
        .join("\n")
    ) {
      const chosen = this.wanted?.task ?? "";
      this.task.replaceChildren(
        h("option", { value: "" }, "all tasks"),
        ...names.map((name) => h("option", { value: name }, name)),
      );
      this.task.value = chosen;
    }
    if (!tasks.every((task) => task.statuses)) return;
    for (const option of [...this.status.options].slice(1)) {
      const groups = tasks
        .filter((task) => !this.task.value || task.task === this.task.value)
        .reduce((sum, task) => sum + (task.statuses[option.value] ?? 0), 0);
      setText(option, `${option.value} (${number(groups)})`);
    }
  }

  /** Show what an address asks for: task, status, step, prompt and q. */
  show(wanted) {
    const asked = JSON.stringify(wanted);
    if (asked === JSON.stringify(this.wanted)) return;
    this.wanted = wanted;
    for (const name of ["task", "status", "step", "prompt", "q"]) this.form.elements[name].value = wanted[name] ?? "";
    this.rows = [];
    this.#read("");
  }

  /** Read what is shown again when it is shown next. */
  forget() {
    this.wanted = null;
  }

  #address() {
    const given = Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value));
    this.wanted = null;
    const query = new URLSearchParams(given).toString(),
      hash = query ? `#/rollouts?${query}` : "#/rollouts";
    if (location.hash === hash) this.show(given);
    else location.hash = hash;
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
    const shown = `${plural(this.rows.length, "group")} shown${found.after === null ? ", which are all" : ""}`;
    setText(this.said, `${shown}; ${number(this.read)} read`);
    byId("search").setAttribute("aria-description", this.said.textContent);
  }
}
