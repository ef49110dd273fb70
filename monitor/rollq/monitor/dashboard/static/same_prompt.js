// Other groups of a group's prompt, mostly from other steps, each with a link to the page that compares the two.

import { addressOf, compareAddress } from "./links.js";
import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { number, plural } from "./format.js";
import { marks } from "./marks.js";
import { Table } from "./table.js";

export class SamePrompt {
  constructor(group) {
    const own = { task: group.task, group: group.group_id };
    this.own = own;
    this.table = new Table(
      "Groups of the same prompt",
      [
        { title: "group", cell: (row) => h("a", { href: addressOf(row) }, `${row.task} ${row.group}`) },
        { title: "step", cell: (row) => number(row.step), number: true },
        { title: "status", cell: (row) => row.status, mark: (row) => `status ${row.status}`, spare: true },
        {
          title: "samples",
          cell: (row) => (row.samples.length ? marks(row.samples) : "-"),
          same: (row) => String(row.samples),
        },
        { title: "mean reward", cell: (row) => number(row.reward, 3), number: true },
        { title: "beside", cell: (row) => h("a", { href: compareAddress(own, row) }, "compare") },
      ],
      (row) => `${row.task} ${row.group}`,
    );
    this.said = h("p", { class: "note", role: "status" }, "reading ...");
    this.element = h("section", { class: "part" }, h("h2", null, "The same prompt"), this.said, this.table.element);
    this.table.element.hidden = true;
    this.#read();
  }

  async #read() {
    const { task, group } = this.own;
    try {
      const found = await get("api/groups", { prompt_of: `${task}/${group}` });
      const others = found.groups.filter((row) => row.task !== task || row.group !== group);
      others.sort((one, other) => (one.step ?? 0) - (other.step ?? 0));
      this.table.element.hidden = !others.length;
      this.table.show(others);
      const count = others.length ? plural(others.length, "other group") : "no other group here",
        isAll = found.after === null && !found.partial;
      setText(this.said, [count, !isAll && "there may be more", found.note].filter(Boolean).join("; "));
    } catch (error) {
      setText(this.said, error.message);
    }
  }
}
