// An evaluation's report: what `gymrl eval report` prints, with pictures, and a way to every task's rollouts.

import { get } from "./api.js";
import { passChart, rewardChart } from "./charts.js";
import { h, link, replace } from "./dom.js";
import { count, fixed, percent, plural, real } from "./format.js";
import { cell, keepFocus, listKeys, tabs } from "./list.js";

const TASKS = 50;
const TASKS_OF_MANY = 10; // of each benchmark, where there are several
const LEAST_WAIT_MS = 1000;
const SPARED = 4; // a run that grows is read again after this many times what reading took

const TASK_COLUMNS = [["Task", "plan"], ["Source", null], ["Mean", "mean"], ["Passed", null], ["Scored", null], ["Failed", "failed"], ["Missing", null]];

export async function reportView(context) {
  const { parameters, signal, navigate } = context;
  const only = parameters.get("benchmark");
  const holder = h("div", { class: "report" });
  const open = new Set(); // which folded parts are open, by name

  const to = (changes) => {
    const kept = new URLSearchParams({ ...(only === null ? {} : Object.fromEntries(parameters)), ...changes });
    for (const [name, value] of [...kept]) if (value === "") kept.delete(name);
    return kept.size ? `/report?${kept}` : "/report";
  };

  async function load() {
    const report = await get("/api/report", {}, signal);
    const shown = report.benchmarks.filter((one) => only === null || one.label === only);
    if (!shown.length) throw new Error(`There is no benchmark ${only} in this evaluation.`);
    const limit = report.benchmarks.length > 1 && only === null ? TASKS_OF_MANY : TASKS;
    const pages = [];
    for (const one of shown) {
      pages.push(await get("/api/report/tasks", { benchmark: one.label, limit, sort: only === null ? null : parameters.get("sort"), offset: only === null ? null : parameters.get("offset") }, signal));
    }
    keepFocus(holder, () => replace(holder, head(report), notes(report),
      (only === null && report.benchmarks.length + report.benchmarks[0].sources.length > 1) && overview(report),
      shown.map((one, place) => section(report, one, pages[place], limit))));
  }

  const head = (report) => h("div", { class: "list-head" },
    only !== null && report.benchmarks.length > 1 && h("nav", { class: "crumbs", "aria-label": "Where this is" }, link("/report", {}, "Report"), " ›"),
    h("h1", { tabindex: -1 }, only === null ? "Report" : only), tabs("report", context.status),
    h("p", { class: "count", role: "status" }, state(report, only)));

  const notes = (report) => [
    only === null && !report.complete && h("p", { class: "report-note warn" },
      `${plural(report.failed, "row")} failed and ${count(report.missing)} ${report.missing === 1 ? "is" : "are"} missing; they are in no mean and no pass@k.`),
    only === null && report.duplicates + report.foreign > 0 && h("p", { class: "report-note muted" },
      `Passed over: ${plural(report.duplicates, "line")} of rows that had their result, ${count(report.foreign)} of rows that are not in the plan.`),
    only === null && folded("settings", "Settings", () => h("dl", { class: "facts inline" }, flat(report.settings).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))))];

  const folded = (name, title, make) => {
    const box = h("details", { class: "folded", open: open.has(name), ontoggle: () => (box.open ? open.add(name) : open.delete(name)) },
      h("summary", {}, title), make());
    return box;
  };

  const overview = (report) => table("All numbers of the evaluation", numberColumns(report), report.benchmarks.flatMap((one, place) => [
    numbersRow(one.total, link(to({ benchmark: one.label }), { "data-item": -1 - place, class: "item" }, one.label)),
    ...one.sources.map((source) => numbersRow(source, h("span", { class: "muted source" }, source.name)))]));

  const section = (report, one, page, limit) => {
    const { numbers } = one.total;
    return h("section", { class: "benchmark", "aria-label": one.label },
      only === null && h("h2", {}, one.label, one.name !== one.label && h("span", { class: "muted" }, ` ${one.name}`)),
      part(report, one.total),
      numbers.failures.length > 0 && failures(numbers),
      one.sources.map((source) => folded(`${one.label}/${source.name}`, `${source.name}: ${interval(source.numbers.reward)}`, () => part(report, source))),
      tasks(one, page, limit));
  };

  const tasks = (one, page, limit) => {
    const sort = only === null ? "" : parameters.get("sort") ?? "";
    const several = one.sources.length > 0;
    const columns = TASK_COLUMNS.filter(([title]) => several || title !== "Source");
    return [
      table(`Tasks of ${one.label}`, columns.map(([title, name]) => sortable(title, name, sort, (chosen) => to({ benchmark: one.label, sort: chosen, offset: "" }))), page.tasks.map((task) => taskRow(task, several))),
      h("nav", { class: "pager", "aria-label": `Pages of ${one.label}` },
        only === null && page.total > page.tasks.length && link(to({ benchmark: one.label }), {}, `All ${plural(page.total, "task")}`),
        only !== null && page.offset > 0 && link(to({ offset: Math.max(0, page.offset - limit) || "" }), { rel: "prev" }, "Previous"),
        only !== null && page.offset + page.tasks.length < page.total && link(to({ offset: page.offset + limit }), { rel: "next" }, "Next"))];
  };

  const turnPage = (rel) => { const there = only !== null && holder.querySelector(`[rel=${rel}]`); if (!there) return false; navigate(there.getAttribute("href")); };

  const pace = paced(load, holder);
  await pace.now();
  return {
    element: holder,
    title: only === null ? "Report" : `${only}: report`,
    up: only === null ? "/" : "/report",
    refresh: pace.refresh,
    leave: pace.leave,
    keys: { ...listKeys(holder), n: () => turnPage("next"), p: () => turnPage("prev") },
  };
}

