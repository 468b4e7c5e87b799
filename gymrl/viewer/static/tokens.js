// A token sequence, part by part: only what is near the window is in the page, so length costs nothing.

import { get } from "./api.js";
import { h, replace, upright } from "./dom.js";
import { count, fixed, percent, plural, quoted, real } from "./format.js";

const CHUNK = 800;
const OPEN_PROMPT = 1600; // a longer prompt is folded
const STEPS = [-0.01, -0.1, -0.5, -1, -2, -4, -8]; // where a colour ends: log-probabilities
export const MODES = [["logprob", "log-probability"], ["mask", "mask"], ["version", "weights"]];

const heat = (logprob) => { const at = STEPS.findIndex((end) => logprob >= end); return at < 0 ? STEPS.length : at; };

export function legend(mode, versions) {
  if (mode === "mask") {
    return h("ul", { class: "legend" }, h("li", {}, h("span", { class: "swatch by-mask" }, h("span", { class: "t g" }, "sampled")), " trained on"),
      h("li", {}, h("span", { class: "t p" }, "prompt"), " not trained on"));
  }
  if (mode === "version") {
    return h("ul", { class: "legend by-version" }, names(versions).map((name, place) => h("li", {}, h("span", { class: `t g v${place % 6}` }, name))),
      versions.length ? null : h("li", { class: "muted" }, "nobody said which weights gave what"));
  }
  return h("ul", { class: "legend by-logprob", "aria-label": "Colours of log-probabilities" },
    [0, ...STEPS].map((from, place) => h("li", {}, h("span", { class: `t g lp${place}` }, place === 0 ? "0" : real(from)))),
    h("li", {}, h("span", { class: "t p" }, "prompt")));
}

const names = (versions) => [...new Set(versions.map((span) => span.version))];

