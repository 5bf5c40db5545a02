// The frame: tabs, keys, health, the time slider of a replay; each view is a module of its own.

import { Source } from "./source.js";
import { clock, h, moment, show, worth } from "./dom.js";
import { askToken } from "./acting.js";
import { Cluster } from "./cluster.js";
import { Tasks } from "./tasks.js";
import { Incidents } from "./incidents.js";
import { Goodput } from "./goodput.js";
import { Plan } from "./plan.js";
import { Ranks } from "./ranks.js";
import { Log } from "./log.js";

const VIEWS = { cluster: Cluster, tasks: Tasks, incidents: Incidents, goodput: Goodput, plan: Plan, ranks: Ranks, log: Log };
const source = new Source();
const main = document.getElementById("main");
const views = {};
let name = "";

/** Of "#ranks/big": the view and what it is about. */
const place = () => location.hash.slice(1).split("/").map(decodeURIComponent);

function goTo() {
  const [wanted, ...about] = place();
  name = VIEWS[wanted] ? wanted : "cluster";
  views[name] ??= new VIEWS[name](source);
  // Not by `show`: a key pressed in the new view would be text in whatever stands where the focus was.
  if (main.firstElementChild !== views[name].element) main.replaceChildren(views[name].element);
  document.title = `${name} - unicrond`;
  show(document.getElementById("tabs"), Object.keys(VIEWS).map((one, number) =>
    h("a", { href: `#${one}`, "aria-current": one === name && "page", title: `key ${number + 1}` }, one)));
  document.getElementById("alarms").hidden = name === "cluster"; // which lists them
  views[name].opened?.(about);
  draw();
}

function draw() { if (source.view) views[name]?.draw(source.view); }

function drawHealth() {
  const { health, view, replay } = source;
  const element = document.getElementById("health");
  if (!health) { show(element, source.why || "connecting"); return; }
  const well = replay || (source.connected && health.status === "live");
  const status = replay ? `replay of ${replay.name}` : source.connected ? health.status : `no connection (${source.why || "trying"})`;
  const leader = health.status === "standby" && source.connected && !replay ? ` (${health.heads?.leader?.process ?? "no head"} leads)` : "";
  show(element, h("span", { class: well ? "good" : leader ? "warn" : "bad" }, `${status}${leader}`),
    ` · term ${view.term} · entry ${view.seq}, ${moment(view.now_us)} · plan ${view.plan.epoch}, WAF ${worth(view, view.plan.waf)}`);
  show(document.getElementById("alarms"), (health.trouble ? [health.trouble] : []).concat((health.alarms ?? []).filter((row) => !row.is_quiet).map((row) => `${row.text}${row.handling ? ` (${row.handling})` : ""}`)).map((text) => h("div", {}, text)));
}

/** A replay's slider: by time, over the whole log. */
function drawTime() {
  const { replay } = source, bar = document.getElementById("time");
  if (!replay || bar.childElementCount) return;
  bar.hidden = false;
  const slider = h("input", { type: "range", id: "slider", min: 0, max: 10000, value: 10000, "aria-label": "time in the log" });
  const told = (at) => (replay.until_us - replay.from_us < 60e6 ? clock(at) : moment(at));
  const text = h("output", { for: "slider" }, told(replay.until_us));
  const us = () => Math.round(replay.from_us + (replay.until_us - replay.from_us) * slider.value / 10000);
  let wanted = false, moving = false;
  const move = async () => {
    wanted = true;
    if (moving) return;
    moving = true;
    while (wanted) {
      wanted = false;
      text.value = told(us());
      try { await source.moveTo(us()); } catch { /* told as health */ }
    }
    moving = false;
  };
  slider.addEventListener("input", move);
  const step = (by) => { slider.value = Number(slider.value) + by; move(); };
  bar.append(h("button", { onclick: () => step(-50), "aria-label": "back" }, "◀"), slider,
    h("button", { onclick: () => step(50), "aria-label": "forward" }, "▶"), text);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const names = Object.keys(VIEWS);
  if (names[Number(event.key) - 1]) location.hash = names[Number(event.key) - 1];
  else if (event.key === "/") { location.hash = "log"; setTimeout(() => document.querySelector("#filter")?.focus()); event.preventDefault(); }
});
window.addEventListener("hashchange", goTo);
source.addEventListener("view", () => { drawTime(); drawHealth(); draw(); });
source.addEventListener("health", drawHealth);
source.addEventListener("entries", () => views[name]?.entries?.());
source.addEventListener("token", () => askToken(source).then(begin));

function begin() {
  source.start().catch((error) => { if (error.status !== 401) setTimeout(begin, 2000); });
}
goTo();
begin();
