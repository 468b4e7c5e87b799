// One rollout: what it was worth and why, its tokens, its conversation, its raw JSON.

import { get } from "./api.js";
import { h, link, replace } from "./dom.js";
import { bytes, count, plural, real, signed } from "./format.js";
import { badges, rewardBars } from "./list.js";
import { rawTree } from "./raw.js";
import { MODES, TokenView, legend } from "./tokens.js";

const TABS = [["tokens", "Tokens"], ["conversation", "Conversation"], ["raw", "Raw JSON"]];

export async function rowView(context, line) {
  const { parameters, signal, navigate, status } = context;
  let answer;
  try {
    answer = await get(`/api/rows/${line}`, {}, signal);
  } catch (error) {
    if (error.status !== 422) throw error;
    return unreadable(line, error);
  }
  const { row, group } = answer;
  const wanted = parameters.get("tab");
  const tab = TABS.some(([name]) => name === wanted) ? wanted : row.sequences.length ? "tokens" : "conversation";
  const address = (changes, hash = "") => {
    const next = new URLSearchParams(parameters);
    for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
    return `${location.pathname}${next.size ? `?${next}` : ""}${hash}`;
  };
  const panel = h("div", { class: "panel", id: "panel" });
  const body = tab === "raw" ? { element: rawTree(line, row.size) }
    : tab === "tokens" ? tokensPanel(row, parameters, status, navigate, address) : { element: conversation(row) };
  replace(panel, body.element);
  const element = h("article", { class: "rollout" },
    heading(answer),
    row.failure && failure(row.failure),
    h("div", { class: "columns" },
      h("div", { class: "main-column" },
        h("nav", { class: "tabs", "aria-label": "Parts of the rollout" }, TABS.map(([name, title]) =>
          link(address({ tab: name }), { "aria-current": name === tab && "page" }, title))),
        panel),
      h("aside", { "aria-label": "Reward and facts" }, aside(row))));
  const beside = neighbours(group, line);
  const to = (there) => (there ? navigate(`/row/${there}${location.search}`) : false);
  const withNext = beside.next ?? beside.previous;
  return {
    element,
    title: `Line ${line}`,
    up: `/group/${group.number}`,
    arrived: () => body.arrived?.(),
    leave: () => body.leave?.(),
    keys: {
      "[": () => to(beside.previous), "]": () => to(beside.next),
      n: () => to(answer.next_group), p: () => to(answer.previous_group),
      c: () => withNext !== undefined && navigate(`/compare/${line}/${withNext}`),
      1: () => navigate(address({ tab: "tokens" })), 2: () => navigate(address({ tab: "conversation" })), 3: () => navigate(address({ tab: "raw" })),
      ...body.keys ?? turnKeys(() => [...panel.querySelectorAll("[data-step]")]),
    },
  };
}

// A row that lists can show, but that is not whole: its JSON is all there is.
function unreadable(line, error) {
  return {
    element: h("article", {}, h("h1", { tabindex: -1 }, `Line ${count(line)}`), h("p", { class: "problem" }, error.message), rawTree(line)),
    title: `Line ${line}`,
    up: "/",
  };
}

function neighbours(group, line) {
  const lines = group.rows.map((row) => row.line);
  const at = lines.indexOf(line);
  return { previous: lines[at - 1], next: lines[at + 1] };
}

function turnKeys(heads) {
  const move = (step) => {
    const all = heads();
    const edge = 80;
    const at = document.activeElement && all.indexOf(document.activeElement);
    const next = at >= 0 ? all[at + step] : step > 0 ? all.find((one) => one.getBoundingClientRect().top > edge - 1) ?? all.at(-1) : all.findLast((one) => one.getBoundingClientRect().top < edge);
    next?.focus({ preventScroll: true });
    next?.scrollIntoView({ block: "start" });
  };
  return { j: () => move(1), k: () => move(-1) };
}

function heading({ row, entry, group, previous_group: before, next_group: after }) {
  const beside = neighbours(group, row.line);
  const step = (there, text, label) => (there ? link(`/row/${there}${location.search}`, { class: "button", "aria-label": label, title: label }, text)
    : h("span", { class: "button off", "aria-hidden": "true" }, text));
  return h("div", { class: "list-head" },
    h("nav", { class: "crumbs", "aria-label": "Where this is" }, link("/", {}, "Groups"), " › ", link(`/group/${group.number}`, {}, `Group ${group.group}`), " ›"),
    h("h1", { tabindex: -1 }, `Attempt ${row.rollout_index}`),
    h("span", { class: `total ${row.total === null ? "bad" : ""}` }, row.total === null ? "failed" : real(row.total)),
    badges({ ...entry, failure: "" }),
    rewardBars(group, { current: row.line }),
    h("span", { class: "steps" },
      step(beside.previous, "‹", "Previous attempt ([)"), step(beside.next, "›", "Next attempt (])"),
      step(before, "«", "Previous group (p)"), step(after, "»", "Next group (n)"),
      group.rows.length > 1 && compareMenu(group, row.line)));
}