// Loads again as a run grows, but not all the time: reading the whole file is work.
export function paced(load, holder) {
  let next = 0;
  let timer = null;
  const now = async () => {
    const began = performance.now();
    await load();
    next = performance.now() + Math.max(LEAST_WAIT_MS, SPARED * (performance.now() - began));
  };
  const later = () => {
    timer = null;
    now().catch((error) => { if (error.name !== "AbortError") holder.prepend(h("p", { class: "report-note bad" }, error.message)); });
  };
  const refresh = async () => {
    if (timer !== null) return;
    const wait = next - performance.now();
    if (wait <= 0) await now();
    else timer = setTimeout(later, wait);
  };
  return { now, refresh, leave: () => clearTimeout(timer) };
}

function state(report, only) {
  const whole = report.benchmarks.filter((one) => only === null || one.label === only).every(({ total }) => total.numbers.scored === total.numbers.rows);
  return whole ? "Complete" : "Not complete";
}

const level = (report) => `${real(100 * report.confidence)}%`;

export function interval(estimate) {
  if (estimate === null) return "–";
  const mean = fixed(estimate.mean, 3);
  return estimate.low === null ? mean : `${mean} [${fixed(estimate.low, 3)}, ${fixed(estimate.high, 3)}]`;
}

function flat(value, path = []) {
  if (value === null) return [];
  if (typeof value !== "object" || Array.isArray(value)) return [[path.join("."), Array.isArray(value) ? JSON.stringify(value) : String(value)]];
  return Object.entries(value).flatMap(([name, inner]) => flat(inner, [...path, name]));
}

function part(report, { numbers, histogram }) {
  return [
    h("dl", { class: "facts inline part-facts" }, facts(report, numbers).map(([name, value, kind]) => h("div", {}, h("dt", {}, name), h("dd", { class: kind ?? "" }, value)))),
    h("div", { class: "charts" },
      h("figure", {}, passChart(numbers), h("figcaption", {}, h("span", { class: "key at" }, "pass@k"), h("span", { class: "key hat" }, "pass^k"), ` within k attempts, ${level(report)}`)),
      h("figure", {}, rewardChart(histogram, numbers.reward?.mean ?? 0), h("figcaption", {}, "rows by reward; the line is the mean")),
      passTable(report, numbers))];
}

function facts(report, numbers) {
  const all = [[`mean reward [${level(report)}]`, interval(numbers.reward), "total"],
    ["scored", `${count(numbers.scored)} of ${count(numbers.rows)}`], ["failed", count(numbers.failed), numbers.failed && "bad"],
    ["missing", count(numbers.missing), numbers.missing && "warn"],
    [`passed (reward ≥ ${real(report.pass_reward)})`, count(numbers.passed)],
    ["tasks", count(numbers.tasks)]];
  if (numbers.unscored_tasks) all.push(["tasks without a reward", count(numbers.unscored_tasks), "warn"]);
  if (numbers.truncation_rate) all.push(["cut off", percent(numbers.truncation_rate)]);
  if (numbers.broken_prefixes) all.push(["history rewritten", plural(numbers.broken_prefixes, "row")]);
  if (numbers.without_tokens) all.push(["without tokens", plural(numbers.without_tokens, "row")]);
  for (const [name, held] of Object.entries(numbers.components)) all.push([name, `${fixed(held.mean, 3)} (${plural(held.rows, "row")})`]);
  return all;
}

