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

/** Set the text of an element, if the text differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A text as nodes; text between backticks becomes code. */
export function coded(text) {
  const parts = text.split("`");
  if (parts.length % 2 === 0) return [text]; // an unpaired backtick is not a mark
  return parts.map((part, at) => (at % 2 ? h("code", null, part) : part));
}

export function byId(id) {
  return document.getElementById(id);
}