function compareMenu(group, line) {
  return h("details", { class: "menu" }, h("summary", { class: "button" }, "Compare"),
    h("ul", {}, group.rows.filter((one) => one.line !== line).slice(0, 64).map((one) => h("li", {},
      link(`/compare/${line}/${one.line}`, {}, `with attempt ${one.rollout_index} (${one.failure ? "failed" : real(one.reward)})`)))));
}

function failure(found) {
  const facts = ["row", "turn", "agent", "instance", "url", "status", "attempts"].filter((name) => found[name] !== null)
    .map((name) => [name, found[name]]);
  for (const [name, value] of Object.entries(found.fields ?? {})) if (!facts.some(([known]) => known === name)) facts.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
  return h("section", { class: "failure", "aria-label": "Failure" },
    h("h2", {}, found.error, " ", h("span", { class: "badge bad" }, found.kind)),
    h("pre", { class: "said" }, found.message),
    pairs(facts),
    found.traceback && h("details", { open: found.traceback.length < 4000 }, h("summary", {}, "Traceback"), h("pre", { class: "traceback" }, found.traceback)));
}

function pairs(all) {
  return h("dl", { class: "facts" }, all.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

const section = (title, ...children) => h("section", {}, h("h2", {}, title), ...children);

function aside(row) {
  const named = (record) => Object.entries(record ?? {}).map(([name, value]) => [name, typeof value === "number" ? real(value, 4) : String(value)]);
  const sampling = Object.entries(row.sampling).filter(([, value]) => value !== null).map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
  const tokens = row.sequences[0];
  const parts = [];
  if (row.reward) parts.push(section("Reward", ledger(row)));
  if (row.reward?.components) parts.push(section("Components", pairs(named(row.reward.components))));
  const facts = [["agent", row.agent], ["route", row.route]];
  if (tokens) facts.push(["tokens", count(tokens.num_tokens)], ["sampled", count(tokens.num_generated)], ["turns", tokens.turns.length]);
  if (tokens?.experts) facts.push(["routed experts", `${tokens.experts[1]} in each of ${plural(tokens.experts[0], "layer")}`]);
  if (row.incomplete_reason) facts.push(["ended by", row.incomplete_reason]);
  if (row.truncated_prefix) facts.push(["later turns", "left out: the prefix broke"]);
  if (row.mask_sample) facts.push(["loss", "masked by the environment"]);
  if (row.placeholder) facts.push(["placeholder", "no token was sampled"]);
  parts.push(section("Rollout", pairs(facts)));
  if (row.weight_versions.length) parts.push(section("Weights", pairs(row.weight_versions.map((span) => [span.version, `tokens ${count(span.start)}–${count(span.end)}`]))));
  if (Object.keys(row.notes).length) parts.push(section("Notes", pairs(named(row.notes))));
  if (sampling.length) parts.push(section("Sampling", pairs(sampling)));
  parts.push(section("Identity", pairs([["line", count(row.line)], ["row", count(row.index)], ["task", count(row.task_index)], ...(row.benchmark ? [["benchmark", row.benchmark], ["task id", row.task_id]] : []), ["rollout id", row.rollout_id], ["task digest", h("code", {}, row.task_digest)], ["size", bytes(row.size)]])));
  if (Object.keys(row.metrics).length) parts.push(folded("Metrics of the group", named(row.metrics)));
  if (row.timings) parts.push(folded("Timings of the run", named(row.timings)));
  return parts;
}

const folded = (title, all) => h("details", { class: "folded" }, h("summary", {}, h("h2", {}, title)), pairs(all));

function ledger(row) {
  return h("table", { class: "ledger" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Rule"), h("th", { scope: "col", class: "number" }, "Change"), h("th", { scope: "col", class: "number" }, "Total"))),
    h("tbody", {}, row.ledger.map((step) => h("tr", {}, h("td", {}, step.rule),
      h("td", { class: `number ${step.change < 0 ? "bad" : ""}` }, step.change === null ? "" : signed(step.change)), h("td", { class: "number" }, real(step.value, 4))))));
}

export function colourSwitch(mode, versions, change) {
  return h("fieldset", { class: "switch" }, h("legend", {}, "Colour by"), MODES.filter(([name]) => name !== "version" || versions.length).map(([name, title]) =>
    h("label", {}, h("input", { type: "radio", name: "mode", value: name, checked: name === mode, onchange: () => change(name) }), h("span", {}, title))));
}

export function textSwitch(texts, change) {
  return h("fieldset", { class: "switch" }, h("legend", {}, "Show"), [[true, "texts"], [false, "ids"]].map(([value, title]) =>
    h("label", {}, h("input", { type: "radio", name: "show", value: title, checked: value === texts, onchange: () => change(value) }), h("span", {}, title))));
}

function tokensPanel(row, parameters, status, navigate, address) {
  if (!row.sequences.length) return { element: h("p", { class: "muted" }, "The attempt failed: it has no tokens.") };
  const number = Math.min(Number(parameters.get("sequence") ?? 0) || 0, row.sequences.length - 1);
  const versions = number === 0 ? row.weight_versions : [];
  const hasTexts = Boolean(status?.tokenizer);
  let mode = MODES.some(([name]) => name === parameters.get("mode")) ? parameters.get("mode") : "logprob";
  let texts = hasTexts && parameters.get("show") !== "ids";
  const inspector = h("output", { id: "inspector", class: "inspector", "aria-live": "polite" }, h("span", { class: "muted" }, "Point at a token, or Tab to them and use the arrows"));
  const view = new TokenView({
    line: row.line, sequence: row.sequences[number], number, versions, mode, texts, hasTexts, inspector,
    onPin: (position) => history.replaceState(null, "", address({ mode: mode === "logprob" ? null : mode, show: texts === hasTexts ? null : "ids" }, `#t${position}`)),
  });
  view.setTexts(texts);
  const key = h("div", { class: "key" });
  const bar = h("div", { class: "toolbar" });
  const keep = () => history.replaceState(null, "", address({ mode: mode === "logprob" ? null : mode, show: hasTexts && !texts ? "ids" : null }, location.hash));
  const colour = (name) => { mode = name; parameters.set("mode", name); view.setMode(name); replace(key, legend(name, versions)); keep(); };
  const showTexts = (value) => { texts = value; view.setTexts(value); keep(); };
  replace(key, legend(mode, versions));
  replace(bar, colourSwitch(mode, versions, colour), hasTexts && textSwitch(texts, showTexts),
    row.sequences.length > 1 && h("label", {}, h("span", {}, "Sequence"), h("select", { onchange: (event) => navigate(address({ sequence: event.target.value })) },
      row.sequences.map((one, place) => h("option", { value: place, selected: place === number }, place === 0 ? "main conversation" : `side ${place} (${plural(one.num_tokens, "token")})`)))), key);
  const check = (name, value) => { const box = bar.querySelector(`input[name=${name}][value="${value}"]`); if (box) { box.checked = true; box.dispatchEvent(new Event("change")); } };
  return {
    element: h("section", { "aria-label": "Tokens" }, bar,
      !hasTexts && h("p", { class: "muted hint" }, "Start the viewer with --tokenizer to see each token’s text."),
      view.element, inspector),
    arrived: () => { const match = /^#t(\d+)$/.exec(location.hash); if (match) view.go(Number(match[1])); },
    leave: () => view.close(),
    keys: {
      ...turnKeys(() => view.turnHeads()),
      m: () => { const all = MODES.filter(([name]) => name !== "version" || versions.length).map(([name]) => name); check("mode", all[(all.indexOf(mode) + 1) % all.length]); },
      i: () => hasTexts && check("show", texts ? "ids" : "texts"),
    },
  };
}

const TITLES = { call: "Tool call", result: "Tool result", reasoning: "Reasoning" };

function conversation(row) {
  if (!row.conversation.length) return h("p", { class: "muted" }, "The file holds neither the request nor an answer of this rollout.");
  return h("ol", { class: "conversation" }, row.conversation.map((item) => h("li", { class: `item ${item.kind} ${item.role ?? ""}` },
    h("div", { class: "item-head", "data-step": true, tabindex: -1 }, h("b", {}, TITLES[item.kind] ?? (item.role || item.kind)), item.name && h("code", {}, item.name),
      item.call_id && h("span", { class: "muted call-id" }, item.call_id), item.sampled && h("span", { class: "badge" }, "rollout")),
    item.parts.map((part) => partOf(row, item, part)))));
}

function partOf(row, item, part) {
  if (part.text) {
    const { text, chars } = part.text;
    return h("pre", { class: "said" }, item.kind === "call" || item.kind === "result" ? pretty(text, chars) : text,
      chars > text.length && h("span", { class: "muted" }, `… ${count(chars - text.length)} more characters in the raw JSON`));
  }
  if ((part.image ?? -1) >= 0) {
    const image = h("img", { src: `/api/rows/${row.line}/images/${part.image}`, alt: `Image ${part.image + 1} of the conversation`, loading: "lazy" });
    image.addEventListener("error", () => image.replaceWith(h("p", { class: "muted" }, "This image can’t be shown; its source is in the raw JSON.")));
    return image;
  }
  return h("p", { class: "muted" }, "Image elsewhere, not fetched: ", h("code", {}, part.link ?? ""));
}

function pretty(text, chars) {
  if (chars > text.length) return text;
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