function passTable(report, numbers) {
  const value = (one) => interval(one.estimate);
  return h("table", { class: "passes" }, h("caption", { class: "hidden" }, "pass@k and pass^k"),
    h("thead", {}, h("tr", {}, ["k", "pass@k", "pass^k", "left out"].map((title) => h("th", { scope: "col", class: "number" }, title)))),
    h("tbody", {}, numbers.pass_at.map((one, place) => h("tr", {}, h("td", { class: "number" }, one.k), h("td", { class: "number" }, value(one)),
      h("td", { class: "number" }, value(numbers.pass_hat[place])),
      h("td", { class: "number", title: "tasks with fewer than k results" }, count(one.left_out))))));
}

function failures(numbers) {
  return h("div", { class: "failure" }, h("h3", {}, `${plural(numbers.failed, "row")} failed`),
    h("ul", {}, numbers.failures.map((one) => h("li", {}, h("b", {}, one.error), ` ${plural(one.rows, "row")}, e.g. `, h("code", {}, one.example)))));
}

export function table(caption, columns, rows) {
  return h("div", { class: "wide" }, h("table", { class: "entries numbers" }, h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map((one) => (one instanceof Node ? one : h("th", { scope: "col", class: one.kind }, one.title))))), h("tbody", {}, rows)));
}

const numberColumns = (report) => ["Benchmark", "Scored", "Failed", "Missing", `Mean reward [${level(report)}]`, "Passed", "Cut off", "Sampled tokens", "Turns"]
  .map((title, place) => ({ title, kind: place ? "number" : "" }));

function numbersRow({ numbers }, name) {
  return h("tr", {}, cell("Benchmark", "name", name),
    cell("Scored", "number", `${count(numbers.scored)} of ${count(numbers.rows)}`),
    cell("Failed", numbers.failed ? "number bad" : "number", count(numbers.failed)),
    cell("Missing", numbers.missing ? "number warn" : "number", count(numbers.missing)),
    cell("Mean reward", "number reward", interval(numbers.reward)),
    cell("Passed", "number", count(numbers.passed)),
    cell("Cut off", "number", numbers.truncation_rate === null ? "–" : percent(numbers.truncation_rate)),
    cell("Sampled", "number", numbers.generated_tokens === null ? "–" : fixed(numbers.generated_tokens.mean, 1)),
    cell("Turns", "number", numbers.turns === null ? "–" : fixed(numbers.turns.mean, 1)));
}

function sortable(title, name, current, to) {
  const number = title === "Task" || title === "Source" ? "" : "number";
  if (name === null) return h("th", { scope: "col", class: number }, title);
  const active = (current || "plan").replace(/^-/, "") === name;
  const down = active && current.startsWith("-");
  const chosen = active ? (down ? name : `-${name}`) : name === "failed" ? "-failed" : name;
  return h("th", { scope: "col", class: number, "aria-sort": active ? (down ? "descending" : "ascending") : null },
    link(to(chosen === "plan" ? "" : chosen), { class: "sort" }, title, h("span", { "aria-hidden": "true" }, active ? (down ? " ↓" : " ↑") : "")));
}

function taskRow(task, several) {
  const attributes = { "data-item": task.number, class: "item" };
  return h("tr", {},
    cell("Task", "name", task.group === null ? h("span", { title: "It has no rollout yet." }, task.task_id) : link(`/group/${task.group}`, attributes, task.task_id)),
    several && cell("Source", "", task.source),
    cell("Mean", "number", task.mean === null ? "–" : fixed(task.mean, 3)),
    cell("Passed", "number", count(task.passed)), cell("Scored", "number", `${count(task.scored)} of ${count(task.repeats)}`),
    cell("Failed", task.failed ? "number bad" : "number", count(task.failed)),
    cell("Missing", task.missing ? "number warn" : "number", count(task.missing)));
}
