// Two evaluations task by task: what `gymrl eval report A B` prints; B is the one whose rollouts are listed.

import { get } from "./api.js";
import { differenceChart } from "./charts.js";
import { h, link, replace } from "./dom.js";
import { count, fixed, plural, real } from "./format.js";
import { cell, keepFocus, listKeys, tabs } from "./list.js";
import { interval, paced, table } from "./report.js";

export async function againstView(context) {
  const { signal } = context;
  const holder = h("div", { class: "report" });

  async function load() {
    const found = await get("/api/report/comparison", {}, signal);
    keepFocus(holder, () => replace(holder,
      h("div", { class: "list-head" }, h("h1", { tabindex: -1 }, "Compared"), tabs("against", context.status)),
      h("dl", { class: "facts inline" }, [["A", found.before], ["B", found.after]].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      differing(found), table("Both runs by benchmark", columns(found), found.benchmarks.flatMap((one) => [
        numbersRow(one.total, h("b", {}, one.label)), ...one.sources.map((source) => numbersRow(source, h("span", { class: "muted source" }, source.name)))])),
      found.benchmarks.map(section)));
  }

  const pace = paced(load, holder);
  await pace.now();
  return { element: holder, title: "Compared", up: "/report", refresh: pace.refresh, leave: pace.leave, keys: listKeys(holder) };
}

function differing(found) {
  const lines = [...found.settings, ...found.only_before.map((label) => `benchmark ${label} is only in A`), ...found.only_after.map((label) => `benchmark ${label} is only in B`)];
  return h("ul", { class: "differing" }, lines.length ? lines.map((line) => h("li", {}, h("code", {}, line))) : h("li", { class: "muted" }, "The settings are the same."));
}

const columns = (found) => ["Benchmark", "A", "B", `B − A [${real(100 * found.confidence)}%]`, "Better", "Worse", "Same", "Sign test p"]
  .map((title, place) => ({ title, kind: place ? "number" : "" }));

function numbersRow({ numbers }, name) {
  return h("tr", {}, cell("Benchmark", "name", name), cell("A", "number", fixed(numbers.before, 3)), cell("B", "number", fixed(numbers.after, 3)),
    cell("B − A", "number reward", interval(numbers.difference)), cell("Better", "number", count(numbers.better)),
    cell("Worse", "number", count(numbers.worse)), cell("Same", "number", count(numbers.same)), cell("Sign test p", "number", real(numbers.p_value)));
}

function section(one) {
  const { numbers } = one.total;
  return h("section", { class: "benchmark", "aria-label": one.label }, h("h2", {}, one.label),
    h("div", { class: "charts" }, h("figure", {}, differenceChart(one.differences, numbers.difference?.mean ?? null),
      h("figcaption", {}, "B − A of each task, the largest fall first; the line is the mean"))),
    Object.entries(one.left_out).map(([why, tasks]) => h("p", { class: "report-note warn" },
      `${plural(tasks.count, "task")} ${why}: ${tasks.names.join(", ")}${tasks.count > tasks.names.length ? ", …" : ""}`)),
    h("div", { class: "pair-of" }, changed("worse", numbers.worse, one.worse), changed("better", numbers.better, one.better)));
}

function changed(what, total, tasks) {
  if (!tasks.length) return null;
  const titles = ["Task", "A", "B", "B − A"];
  return h("div", {}, h("h3", {}, `${plural(total, "task")} ${what} in B`, total > tasks.length && h("span", { class: "muted" }, `, the first ${count(tasks.length)}`)), table(`Tasks that are ${what} in B`, titles.map((title, place) => ({ title, kind: place ? "number" : "" })), tasks.map((task) => h("tr", {},
    cell("Task", "name", task.group === null ? task.task_id : link(`/group/${task.group}`, { "data-item": task.number, class: "item" }, task.task_id)),
    cell("A", "number", fixed(task.before, 3)), cell("B", "number", fixed(task.after, 3)), cell("B − A", "number", `${task.difference > 0 ? "+" : ""}${fixed(task.difference, 3)}`)))));
}
