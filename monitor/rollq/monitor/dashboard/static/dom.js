// Elements from plain values. Text is always set as text: nothing that a model wrote is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** An element of HTML: h("td", {class: "number"}, "12"). */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An element of SVG. */
export function svg(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Set the text of an element, if it is another one. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A table whose rows are updated in place, so that focus and selection stay. */
export class Table {
  /** columns: [{title, cell: (row) => text or element, number, spare, roomy}]; key: row => text; open: what Enter does. */
  constructor(label, columns, key, { open = null, empty = "none" } = {}) {
    Object.assign(this, { columns, key, open, empty });
    this.rows = new Map();
    this.body = h("tbody");
    const heads = columns.map((column) => h("th", { class: classOf(column), scope: "col" }, column.title));
    this.element = h(
      "div",
      { class: "wide", tabindex: open ? null : "0", role: "region", "aria-label": label },
      h("table", { "aria-label": label }, h("thead", null, h("tr", null, heads)), this.body),
    );
    if (open) this.body.addEventListener("keydown", (event) => moveInRows(event, this.body));
  }

  show(rows) {
    const keys = new Set(rows.map(this.key));
    for (const [key, row] of this.rows)
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    if (!rows.length) {
      const said = h("tr", { class: "empty" }, h("td", { colspan: this.columns.length }, this.empty));
      this.body.replaceChildren(said);
      return;
    }
    this.body.querySelector(".empty")?.remove();
    rows.forEach((row, at) => {
      const key = this.key(row);
      let element = this.rows.get(key);
      if (!element) {
        element = this.#made();
        this.rows.set(key, element);
      }
      element.data = row;
      this.columns.forEach((column, i) => {
        const cell = element.children[i],
          value = column.cell(row);
        if (value instanceof Node) {
          if (!cell.firstChild || column.redraw) cell.replaceChildren(value);
        } else setText(cell, value);
        if (column.mark) cell.className = `${classOf(column)} ${column.mark(row)}`;
      });
      if (this.body.children[at] !== element) this.body.insertBefore(element, this.body.children[at] ?? null);
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

function moveInRows(event, body) {
  const rows = [...body.querySelectorAll("tr[tabindex]")],
    at = rows.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  rows[Math.max(0, Math.min(rows.length - 1, to))].focus();
}
