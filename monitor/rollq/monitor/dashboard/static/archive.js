// The first view of an archive: why it has no charts, and the newest rollouts.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { groupTable } from "./rollouts.js";

const NEWEST = 20;

export class ArchiveView {
  constructor(root, archive) {
    this.latest = groupTable("Newest rollouts");
    this.said = h("p", { class: "problem", role: "alert" });
    root.append(
      h(
        "p",
        { class: "note" },
        `An archive holds only groups, here of ${archive.tasks.join(", ")}, so there are no charts.`,
      ),
      this.said,
      h("section", { class: "part" }, h("h2", null, "Newest rollouts"), this.latest.element),
    );
  }

  async open() {
    try {
      this.latest.show((await get("api/groups", { limit: NEWEST })).groups);
      setText(this.said, "");
    } catch (error) {
      setText(this.said, error.message);
    }
  }
}
