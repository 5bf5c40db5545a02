// The account of something, as the head tells it (views/accounts.py): the same text as `unicronctl story`.

import { h, show } from "./dom.js";

/** An element with the account of a node, a task, an incident or a plan. */
export function account(source, kind, name) {
  return told(source, `v1/story/${kind}/${encodeURIComponent(name)}`);
}

/** A button that opens the account. */
export function accountButton(source, kind, name) {
  const box = h("div", {});
  return h("div", {}, h("button", { type: "button", onclick: () => show(box, account(source, kind, name)) }, "What became of it?"), box);
}

/** An element with what an address tells; `then` is called with it. */
export function told(source, path, box = h("pre", { class: "account" }, "asking"), then = () => {}) {
  source.ask(path).then((story) => { box.textContent = story.lines.join("\n"); then(story); }, (error) => { box.textContent = error.message; then(null); });
  return box;
}
