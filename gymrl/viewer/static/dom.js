// Elements are made here alone, and text enters them as text nodes: what a model wrote can't become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : upright(String(child)));
  }
}

// Characters that would turn around what stands beside them, on a page that shows what was said as it was.
const TURNING = /[\u202a-\u202e\u2066-\u2069]/g;
export const upright = (text) => text.replace(TURNING, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase()}⟩`);

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// A link inside the viewer. Strings only come from this code and numbers from the server.
export function link(path, attributes, ...children) {
  return h("a", { href: path, ...attributes }, ...children);
}
