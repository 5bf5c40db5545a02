// What changes the cluster: it needs the operate scope (tasks: submit), and asks first.

import { h, show } from "./dom.js";

const dialog = document.getElementById("dialog");

export const mayOperate = (source) => source.may?.has("operate") && !source.replay;
export const maySubmit = (source) => source.may?.has("submit") && !source.replay;

/** Show a form in the dialog; the values of its fields by name, or null where it was left. */
function ask(title, fields, yes) {
  return new Promise((done) => {
    const form = h("form", { method: "dialog", style: { flexDirection: "column", alignItems: "stretch" } }, h("h2", {}, title), fields,
      h("div", {}, h("button", { value: "yes", class: "danger" }, yes), " ", h("button", { value: "no", formnovalidate: true }, "Leave it")));
    show(dialog, form);
    dialog.onclose = () => done(dialog.returnValue === "yes" ? Object.fromEntries(new FormData(form)) : null);
    dialog.returnValue = "no";
    dialog.showModal();
  });
}

const field = (label, name, attributes = {}) => h("label", {}, label, " ", h("input", { name, ...attributes }));

async function order(source, title, yes, path, body, fields = []) {
  const given = await ask(title, [fields, field("Reason, for the log", "reason", { maxlength: 1024, placeholder: "requested by an operator" })], yes);
  if (!given) return;
  try {
    const answer = await source.ask(path, body(given));
    tell(`Ordered at entry ${answer.seq}.`);
  } catch (error) { tell(error.message, "bad"); }
}

export function tell(text, kind = "good") {
  show(dialog, h("p", { class: kind }, text), h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  dialog.onclose = null;
  if (!dialog.open) dialog.showModal();
}

export function nodeButtons(source, node) {
  if (!mayOperate(source)) return h("p", { class: "faint" }, source.replay ? "A replay: nothing can be ordered." : "This token may not operate.");
  const path = (verb) => `v1/nodes/${encodeURIComponent(node.name)}/${verb}`;
  const button = (text, title, yes, verb, body) => h("button", { class: "danger", onclick: () => order(source, title, yes, path(verb), body) }, text);
  return h("form", { onsubmit: (event) => event.preventDefault() },
    button("Cordon…", `Give ${node.name} no new workers?`, "Cordon", "cordon", ({ reason }) => ({ drain: false, reason })),
    button("Drain…", `Empty ${node.name}? Its workers move at an iteration boundary.`, "Drain", "cordon", ({ reason }) => ({ drain: true, reason })),
    button("Uncordon…", `Give ${node.name} workers again?`, "Uncordon", "uncordon", ({ reason }) => ({ reason })),
    source.inject && h("button", { class: "danger", onclick: () => inject(source, { node: node.name }, ["kill", "drop_network"]) }, "Inject…"));
}

/** `needs`: nobody has acknowledged or silenced it yet. */
export function alarmButtons(source, alarm, needs) {
  if (!mayOperate(source)) return null;
  const path = (verb) => `v1/alarms/${encodeURIComponent(alarm)}/${verb}`;
  const button = (text, title, yes, verb, body, fields) => h("button", { class: "small", onclick: () => order(source, title, yes, path(verb), body, fields) }, text);
  return [needs && [button("Acknowledge…", `Acknowledge ${alarm}? It notifies nobody until it is over and comes back.`, "Acknowledge", "acknowledge", ({ reason }) => ({ reason })),
    button("Silence…", `Silence ${alarm} for a while?`, "Silence", "silence", ({ reason, hours }) => ({ reason, for_s: 3600 * Number(hours) }), [field("hours", "hours", { type: "number", min: 1, max: 720, value: 2, required: true })])],
    button("Assign…", `Whose is ${alarm}?`, "Assign", "assign", ({ reason, person }) => ({ reason, person }), [field("person", "person", { required: true, maxlength: 63 })])];
}

export function taskButtons(source, task) {
  if (task.status !== "active") return null;
  const path = (verb) => `v1/tasks/${encodeURIComponent(task.name)}/${verb}`;
  const number = (label, name) => field(label, name, { type: "number", min: 1, value: task[name] });
  const reshape = () => order(source, `Give ${task.name} another layout or size?`, "Reshape", path("reshape"),
    ({ reason, ...given }) => ({ reason, ...Object.fromEntries(Object.entries(given).map(([key, value]) => [key, Number(value)]).filter(([key, value]) => value && value !== task[key])) }),
    [number("tp", "tp"), number("pp", "pp"), number("min. workers", "min_workers"), number("max. workers", "max_workers")]);
  return h("form", { onsubmit: (event) => event.preventDefault() },
    maySubmit(source) && h("button", { class: "danger", onclick: reshape }, "Reshape…"),
    maySubmit(source) && h("button", { class: "danger", onclick: () => order(source, `End ${task.name}? Its checkpoints stay.`, "Cancel the task", path("cancel"), ({ reason }) => ({ reason })) }, "Cancel…"));
}

export async function inject(source, whom, kinds = ["kill", "stop", "exception", "hang", "exit", "slow"]) {
  const title = `Order a fault for ${whom.node ?? `${whom.task}, rank ${whom.rank}`}?`;
  const given = await ask(title, h("label", {}, "Fault ", h("select", { name: "kind" }, kinds.map((kind) => h("option", {}, kind)))), "Inject");
  if (!given) return;
  try { tell(`Ordered at entry ${(await source.ask("v1/faults", { kind: given.kind, ...whom, ...(["slow", "drop_network"].includes(given.kind) ? { seconds: 5 } : {}) })).seq}.`); } catch (error) { tell(error.message, "bad"); }
}

export async function askToken(source) {
  if (dialog.open) return new Promise(() => {});
  const given = await ask("This coordinator wants a token with the read scope.", field("Token", "token", { type: "password", autocomplete: "off", required: true }), "Use it");
  if (!given) return new Promise(() => {});
  source.setToken(given.token.trim());
}
