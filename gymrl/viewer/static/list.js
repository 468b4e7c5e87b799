// Lists of groups and of rollouts, their filters, and one group's page.

import { get } from "./api.js";
import { h, link, replace, svg } from "./dom.js";
import { count, fixed, plural, real } from "./format.js";

const LIMIT = 50;
const SEARCH_AT_MOST = 200;

const GROUP_COLUMNS = [
  ["Group", "file"], ["Prompt", null], ["Rewards", "spread"], ["Mean", "mean"], ["Std", "std"], ["Min", "min"],
  ["Max", "max"], ["Tokens", "tokens"], ["Failed", "failures"], ["Cut off", "truncated"],
];
const ROW_COLUMNS = [
  ["Line", "line"], ["Group", null], ["Attempt", null], ["Agent", null], ["Reward", "reward"], ["Tokens", "tokens"],
  ["Sampled", "generated"], ["Turns", "turns"], ["Outcome", null],
];

export async function listView(context, kind) {
  const { parameters, navigate, signal } = context;
  const state = Object.fromEntries(parameters);
  const searching = kind === "rows" && Boolean(state.q);
  const body = h("tbody");
  const summary = h("p", { class: "count", role: "status" });
  const pager = h("nav", { class: "pager", "aria-label": "Pages" });
  const stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());

  const to = (changes) => {
    const next = new URLSearchParams(parameters);
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === undefined) next.delete(name);
      else next.set(name, value);
    }
    if (!("offset" in changes)) next.delete("offset");
    const text = next.toString();
    return `${location.pathname}${text ? `?${text}` : ""}`;
  };
  let page = null;
  async function load() {
    page = await get(`/api/${kind}`, { ...state, limit: LIMIT }, stop.signal);
    keepFocus(body, () => replace(body, kind === "groups" ? page.groups.map((group) => groupRow(group, scaleOf(page.groups.flatMap((one) => one.rows)))) : page.rows.map(rowRow)));
    const shown = kind === "groups" ? page.groups.length : page.rows.length;
    const what = kind === "groups" ? plural(page.total, "group") : plural(page.total, "rollout");
    replace(summary, shown ? `${count(page.offset + 1)}–${count(page.offset + shown)} of ${what}` : `No ${kind === "groups" ? "group" : "rollout"} matches`);
    replace(pager, pageLink("Previous", page.offset - LIMIT, page.offset > 0), pageLink("Next", page.offset + LIMIT, page.offset + shown < page.total));
  }
  const pageLink = (text, offset, there) => there && link(to({ offset: Math.max(0, offset) || null }), { rel: text === "Next" ? "next" : "prev" }, text);
  const turnPage = (rel) => { const there = pager.querySelector(`[rel=${rel}]`); if (!there) return false; navigate(there.getAttribute("href")); };

  const bar = h("div");
  let named = "";
  const showFilters = (status) => {
    const names = JSON.stringify([status?.agents, status?.routes, status?.benchmarks, status?.failures]);
    if (names === named || bar.contains(document.activeElement)) return;
    named = names;
    replace(bar, filters(status, parameters, kind, (changes) => navigate(to(changes)), state));
  };
  showFilters(context.status);

  if (searching) search(state, stop.signal, body, summary);
  else await load();
  const element = h("div", { class: "list" },
    h("div", { class: "list-head" },
      h("h1", { tabindex: -1 }, kind === "groups" ? "Groups" : searching ? "Search" : "Rollouts"),
      tabs(kind, context.status, parameters),
      summary),
    bar,
    h("table", { class: `entries ${kind}` },
      h("caption", { class: "hidden" }, kind === "groups" ? "Groups of rollouts" : "Rollouts"),
      h("thead", {}, h("tr", {}, (kind === "groups" ? GROUP_COLUMNS : ROW_COLUMNS).map(([title, sort]) => header(title, sort, state.sort, kind, to)))),
      body),
    pager);
  return {
    element,
    title: kind === "groups" ? "Groups" : searching ? `“${state.q}”` : "Rollouts",
    up: parameters.size ? location.pathname : kind === "rows" ? "/" : null,
    refresh: async (status) => {
      showFilters(status);
      if (!searching && page) await load();
    },
    leave: () => stop.abort(),
    keys: { ...listKeys(element), n: () => turnPage("next"), p: () => turnPage("prev") },
  };
}

// The ways into a file; an evaluation's has a report as well.
export function tabs(current, status, parameters = new URLSearchParams()) {
  const tab = (name, address, title) => link(address, { "aria-current": current === name && "page" }, title);
  return h("nav", { class: "tabs", "aria-label": "Lists" },
    tab("groups", tabAddress("/", parameters), "Groups"), tab("rows", tabAddress("/rows", parameters), "Rollouts"),
    status?.evaluation && tab("report", "/report", "Report"),
    status?.against && tab("against", "/against", "Compared"));
}