// Tokens of one sequence. `options`: line, sequence (its view), number (which), versions, mode, texts
// (show texts rather than ids), hasTexts, difference, inspector, onPin.
export class TokenView {
  constructor(options) {
    this.options = options;
    this.versionOf = versionLookup(options.versions);
    this.spans = new Map(); // chunk element -> the answer it shows
    this.current = null;
    this.observer = new IntersectionObserver((entries) => this.#moved(entries), { rootMargin: "1200px 0px" });
    this.chunks = [];
    this.turns = options.sequence.turns.map((turn, place) => this.#turn(turn, place));
    this.element = h("div", { class: "sequence" }, this.turns);
    this.setMode(options.mode);
    this.element.addEventListener("pointerover", (event) => this.#pointed(event, false));
    this.element.addEventListener("click", (event) => this.#pointed(event, true));
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("focusin", (event) => { if (event.target.classList.contains("tokens")) this.#arrive(event.target); });
  }

  close() {
    this.observer.disconnect();
  }

  setMode(mode) {
    this.options.mode = mode;
    for (const [name] of MODES) this.element.classList.toggle(`by-${name}`, name === mode);
  }

  setTexts(texts) {
    this.options.texts = texts;
    this.element.classList.toggle("as-ids", !texts);
    for (const [chunk, span] of this.spans) this.#render(chunk, span);
  }

  // Bring a token into view, and show what is known of it.
  async go(position, { focus = true, behavior = "auto" } = {}) {
    const chunk = this.chunks.find((one) => position >= Number(one.dataset.start) && position < Number(one.dataset.end));
    if (!chunk) return;
    const fold = chunk.closest("details");
    if (fold) fold.open = true;
    await this.#load(chunk);
    const token = this.#token(chunk, position);
    if (!token) return;
    if (focus) chunk.closest(".tokens").focus({ preventScroll: true });
    this.#select(token);
    token.scrollIntoView({ block: "center", behavior });
  }

  turnHeads() {
    return this.turns.map((turn) => turn.querySelector("h3"));
  }

  #turn(turn, place) {
    const { hasTexts } = this.options;
    const sampled = turn.end - turn.generation_start;
    const prompt = turn.generation_start - turn.start;
    const notes = [];
    if (turn.is_invalid_tool_call) notes.push(h("span", { class: "badge bad" }, "invalid tool call"));
    if (turn.has_malformed_thinking) notes.push(h("span", { class: "badge bad" }, "malformed thinking"));
    const facts = h("p", { class: "turn-facts" },
      `${plural(sampled, "token")} sampled`,
      turn.mean_logprob === null ? null : [`, mean logprob ${fixed(turn.mean_logprob, 3)}, least likely `,
        h("button", { type: "button", class: "jump", onclick: () => this.go(turn.min_at) }, `${fixed(turn.min_logprob, 2)} at ${count(turn.min_at)}`)]);
    const plain = !hasTexts;
    return h("section", { class: "turn", "aria-label": `Turn ${place + 1}` },
      h("div", { class: "turn-head" }, h("h3", { tabindex: -1 }, `Turn ${place + 1}`), notes, facts),
      prompt > 0 && h("details", { class: "part prompt", open: prompt <= OPEN_PROMPT },
        h("summary", {}, `Prompt, ${plural(prompt, "token")}`),
        turn.images.map((image) => h("img", { src: `/api/rows/${this.options.line}/images/${image.number}`, class: "shown", loading: "lazy", alt: `Image of turn ${place + 1}, ${image.width} by ${image.height} pixels` })),
        plain && said(turn.prompt), this.#tokens(turn.start, turn.generation_start, `Prompt tokens of turn ${place + 1}`)),
      h("div", { class: "part generation" },
        plain && said(turn.generation), this.#tokens(turn.generation_start, turn.end, `Sampled tokens of turn ${place + 1}`)));
  }

  #tokens(start, end, label) {
    const chunks = [];
    for (let at = start; at < end; at += CHUNK) {
      const stop = Math.min(end, at + CHUNK);
      const chunk = h("div", { class: "chunk", "data-start": at, "data-end": stop });
      chunk.style.minHeight = `${Math.ceil(((stop - at) * 5) / 110) * 1.6}em`;
      chunks.push(chunk);
      this.observer.observe(chunk);
    }
    this.chunks.push(...chunks);
    return h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label, "aria-describedby": "inspector" }, chunks);
  }

  #moved(entries) {
    for (const { target, isIntersecting, boundingClientRect } of entries) {
      if (isIntersecting) this.#load(target);
      else if (this.spans.has(target)) this.#unload(target, boundingClientRect.height);
    }
  }

  #unload(chunk, height) {
    if (this.current && chunk.contains(this.current)) return;
    if (height > 0) chunk.style.minHeight = `${height}px`;
    this.spans.delete(chunk);
    replace(chunk);
  }

  async #load(chunk) {
    if (this.spans.has(chunk)) return;
    const { line, number } = this.options;
    try {
      const { start, end } = chunk.dataset;
      const span = await get(`/api/rows/${line}/tokens`, { start, end, sequence: number });
      if (this.spans.has(chunk)) return;
      this.spans.set(chunk, span);
      this.#render(chunk, span);
    } catch (error) {
      replace(chunk, h("p", { class: "problem" }, error.message));
    }
  }

  #render(chunk, span) {
    const { texts, difference } = this.options;
    const sampled = Boolean(chunk.closest(".generation"));
    const made = span.ids.map((id, place) => {
      const position = span.start + place;
      const version = sampled ? this.versionOf(position) : -1;
      const kind = `${sampled ? `t g lp${heat(span.logprobs[place])}` : "t p"}${version >= 0 ? ` v${version % 6}` : ""}${position === difference ? " diff" : ""}`;
      const text = texts && span.texts ? visible(span.texts[place]) : String(id);
      const token = document.createElement("span");
      token.className = kind;
      token.dataset.p = position;
      token.textContent = upright(text);
      return token;
    });
    const held = this.current && chunk.contains(this.current) ? Number(this.current.dataset.p) : null;
    chunk.replaceChildren(...made);
    chunk.style.minHeight = "";
    if (held !== null) this.#select(this.#token(chunk, held));
    const area = chunk.closest(".tokens");
    if (area === document.activeElement && !area.contains(this.current)) this.#arrive(area);
  }

  #token(chunk, position) {
    return chunk.children[position - Number(chunk.dataset.start)];
  }

