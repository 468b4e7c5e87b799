// Small pictures of numbers, as elements of SVG: no style attribute, no script, no library.

import { h, svg } from "./dom.js";
import { count, fixed, plural, real } from "./format.js";

const BOX = { width: 320, height: 170, left: 34, right: 8, top: 8, bottom: 24 };
const INNER = { width: BOX.width - BOX.left - BOX.right, height: BOX.height - BOX.top - BOX.bottom };

const across = (share) => BOX.left + share * INNER.width;
const up = (share) => BOX.top + (1 - share) * INNER.height;
const say = (x, y, text, anchor = "middle") => svg("text", { class: "axis", x, y, "text-anchor": anchor }, text);

function chart(says, ...children) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": says }, children);
}

function ruled(levels) {
  return levels.map(([share, text]) => [
    svg("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: up(share), y2: up(share) }),
    say(BOX.left - 5, up(share) + 4, text, "end")]);
}

// pass@k and pass^k over k on a logarithmic scale, each point with its interval.
export function passChart(numbers) {
  const points = (estimates) => estimates.filter((one) => one.estimate !== null);
  const at = points(numbers.pass_at);
  if (!at.length) return h("p", { class: "muted" }, "No task has a result yet.");
  const ks = numbers.pass_at.map((one) => one.k);
  const last = Math.log2(Math.max(...ks)) || 1;
  const x = (k) => across(ks.length > 1 ? 0.03 + (0.94 * Math.log2(k)) / last : 0.5);
  const bounded = (share) => Math.min(1, Math.max(0, share));
  const curve = (estimates, kind, shift) => [
    svg("polyline", { class: `curve ${kind}`, points: estimates.map((one) => `${x(one.k) + shift},${up(one.estimate.mean)}`).join(" ") }),
    estimates.map((one) => [
      one.estimate.low !== null && svg("line", { class: `spread ${kind}`, x1: x(one.k) + shift, x2: x(one.k) + shift, y1: up(bounded(one.estimate.low)), y2: up(bounded(one.estimate.high)) }),
      svg("circle", { class: `point ${kind}`, cx: x(one.k) + shift, cy: up(one.estimate.mean), r: 3.5 },
        svg("title", {}, `${kind === "at" ? "pass@" : "pass^"}${one.k}: ${fixed(one.estimate.mean, 3)}`))])];
  return chart(
    at.map((one) => `pass@${one.k} ${fixed(one.estimate.mean, 3)}`).join(", "),
    ruled([[0, "0"], [0.5, "0.5"], [1, "1"]]),
    curve(points(numbers.pass_hat), "hat", 2), curve(at, "at", -2),
    ks.map((k) => say(x(k), BOX.height - 7, k)));
}

// How many rows have which reward, and where the mean is.
export function rewardChart(histogram, mean) {
  if (histogram === null) return h("p", { class: "muted" }, "No row has a reward yet.");
  const { low, high, counts } = histogram;
  const most = Math.max(...counts);
  const step = 1 / counts.length;
  const edge = (place) => low + (place * (high - low)) / counts.length;
  const share = (mean - low) / (high - low);
  return chart(
    `Rewards from ${real(low)} to ${real(high)}, mean ${fixed(mean, 3)}`,
    ruled([[0, "0"], [1, count(most)]]),
    counts.map((rows, place) => rows > 0 && svg("rect", { class: "fill", x: across(place * step) + 0.5, width: INNER.width * step - 1, y: up(rows / most), height: (INNER.height * rows) / most },
      svg("title", {}, `${real(edge(place))} to ${real(edge(place + 1))}: ${plural(rows, "row")}`))),
    svg("line", { class: "mean", x1: across(share), x2: across(share), y1: up(0), y2: up(1) }),
    say(across(0), BOX.height - 7, real(low), "start"), say(across(1), BOX.height - 7, real(high), "end"));
}

// The difference of each task, ascending, and their mean.
export function differenceChart(differences, mean) {
  if (!differences.length) return h("p", { class: "muted" }, "No task has a reward in both.");
  const most = Math.max(...differences.map(Math.abs)) || 1;
  const y = (difference) => up(0.5 + (0.5 * difference) / most);
  const wide = INNER.width / differences.length;
  return chart(
    `Differences of ${plural(differences.length, "task")}, from ${real(differences[0])} to ${real(differences.at(-1))}, mean ${fixed(mean, 3)}`,
    ruled([[0, real(-most, 2)], [0.5, "0"], [1, real(most, 2)]]),
    differences.map((one, place) => svg("rect", { class: one < 0 ? "fill negative" : "fill", x: BOX.left + place * wide, width: Math.max(0.5, wide - (wide > 3 ? 1 : 0)), y: Math.min(y(one), y(0)), height: Math.abs(y(one) - y(0)) })),
    svg("line", { class: "mean", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(mean), y2: y(mean) }));
}