function tabAddress(path, parameters) {
  const kept = new URLSearchParams(parameters);
  for (const name of ["sort", "offset", "q"]) kept.delete(name);
  return kept.size ? `${path}?${kept}` : path;
}

export function listKeys(element) {
  const items = () => [...element.querySelectorAll("[data-item]")];
  const move = (step) => {
    const all = items();
    const at = all.indexOf(document.activeElement?.closest?.("[data-item]"));
    const next = at < 0 ? (step > 0 ? all[0] : all.at(-1)) : all[at + step];
    next?.focus();
    next?.closest("tr")?.scrollIntoView({ block: "nearest" });
  };
  const arrow = (step) => () => {
    if (!document.activeElement?.closest?.("[data-item]")) return false;
    move(step);
  };
  return {
    j: () => move(1), k: () => move(-1), ArrowDown: arrow(1), ArrowUp: arrow(-1),
    Enter: () => { if (document.activeElement !== document.body && document.activeElement?.id !== "main" && document.activeElement?.tagName !== "H1") return false; items()[0]?.click(); },
  };
}

// What has the focus is made anew when rows come; the same entry gets it again.
export function keepFocus(body, change) {
  const held = body.contains(document.activeElement) ? document.activeElement.closest("[data-item]")?.dataset.item : undefined;
  change();
  if (held !== undefined) body.querySelector(`[data-item="${Number(held)}"]`)?.focus({ preventScroll: true });
}

function header(title, sort, current, kind, to) {
  if (!sort) return h("th", { scope: "col" }, title);
  const active = (current || (kind === "groups" ? "file" : "line")).replace(/^-/, "") === sort;
  const down = active && (current ?? "").startsWith("-");
  const natural = sort === "file" || sort === "line";
  const next = active ? (down ? sort : `-${sort}`) : natural ? sort : `-${sort}`;
  return h("th", { scope: "col", "aria-sort": active ? (down ? "descending" : "ascending") : null, class: sort === "file" || sort === "line" || sort === "spread" ? "" : "number" },
    link(to({ sort: next === "file" || next === "line" ? null : next }), { class: "sort" }, title,
      h("span", { "aria-hidden": "true" }, active ? (down ? " ↓" : " ↑") : "")));
}

function groupRow(group, scale) {
  const missing = group.expected - group.count;
  return h("tr", {},
    cell("Group", "", link(`/group/${group.number}`, { "data-item": group.number, class: "item" }, `${group.run > 1 ? `${group.run}/` : ""}${group.group}`)),
    cell("Prompt", "prompt", h("span", { class: "preview" }, group.preview || h("span", { class: "muted" }, "no prompt kept")), h("span", { class: "muted route" }, group.route)),
    cell("Rewards", "bars", rewardBars(group, { scale }), missing > 0 && h("span", { class: "muted" }, ` ${missing} to come`)),
    cell("Mean", "number", real(group.mean)), cell("Std", "number", real(group.deviation)),
    cell("Min", "number", real(group.minimum)), cell("Max", "number", real(group.maximum)),
    cell("Tokens", "number", count(group.tokens)),
    cell("Failed", group.failures ? "number bad" : "number", count(group.failures)),
    cell("Cut off", group.truncated ? "number warn" : "number", count(group.truncated)));
}

export function cell(label, kind, ...children) {
  return h("td", { class: kind, "data-label": label }, ...children);
}

const BAR = { width: 9, gap: 2, height: 22 };
const BARS = 64; // shown of a group: as many as lists are sent

// The lowest and highest reward of some rows, zero between them; rewards from 0 to 1 keep that scale.
function scaleOf(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const low = rewards.reduce((least, one) => Math.min(least, one), 0);
  const high = rewards.reduce((most, one) => Math.max(most, one), low < 0 ? 0 : 1);
  return [low, high > low ? high : low + 1];
}

// One bar an attempt, each a link, from zero up or down; of a large group those around the current one.
export function rewardBars(group, { current = null, scale = scaleOf(group.rows) } = {}) {
  const [low, high] = scale;
  const y = (reward) => 1 + (BAR.height - 2) * (1 - (reward - low) / (high - low));
  const counted = group.rows.filter((row) => !row.superseded);
  const middle = counted.findIndex((row) => row.line === current);
  const first = Math.max(0, Math.min(middle - BARS / 2, counted.length - BARS));
  const shown = counted.slice(first, first + BARS);
  const bars = shown.map((row) => {
    const says = `attempt ${row.rollout_index}: ${outcome(row)}`;
    return link(`/row/${row.line}`, { class: "bar", tabindex: -1, "aria-label": says, title: says, "aria-current": row.line === current && "true" },
      svg("svg", { width: BAR.width, height: BAR.height, "aria-hidden": "true" }, barShape(row, y)));
  });
  const more = group.count - shown.length;
  return h("span", { class: "strip", role: "group", "aria-label": `Rewards of ${plural(group.count, "attempt")}` }, bars,
    more > 0 && h("span", { class: "muted" }, `+${count(more)}`));
}

