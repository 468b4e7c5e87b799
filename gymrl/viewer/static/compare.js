// Two rollouts side by side, and where they part.

import { get } from "./api.js";
import { h, link, replace } from "./dom.js";
import { count, real } from "./format.js";
import { badges, rewardBars } from "./list.js";
import { colourSwitch, textSwitch } from "./rollout.js";
import { MODES, TokenView, legend } from "./tokens.js";

export async function compareView(context, left, right) {
  const { parameters, signal, navigate, status } = context;
  const answer = await get(`/api/compare/${left}/${right}`, {}, signal);
  const { rows, group, first_difference: difference } = answer;
  const hasTexts = Boolean(status?.tokenizer);
  let mode = MODES.some(([name]) => name === parameters.get("mode")) ? parameters.get("mode") : "logprob";
  let texts = hasTexts && parameters.get("show") !== "ids";
  const inspector = h("output", { id: "inspector", class: "inspector", "aria-live": "polite" }, h("span", { class: "muted" }, "Point at a token, or Tab to them and use the arrows"));
  const views = rows.map((row, place) => row.sequences.length ? new TokenView({
    line: row.line, sequence: row.sequences[0], number: 0, versions: row.weight_versions, mode, texts, hasTexts, inspector, difference,
    side: place ? "right" : "left",
  }) : null);
  for (const view of views) view?.setTexts(texts);
  const versions = rows.flatMap((row) => row.weight_versions);
  const keep = () => {
    const next = new URLSearchParams();
    if (mode !== "logprob") next.set("mode", mode);
    if (hasTexts && !texts) next.set("show", "ids");
    history.replaceState(null, "", `${location.pathname}${next.size ? `?${next}` : ""}`);
  };
  const key = h("div", { class: "key" }, legend(mode, versions));
  const colour = (name) => { mode = name; for (const view of views) view?.setMode(name); replace(key, legend(name, versions)); keep(); };
  const show = (value) => { texts = value; for (const view of views) view?.setTexts(value); keep(); };
  const bar = h("div", { class: "toolbar" }, colourSwitch(mode, versions, colour), hasTexts && textSwitch(texts, show), key);
  const toDifference = () => {
    if (difference === null) return false;
    for (const [place, view] of views.entries()) {
      const last = view ? view.options.sequence.num_tokens - 1 : -1;
      view?.go(Math.min(difference, last), { focus: place === 0 });
    }
  };
  const check = (name, value) => { const box = bar.querySelector(`input[name=${name}][value="${value}"]`); if (box) { box.checked = true; box.dispatchEvent(new Event("change")); } };
  return {
    element: h("article", { class: "compare" },
      h("div", { class: "list-head" },
        h("nav", { class: "crumbs", "aria-label": "Where this is" }, link("/", {}, "Groups"), group && [" › ", link(`/group/${group.number}`, {}, `Group ${group.group}`)], " ›"),
        h("h1", { tabindex: -1 }, "Side by side"),
        group && rewardBars(group),
        h("p", { class: "parting", role: "status" }, parting(answer),
          difference !== null && h("button", { type: "button", onclick: toDifference }, "Go there"))),
      bar,
      h("div", { class: "pair-of" }, rows.map((row, place) => h("section", { class: "side", "aria-label": place ? "Right" : "Left" },
        sideHead(row, place, rows, group, navigate), row.failure && h("pre", { class: "said bad" }, `${row.failure.error}: ${row.failure.message}`), views[place]?.element))),
      inspector),
    title: `Lines ${left} and ${right}`,
    up: group ? `/group/${group.number}` : "/",
    leave: () => { for (const view of views) view?.close(); },
    keys: {
      d: toDifference,
      m: () => { const all = MODES.filter(([name]) => name !== "version" || versions.length).map(([name]) => name); check("mode", all[(all.indexOf(mode) + 1) % all.length]); },
      i: () => hasTexts && check("show", texts ? "ids" : "texts"),
    },
  };
}

function parting({ rows, identical, first_difference: difference }) {
  if (rows.some((row) => !row.sequences.length)) return "A failed attempt has no tokens to compare. ";
  if (identical) return "The same tokens throughout. ";
  const shorter = Math.min(...rows.map((row) => row.sequences[0].num_tokens));
  if (difference === shorter) return `The same first ${count(difference)} tokens; there the shorter one ends. `;
  return `The same first ${count(difference)} tokens; they differ from token ${count(difference)} on. `;
}

function sideHead(row, place, rows, group, navigate) {
  const other = rows[1 - place].line;
  const change = (event) => navigate(place ? `/compare/${other}/${event.target.value}` : `/compare/${event.target.value}/${other}`);
  const tokens = row.sequences[0];
  return h("div", { class: "side-head" },
    group ? h("select", { "aria-label": place ? "Attempt on the right" : "Attempt on the left", onchange: change }, group.rows.map((one) =>
      h("option", { value: one.line, selected: one.line === row.line }, `Attempt ${one.rollout_index}${one.superseded ? " (made again later)" : ""}`)))
      : h("b", {}, `Line ${count(row.line)}`),
    h("span", { class: `total ${row.total === null ? "bad" : ""}` }, row.total === null ? "failed" : real(row.total)),
    badges({ truncated: Boolean(row.incomplete_reason), masked: row.mask_sample, placeholder: row.placeholder }),
    tokens && h("span", { class: "muted" }, `${count(tokens.num_tokens)} tokens, ${count(tokens.num_generated)} sampled`),
    link(`/row/${row.line}`, {}, "Open"));
}
