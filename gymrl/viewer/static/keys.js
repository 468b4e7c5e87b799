// The keyboard: one table of keys, which is also what the help shows.

import { h, replace } from "./dom.js";

const HELP = [
  ["Everywhere", [
    ["/", "search"], ["?", "this help"], ["Esc", "close, or one level up"], ["g", "all groups"], ["r", "all rollouts"],
    ["e", "the evaluation's report"], ["a", "compared with the other one"],
  ]],
  ["Lists", [
    ["j  k  or  ↓  ↑", "next, previous entry"], ["Enter", "open it"], ["n  p", "next, previous page"],
  ]],
  ["A rollout", [
    ["j  k", "next, previous turn"], ["[  ]", "previous, next attempt of the group"],
    ["n  p", "next, previous group"], ["c", "side by side with the next attempt"],
    ["1  2  3", "tokens, conversation, raw JSON"], ["m", "change what colours mean"], ["i", "texts or ids"],
  ]],
  ["Tokens (Tab to them)", [
    ["←  →", "token by token"], ["↓  ↑", "line by line"], ["Home  End", "begin, end of the part"],
    ["Enter", "link to the token"],
  ]],
  ["Side by side", [["d", "go to the first difference"], ["m", "change what colours mean"], ["i", "texts or ids"]]],
];

const dialog = document.getElementById("help");

export function openHelp() {
  if (dialog.open) return;
  replace(dialog,
    h("h2", { id: "help-title" }, "Keyboard"),
    h("div", { class: "help-columns" }, HELP.map(([title, keys]) => h("section", {}, h("h3", {}, title),
      h("dl", {}, keys.map(([key, what]) => [h("dt", {}, key.split(/\s+/).map((one) => (one === "or" ? " or " : h("kbd", {}, one)))), h("dd", {}, what)]))))),
    h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}

const typing = (element) => element?.matches?.("input:not([type=radio], [type=checkbox]), select, textarea");

export function installKeys({ shown, navigate, searchField }) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (dialog.open) return;
    if (event.key === "Escape") {
      if (typing(document.activeElement)) document.activeElement.blur();
      else if (shown()?.up) navigate(shown().up);
      return;
    }
    if (typing(event.target)) return;
    const own = shown()?.keys?.[event.key];
    const act = own ?? {
      "/": () => { searchField.focus(); searchField.select(); },
      "?": openHelp,
      g: () => navigate("/"),
      r: () => navigate("/rows"),
      e: () => navigate("/report"),
      a: () => navigate("/against"),
    }[event.key];
    if (!act) return;
    if (act(event) !== false) event.preventDefault();
  });
}