function barShape(row, y) {
  if (row.reward === null) {
    return svg("path", { class: "cross", d: `M1.500 ${BAR.height - 8}l6 6m0-6l-6 6` });
  }
  const top = Math.min(y(row.reward), y(0));
  const tall = Math.abs(y(row.reward) - y(0));
  return [svg("rect", { class: "track", x: 0.5, y: 0.5, width: BAR.width - 1, height: BAR.height - 1, rx: 1 }),
    svg("rect", { class: row.reward < 0 ? "fill negative" : "fill", x: 0.5, y: tall < 1.5 ? top - 0.75 : top, width: BAR.width - 1, height: Math.max(1.5, tall), rx: 1 })];
}

export function outcome(row) {
  if (row.failure) return `failed (${row.failure})`;
  const parts = [`reward ${real(row.reward)}`];
  if (row.truncated) parts.push("cut off");
  if (row.masked) parts.push("masked");
  if (row.placeholder) parts.push("placeholder");
  return parts.join(", ");
}

export function badges(row) {
  const all = [];
  if (row.failure) all.push(h("span", { class: "badge bad" }, row.failure));
  if (row.truncated) all.push(h("span", { class: "badge warn" }, "cut off"));
  if (row.masked) all.push(h("span", { class: "badge" }, "masked"));
  if (row.placeholder) all.push(h("span", { class: "badge" }, "placeholder"));
  if (row.sides) all.push(h("span", { class: "badge" }, "side calls"));
  if (row.superseded) all.push(h("span", { class: "badge" }, "made again later"));
  return all;
}

function rowRow(row) {
  return h("tr", {},
    cell("Line", "", link(`/row/${row.line}`, { "data-item": row.line, class: "item" }, count(row.line))),
    cell("Group", "", link(`/group/${row.group}`, { tabindex: -1 }, row.group)),
    cell("Attempt", "", row.rollout_index),
    cell("Agent", "agent", row.agent, row.snippet && h("span", { class: "snippet" }, "…", row.snippet, "…")),
    cell("Reward", "number", row.reward === null ? "–" : real(row.reward)),
    cell("Tokens", "number", count(row.tokens)), cell("Sampled", "number", count(row.generated)),
    cell("Turns", "number", count(row.turns)), cell("Outcome", "", badges(row)));
}

// A search reads lines part by part, and shows what it finds as it goes.
async function search(state, signal, body, summary) {
  let cursor = 0;
  let found = 0;
  const go = async () => {
    const until = found + SEARCH_AT_MOST;
    let page = null;
    do {
      page = await get("/api/rows", { ...state, limit: LIMIT, cursor }, signal);
      found += page.rows.length;
      for (const row of page.rows) body.append(rowRow(row));
      cursor = page.cursor;
      replace(summary, `${plural(found, "match", "matches")} in ${plural(page.total, "rollout")}`, cursor === null ? "" : " so far…");
    } while (cursor !== null && found < until);
    if (cursor !== null) {
      const more = h("button", { type: "button", onclick: () => { more.remove(); run(); } }, "Search on");
      summary.append(" ", more);
    }
  };
  const run = () => go().catch((error) => { if (error.name !== "AbortError") replace(summary, error.message); });
  await run();
}

const ALL = [["", "all"]];
const YES_NO = [["", "all"], ["yes", "yes"], ["no", "no"]];

function filters(status, parameters, kind, change, state) {
  const kinds = [...new Set((status?.failures ?? []).map((name) => name.split(":")[0]))].sort();
  const failures = [["", "all"], ["none", "none"], ["any", "failed"], ...kinds.map((one) => [one, `failed: ${one}`]), ...(status?.failures ?? []).map((one) => [one, one])];
  const named = (names, current) => [...ALL, ...withCurrent(names ?? [], current).map((name) => [name, name])];
  const form = h("form", { class: "filters", "aria-label": "Filters", onchange: () => change(Object.fromEntries([...new FormData(form)].map(([k, v]) => [k, v.trim()]))), onsubmit: (event) => event.preventDefault() },
    choice("Agent", "agent", named(status?.agents, state.agent), state.agent),
    (status?.benchmarks?.length || state.benchmark) && choice("Benchmark", "benchmark", named(status?.benchmarks, state.benchmark), state.benchmark),
    (status?.routes?.length > 1 || state.route) && choice("Route", "route", named(status?.routes, state.route), state.route),
    choice("Failure", "failure", failures, state.failure),
    range("Reward", "reward", state), range("Tokens", "tokens", state),
    choice("Cut off", "truncated", YES_NO, state.truncated),
    choice("Masked", "masked", YES_NO, state.masked),
    choice("Rewards differ", "mixed", YES_NO, state.mixed),
    ["agent", "benchmark", "route", "failure", "reward_min", "reward_max", "tokens_min", "tokens_max", "truncated", "masked", "mixed", "q", "group"].some((name) => parameters.has(name)) && link(kind === "groups" ? "/" : "/rows", { class: "clear" }, "Clear"));
  const wide = window.matchMedia("(min-width: 721px)");
  const box = h("details", { class: "filter-box", open: wide.matches }, h("summary", {}, "Filters"), form);
  wide.addEventListener("change", () => { box.open = wide.matches; });
  return box;
}

