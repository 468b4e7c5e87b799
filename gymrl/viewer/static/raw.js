// The raw JSON of a line as a tree; each level is asked for when it is opened.

import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { bytes, count } from "./format.js";

export function rawTree(line, size) {
  const root = h("div", { class: "raw-tree" });
  load(line, [], root, 0);
  return h("section", { class: "raw", "aria-label": "Raw JSON" },
    h("p", { class: "muted" }, `Line ${count(line)} of the file${size === undefined ? "" : `, ${bytes(size)}`}. `,
      h("a", { href: `/api/rows/${line}/line`, download: "" }, "Download the line")),
    root);
}

async function load(line, path, into, offset) {
  const wait = h("span", { class: "muted" }, "…");
  into.append(wait);
  try {
    const node = await get(`/api/rows/${line}/raw`, { path: JSON.stringify(path), offset });
    wait.remove();
    show(line, path, into, node);
  } catch (error) {
    replace(wait, error.message);
  }
}

function show(line, path, into, node) {
  if (node.type !== "object" && node.type !== "array") {
    into.append(h("pre", { class: `json ${node.type}` }, node.text));
    const shown = node.offset + node.text.length;
    if (node.type === "string" && shown < node.length) {
      into.append(more(`${count(node.length - shown)} more characters`, () => load(line, path, into, shown)));
    }
    return;
  }
  const list = h("ul", { class: "json" });
  for (const entry of node.entries) list.append(member(line, path, entry));
  into.append(list);
  const next = node.offset + node.entries.length;
  if (next < node.length) into.append(more(`${count(node.length - next)} more`, () => load(line, path, into, next)));
}

function more(text, act) {
  const button = h("button", { type: "button", class: "more", onclick: () => { button.remove(); act(); } }, text);
  return button;
}

function member(line, path, entry) {
  const key = h("span", { class: "key" }, String(entry.key));
  const long = entry.type === "string" && entry.length > entry.preview.length;
  const open = entry.length > 0 && (entry.type === "object" || entry.type === "array" || long);
  if (!open) return h("li", {}, key, ": ", leaf(entry));
  const body = h("div");
  const size = entry.type === "object" ? `{ ${count(entry.length)} }`
    : entry.type === "array" ? `[ ${count(entry.length)} ]` : `${count(entry.length)} characters`;
  const details = h("details", {}, h("summary", {}, key, " ",
    h("span", { class: "muted" }, size, long ? ` ${entry.preview}…` : "")), body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.hasChildNodes()) load(line, [...path, entry.key], body, 0);
  });
  return h("li", {}, details);
}

function leaf(entry) {
  const empty = { object: "{}", array: "[]" }[entry.type];
  const text = empty ?? (entry.type === "string" ? JSON.stringify(entry.preview) : entry.preview);
  return h("span", { class: `json ${entry.type}` }, text);
}
