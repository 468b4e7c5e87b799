// Which view an address shows, moving between them, and how far the file was read.

import { get } from "./api.js";
import { againstView } from "./against.js";
import { compareView } from "./compare.js";
import { h, replace } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { installKeys, openHelp } from "./keys.js";
import { groupView, listView } from "./list.js";
import { reportView } from "./report.js";
import { rowView } from "./rollout.js";

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const searchField = document.getElementById("q");
const POLL_MS = 1000;
const places = new Map(); // where one was in each list: address -> { item, scroll }
let shown = null; // the view on the page: { element, title, up, refresh, keys, ... }
let leaving = null; // aborts what the view before still waits for
let status = null;

const ROUTES = [
  [/^\/$/, () => (context) => listView(context, "groups")],
  [/^\/rows$/, () => (context) => listView(context, "rows")],
  [/^\/report$/, () => (context) => reportView(context)],
  [/^\/against$/, () => (context) => againstView(context)],
  [/^\/group\/(\d+)$/, ([number]) => (context) => groupView(context, Number(number))],
  [/^\/row\/(\d+)$/, ([line]) => (context) => rowView(context, Number(line))],
  [/^\/compare\/(\d+)\/(\d+)$/, ([a, b]) => (context) => compareView(context, Number(a), Number(b))],
];

function viewOf(path) {
  for (const [pattern, make] of ROUTES) {
    const match = pattern.exec(path);
    if (match) return make(match.slice(1));
  }
  return async () => ({ element: h("p", {}, "There is no such page."), title: "Not found", up: "/" });
}

function remember() {
  const item = document.activeElement?.closest?.("[data-item]")?.dataset.item;
  places.set(addressOf(location), { item, scroll: window.scrollY });
}

const addressOf = (place) => place.pathname + place.search;

export function navigate(address) {
  remember();
  history.pushState(null, "", address);
  show(true);
}

async function show(moved) {
  leaving?.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const parameters = new URLSearchParams(location.search);
  searchField.value = parameters.get("q") ?? "";
  main.setAttribute("aria-busy", "true");
  let made;
  try {
    made = await viewOf(location.pathname)({ parameters, signal, navigate, status });
  } catch (error) {
    if (error.name === "AbortError") return;
    made = { element: problem(error), title: "Not shown", up: "/" };
  }
  if (signal.aborted) return;
  const held = sameControl(document.activeElement);
  shown?.leave?.();
  shown = made;
  replace(main, made.element);
  main.setAttribute("aria-busy", "false");
  document.title = `${made.title} · gymrl view`;
  settle(moved, held);
}

// How to find what has the focus again in the same view made anew: a filter, a column's header.
function sameControl(element) {
  if (!element || !main.contains(element)) return null;
  if (element.name) return `[name="${element.name}"]`;
  const header = element.closest("th");
  return header ? `th:nth-child(${header.cellIndex + 1}) a` : null;
}

function problem(error) {
  return h("section", { class: "problem" }, h("h1", {}, "This can't be shown"), h("p", {}, error.message),
    h("p", {}, h("a", { href: "/" }, "All groups")));
}

// Where the reader is after a view came: where they were, or at its beginning.
function settle(moved, held) {
  shown.arrived?.();
  const place = places.get(addressOf(location));
  const control = held && main.querySelector(held);
  if (control) control.focus({ preventScroll: true });
  else if (place?.item !== undefined) main.querySelector(`[data-item="${Number(place.item)}"]`)?.focus({ preventScroll: true });
  else if (moved) main.querySelector("h1")?.focus({ preventScroll: true });
  if (!location.hash) window.scrollTo(0, control ? window.scrollY : place?.scroll ?? 0);
}

document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || anchor.target || anchor.hasAttribute("download") || anchor.origin !== location.origin) return;
  if (anchor.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  navigate(anchor.pathname + anchor.search + anchor.hash);
});
window.addEventListener("popstate", () => show(true));

document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const onRows = location.pathname === "/rows";
  const kept = new URLSearchParams(location.pathname === "/" || onRows ? location.search : "");
  kept.delete("offset");
  if (!onRows) kept.delete("sort");
  if (searchField.value) kept.set("q", searchField.value);
  else kept.delete("q");
  searchField.blur();
  navigate(`/rows?${kept}`);
});

let asking = false;
let silent = false; // the server did not answer the last time

async function poll() {
  if (asking || (document.hidden && status)) return;
  asking = true;
  try {
    await look();
  } catch (error) {
    silent = error.status === 0;
    say(error.message);
  } finally {
    asking = false;
  }
}

async function look() {
  const before = status;
  status = await get("/api/status");
  if (silent) say("");
  silent = false;
  showStatus();
  if (before === null) return;
  if (before.progress.epoch !== status.progress.epoch) {
    say("The file was replaced or rewritten; it is shown anew.");
    show(false);
  } else if (before.rows !== status.rows || before.broken !== status.broken) {
    await shown?.refresh?.(status);
  }
}

function say(text) {
  if (notice.dataset.text === text) return; // it would be read out again
  notice.dataset.text = text;
  notice.hidden = !text;
  replace(notice, text, text && h("button", { type: "button", class: "icon", "aria-label": "Dismiss", onclick: () => say("") }, "×"));
}

function showStatus() {
  const { progress } = status;
  const file = document.getElementById("file");
  if (file.textContent !== status.file) file.textContent = status.file;
  file.title = status.path;
  const parts = [`${plural(status.rows, "row")}, ${plural(status.groups, "group")}`];
  if (progress.state === "indexing") {
    const done = progress.size ? Math.floor((100 * progress.indexed) / progress.size) : 0;
    parts.push(`reading ${done}% of ${bytes(progress.size)}`);
  }
  if (progress.state === "gone") say(`${status.path} is gone; what was read of it stays listed.`);
  const bar = document.getElementById("status");
  const text = parts.join(" · ");
  const broken = status.broken ? brokenNote() : null;
  if (bar.dataset.text !== text + status.broken) {
    bar.dataset.text = text + status.broken;
    replace(bar, text, broken);
  }
  document.body.classList.toggle("indexing", progress.state === "indexing");
}

function brokenNote() {
  const lines = status.broken_lines.map((one) => h("li", {}, h("b", {}, `Line ${count(one.line)}: `), one.error));
  const rest = status.broken - status.broken_lines.length;
  if (rest > 0) lines.push(h("li", {}, `and ${plural(rest, "more")}`));
  return h("details", { class: "broken" }, h("summary", {}, plural(status.broken, "broken line")), h("ul", {}, lines));
}

installKeys({ shown: () => shown, navigate, searchField });
document.getElementById("help-button").addEventListener("click", openHelp);

async function begin() {
  await poll();
  await show(false);
  setInterval(poll, POLL_MS);
}

begin();