const withCurrent = (names, current) => (current && !names.includes(current) ? [...names, current] : names);

function choice(label, name, options, current) {
  return h("label", {}, h("span", {}, label), h("select", { name }, options.map(([value, text]) => h("option", { value, selected: value === (current ?? "") }, text))));
}

function range(label, name, state) {
  const field = (end, says) => h("input", { name: `${name}_${end}`, type: "number", step: "any", value: state[`${name}_${end}`] ?? "", placeholder: says, "aria-label": `${label}: ${says === "min" ? "at least" : "at most"}` });
  return h("fieldset", {}, h("legend", {}, label), field("min", "min"), h("span", { "aria-hidden": "true" }, "–"), field("max", "max"));
}

export async function groupView(context, number) {
  const { signal, navigate } = context;
  const holder = h("div", { class: "group" });
  let group = null;
  let picked = [];
  const attempts = h("tbody");
  const compare = h("span", { class: "compare-choice" });
  async function load() {
    group = await get(`/api/groups/${number}`, {}, signal);
    keepFocus(attempts, () => replace(attempts, group.rows.map(attemptRow)));
    replace(holder, heading(), group.preview && h("p", { class: "group-prompt muted" }, group.preview), h("table", { class: "entries attempts" },
      h("caption", { class: "hidden" }, "Attempts of the group"),
      h("thead", {}, h("tr", {}, ["Attempt", "Reward", "Tokens", "Sampled", "Turns", "Outcome", "Compare"].map((title, place) => h("th", { scope: "col", class: place >= 1 && place <= 4 ? "number" : "" }, title)))), attempts));
    showChoice();
  }
  const heading = () => h("div", { class: "list-head" },
    h("nav", { class: "crumbs", "aria-label": "Where this is" }, link("/", {}, "Groups"), " ›"),
    h("h1", { tabindex: -1 }, `Group ${group.group}`), rewardBars(group),
    h("dl", { class: "facts inline" }, facts(group)), compare);
  const attemptRow = (row) => h("tr", { class: row.superseded && "superseded" },
    cell("Attempt", "", link(`/row/${row.line}`, { "data-item": row.line, class: "item" }, row.rollout_index)),
    cell("Reward", "number", row.reward === null ? "–" : real(row.reward)),
    cell("Tokens", "number", count(row.tokens)), cell("Sampled", "number", count(row.generated)),
    cell("Turns", "number", count(row.turns)), cell("Outcome", "", badges(row)),
    cell("Compare", "", h("input", { type: "checkbox", "aria-label": `Compare attempt ${row.rollout_index}`, checked: picked.includes(row.line), onchange: (event) => pick(row.line, event.target) })));
  const pick = (line, box) => {
    picked = picked.filter((one) => one !== line);
    if (box.checked) picked.push(line);
    if (picked.length > 2) {
      const [dropped] = picked.splice(0, 1);
      for (const [place, row] of group.rows.entries()) if (row.line === dropped) attempts.children[place].querySelector("input").checked = false;
    }
    showChoice();
  };
  const showChoice = () => replace(compare, picked.length === 2
    ? link(`/compare/${picked[0]}/${picked[1]}`, { class: "button" }, "Show side by side")
    : h("span", { class: "muted" }, "Choose two to see them side by side"));
  await load();
  return {
    element: holder, title: `Group ${group.group}`, up: "/", refresh: load,
    keys: { ...listKeys(holder), n: () => navigate(`/group/${number + 1}`), p: () => number > 0 && navigate(`/group/${number - 1}`) },
  };
}

function facts(group) {
  const pairs = [["route", group.route], ["task", group.task_index], ["attempts", `${group.count} of ${group.expected}`],
    ["mean", real(group.mean)], ["std", real(group.deviation)], ["min", real(group.minimum)], ["max", real(group.maximum)],
    ["tokens", `${fixed(group.tokens, 0)} on average`]];
  if (group.failures) pairs.push(["failed", group.failures]);
  if (group.truncated) pairs.push(["cut off", group.truncated]);
  return pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}
