// Tables of any length: rows are updated in place, and of many rows, only rows near the view are drawn.

import { h, setText } from "./dom.js";

const ALL_DRAWN = 100,
  AROUND = 12,
  NEAR = 4;
const FIRST_HEIGHT = 31;

/** A table whose rows are updated in place, so that focus and selection stay. Of more than `ALL_DRAWN` rows, it draws
 * those that can be seen and `AROUND` more on each side; margins replace the others. */
export class Table {
  /** columns: [{title, cell: (row) => text or element, number, spare, roomy, hint}]; key: row => text; open: called on
   * Enter.
   *
   * A cell's element is made again when another row takes its place; with `same: (row) => text`, when this text
   * changes. `onSort("-step")` is called when the head of the column with `sort: "step"` is chosen, first for the
   * highest values at the top, then for the lowest, then with "". */
  constructor(label, columns, key, { open = null, empty = "none", onSort = null } = {}) {
    Object.assign(this, {
      columns,
      key,
      open,
      empty,
      onSort,
      all: [],
      first: 0,
      last: 0,
      height: FIRST_HEIGHT,
      isMeasured: false,
    });
    this.rows = new Map();
    this.body = h("tbody");
    this.heads = columns.map((column) => this.#head(column));
    this.table = h("table", { "aria-label": label }, h("thead", null, h("tr", null, this.heads)), this.body);
    this.element = h(
      "div",
      { class: "wide", tabindex: open ? null : "0", role: "region", "aria-label": label },
      this.table,
    );
    if (open) this.body.addEventListener("keydown", (event) => this.#move(event));
    document.addEventListener("scroll", () => this.#follow(), { capture: true, passive: true });
    window.addEventListener("resize", () => {
      this.#measure(false);
      this.#follow();
    });
  }

  /** Mark the head of the column by which the rows are sorted: "step", or "-step" for the highest first. */
  sorted(sort) {
    this.sort = sort;
    this.columns.forEach((column, i) => {
      const isOne = column.sort && column.sort === sort.replace("-", "");
      this.heads[i].ariaSort = isOne ? (sort.startsWith("-") ? "descending" : "ascending") : null;
    });
  }

  /** Change the title of the column with `sort`. */
  rename(sort, title) {
    setText(this.heads[this.columns.findIndex((column) => column.sort === sort)].firstChild, title);
  }

  #head(column) {
    const choose = () =>
      this.onSort({ [`-${column.sort}`]: column.sort, [column.sort]: "" }[this.sort] ?? `-${column.sort}`);
    const canSort = this.onSort && column.sort;
    return h(
      "th",
      { class: classOf(column), scope: "col", title: column.hint },
      canSort ? h("button", { type: "button", class: "sort", onclick: choose }, column.title) : column.title,
    );
  }

  show(rows) {
    this.all = rows;
    if (!rows.length) {
      const said = h("tr", { class: "empty" }, h("td", { colspan: this.columns.length }, this.empty));
      this.rows.clear();
      this.body.replaceChildren(said);
    }
    this.#draw(...this.#wanted());
  }

  /** The range of rows to draw at the table's current position. */
  #wanted() {
    const many = this.all.length;
    if (many <= ALL_DRAWN) return [0, many];
    const [top, bottom] = this.#seen();
    if (bottom > top) return [Math.max(0, top - AROUND), Math.min(many, bottom + AROUND)];
    return this.first < this.last && this.last <= many ? [this.first, this.last] : [0, ALL_DRAWN];
  }

  /** The range of visible rows; empty if the table is hidden. */
  #seen() {
    const box = this.element.getBoundingClientRect(),
      start = this.body.getBoundingClientRect().top - this.first * this.height;
    const at = (y) => Math.max(0, Math.min(this.all.length, (y - start) / this.height));
    return [Math.floor(at(Math.max(0, box.top))), Math.ceil(at(Math.min(window.innerHeight, box.bottom)))];
  }