  #pointed(event, pin) {
    const token = event.target.closest?.(".t[data-p]");
    if (!token) return;
    if (pin) {
      this.#select(token);
      this.options.onPin?.(Number(token.dataset.p));
    } else {
      this.#inspect(token);
    }
  }

  #arrive(area) {
    if (this.current && area.contains(this.current)) this.#inspect(this.current);
    else this.#select(area.querySelector(".t[data-p]"));
  }

  #select(token) {
    if (!token) return;
    this.current?.classList.remove("cur");
    this.current = token;
    token.classList.add("cur");
    this.#inspect(token);
  }

  async #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const area = event.target.closest(".tokens");
    if (!area || !this.current || !area.contains(this.current)) return;
    const at = Number(this.current.dataset.p);
    const chunks = [...area.children];
    const first = Number(chunks[0].dataset.start);
    const last = Number(chunks.at(-1).dataset.end) - 1;
    const lines = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: first, End: last }[event.key];
    if (event.key === "Enter") {
      event.preventDefault();
      this.options.onPin?.(at);
    } else if (lines) {
      event.preventDefault();
      this.#select(this.#nearest(area, lines));
      this.current.scrollIntoView({ block: "nearest" });
    } else if (to !== undefined) {
      event.preventDefault();
      const position = Math.min(last, Math.max(first, to));
      const chunk = chunks.find((one) => position < Number(one.dataset.end));
      await this.#load(chunk);
      this.#select(this.#token(chunk, position));
      this.current.scrollIntoView({ block: "nearest" });
    }
  }

  // The token of the next line (or the one before) that is nearest below (above) the current one.
  #nearest(area, direction) {
    const [here] = this.current.getClientRects(); // a token may go over two lines: where it begins counts
    let best = this.current;
    let bestRow = null;
    let bestGap = Infinity;
    for (let token = step(this.current, direction, area); token; token = step(token, direction, area)) {
      const [there] = token.getClientRects();
      if (!there) continue;
      const row = Math.round(there.top);
      if (Math.abs(row - here.top) < 4) continue;
      if (bestRow !== null && Math.abs(row - bestRow) >= 4) break;
      bestRow = row;
      const gap = Math.abs(there.left - here.left);
      if (gap < bestGap) [best, bestGap] = [token, gap];
    }
    return best;
  }

  #inspect(token) {
    const position = Number(token.dataset.p);
    const span = this.spans.get(token.parentElement);
    if (!span) return;
    const place = position - span.start;
    const sampled = token.classList.contains("g");
    const logprob = span.logprobs[place];
    const version = sampled ? this.versionOf(position) : -1;
    const turn = this.options.sequence.turns.findIndex((one) => position < one.end);
    const pair = (name, value) => h("span", { class: "pair" }, h("span", { class: "muted" }, name), " ", value);
    replace(this.options.inspector,
      this.options.side && h("b", {}, this.options.side),
      span.texts && h("code", {}, quoted(span.texts[place])),
      pair("id", span.ids[place]), pair("position", count(position)), pair("turn", turn + 1),
      sampled ? [pair("logprob", fixed(logprob, 4)), pair("probability", percent(Math.exp(logprob)))] : h("span", { class: "pair" }, "prompt"),
      version >= 0 && pair("weights", names(this.options.versions)[version]),
      this.options.sequence.experts && this.#experts(position));
  }

  // The experts of a token are asked for when someone wants to see them.
  #experts(position) {
    const { line, number } = this.options;
    const button = h("button", { type: "button", onclick: async () => {
      const { experts } = await get(`/api/rows/${line}/experts`, { position, sequence: number });
      button.replaceWith(h("span", { class: "pair experts" }, h("span", { class: "muted" }, "experts by layer"), " ", experts.map((layer) => layer.join(" ")).join(" | ")));
    } }, "Experts");
    return button;
  }
}

// The token before or after; parts of the same area that are not in the page end the walk.
function step(token, direction, area) {
  const beside = direction > 0 ? token.nextElementSibling : token.previousElementSibling;
  if (beside) return beside;
  const chunk = direction > 0 ? token.parentElement.nextElementSibling : token.parentElement.previousElementSibling;
  if (!chunk || !area.contains(chunk)) return null;
  return direction > 0 ? chunk.firstElementChild : chunk.lastElementChild;
}

function said(text) {
  if (!text) return null;
  return h("pre", { class: "said" }, text.text, text.chars > text.text.length &&
    h("span", { class: "muted" }, `… ${count(text.chars - text.text.length)} more characters in the raw JSON`));
}

// A line break shows as a sign and breaks the line; a token without text keeps a place to point at.
function visible(text) {
  return text === "" ? "·" : text.replaceAll("\n", "⏎\n");
}

function versionLookup(versions) {
  const all = names(versions);
  const spans = versions.map((span) => [span.start, span.end, all.indexOf(span.version)]);
  return (position) => spans.find(([start, end]) => position >= start && position < end)?.[2] ?? -1;
}