  #follow() {
    if (this.all.length <= ALL_DRAWN) return;
    const [top, bottom] = this.#seen();
    const isNear =
      (this.first > 0 && top < this.first + NEAR) || (this.last < this.all.length && bottom > this.last - NEAR);
    if (bottom > top && isNear) this.#draw(...this.#wanted());
  }

  #draw(first, last) {
    const many = this.all.length,
      isPart = many > ALL_DRAWN,
      drawn = this.all.slice(first, last),
      keys = new Set(drawn.map(this.key));
    [this.first, this.last] = [first, last];
    const spare = [];
    for (const [key, row] of this.rows)
      if (!keys.has(key)) {
        this.rows.delete(key);
        if (row === document.activeElement) row.remove();
        else spare.push(row);
      }
    if (drawn.length) this.body.querySelector(".empty")?.remove();
    drawn.forEach((row, at) => {
      const key = this.key(row);
      const known = this.rows.get(key),
        element = known ?? spare.pop() ?? this.#made();
      this.rows.set(key, element);
      Object.assign(element, { data: row, at: first + at });
      if (isPart) element.ariaRowIndex = first + at + 2;
      this.#fill(element, row, !known);
      if (this.body.children[at] !== element) this.body.insertBefore(element, this.body.children[at] ?? null);
    });
    for (const row of spare) row.remove();
    this.table.ariaRowCount = isPart ? many + 1 : null;
    if (isPart !== this.isMeasured) this.#measure(isPart);
    this.table.style.marginTop = isPart ? `${first * this.height}px` : "";
    this.table.style.marginBottom = isPart ? `${(many - last) * this.height}px` : "";
  }

  #fill(element, row, isOther) {
    this.columns.forEach((column, i) => {
      const cell = element.children[i];
      if (column.same) {
        const text = column.same(row);
        if (cell.same !== text) cell.replaceChildren(column.cell(row));
        cell.same = text;
      } else {
        const value = column.cell(row);
        if (!(value instanceof Node)) setText(cell, value === "" ? "-" : value);
        else if (isOther || column.redraw) cell.replaceChildren(value);
      }
      if (column.mark) {
        const name = `${classOf(column)} ${column.mark(row)}`;
        if (cell.className !== name) cell.className = name;
      }
    });
  }

  /** Note the height of a row. Columns keep at least their current widths, so that they do not move while rows come and
   * go; a long column takes the rest. Once is enough until the page's size changes. */
  #measure(isPart) {
    const height = this.body.offsetHeight;
    this.isMeasured = isPart && height > 0;
    if (this.isMeasured) this.height = height / this.body.children.length;
    const widths = this.heads.map((head) => (this.isMeasured ? `${head.offsetWidth}px` : ""));
    this.columns.forEach((column, i) => {
      if (!column.long) this.heads[i].style.minWidth = widths[i];
    });
  }

  #made() {
    const row = h(
      "tr",
      this.open ? { tabindex: "0", class: "opens" } : null,
      this.columns.map((column) => h("td", { class: classOf(column) })),
    );
    if (this.open) {
      row.addEventListener("click", () => this.open(row.data));
      row.addEventListener("keydown", (event) => {
        if (event.key === "Enter") this.open(row.data);
      });
    }
    return row;
  }

  #move(event) {
    const at = document.activeElement.at,
      end = this.all.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: end }[event.key];
    if (to === undefined || at === undefined) return;
    event.preventDefault();
    const wanted = Math.max(0, Math.min(end, to));
    if (wanted < this.first || wanted >= this.last)
      this.#draw(Math.max(0, wanted - AROUND), Math.min(end + 1, wanted + AROUND));
    this.rows.get(this.key(this.all[wanted])).focus();
  }
}

function classOf(column) {
  return [
    column.number ? "number" : "",
    column.spare ? "spare" : "",
    column.roomy ? "roomy" : "",
    column.long ? "long" : "",
  ]
    .join(" ")
    .trim();
}
