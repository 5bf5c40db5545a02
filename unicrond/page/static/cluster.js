// The first view: is it all right, and if not, what to do; who runs where; the tasks' progress; the last hour.
// Nodes x slots are a canvas, for there may be a thousand nodes; beside it, for keyboards and readers, the nodes that are
// not up as a table, and any node by its name. What needs somebody, and what changed, are the head's own words.

import { accountButton, told } from "./account.js";
import { STATUS, card, colourOf, css, h, sharp, show, span, table } from "./dom.js";
import { alarmButtons, nodeButtons } from "./acting.js";

const BY_NAME = new Intl.Collator("en", { numeric: true }); // node9 before node10
const HOUR_S = 3600;
/** How often the last hour is asked for. */
const HOUR_MS = 5000;
const ENDING = new Set(["stopping", "lost", "parked"]);

export class Cluster {
  constructor(source) {
    this.source = source;
    this.chosen = "";
    this.verdict = h("div", { "aria-live": "polite", id: "verdict" });
    this.tasks = h("div", {});
    this.hour = h("pre", { class: "account", id: "hour" });
    this.summary = h("div", { class: "cards" });
    this.legend = h("p", {});
    this.canvas = h("canvas", { id: "grid", role: "img", tabindex: 0, "aria-label": "nodes and their slots; arrow keys choose a node",
      onclick: (event) => this.choose(this.under(event)), onmousemove: (event) => { this.canvas.title = this.text(this.under(event)); },
      onkeydown: (event) => this.key(event) });
    this.find = h("input", { type: "search", placeholder: "find a node", "aria-label": "find a node by name", oninput: () => {
      const node = this.view.nodes.find((one) => one.name === this.find.value) ?? this.view.nodes.find((one) => this.find.value && one.name.startsWith(this.find.value));
      if (node) this.choose(node);
    } });
    this.details = h("div", { "aria-live": "polite" });
    this.trouble = h("div", {});
    this.element = h("section", {}, this.verdict, this.summary, h("h2", {}, "Tasks"), this.tasks, h("h2", {}, "Nodes"), this.legend, this.canvas, h("form", { onsubmit: (event) => event.preventDefault() }, this.find), this.details, this.trouble, h("h2", {}, "The last hour"), this.hour);
    new ResizeObserver(() => this.view && this.paint()).observe(this.element);
  }

  draw(given) {
    const view = this.view = { ...given, nodes: [...given.nodes].sort((one, other) => BY_NAME.compare(one.name, other.name)) };
    const counts = {};
    let used = 0, slots = 0;
    for (const node of view.nodes) {
      counts[node.status] = (counts[node.status] ?? 0) + 1;
      if (node.status === "up") { slots += node.slots; used += node.workers.length; }
    }
    const open = view.incidents.filter((one) => !one.closed_us).length;
    show(this.summary, Object.entries(counts).map(([status, count]) => card(`nodes ${status}`, count, STATUS[status])),
      card("slots in use", `${used} of ${slots}`), card("incidents open", open, open ? "bad" : "good"), card("incidents ever", view.incidents_total));
    show(this.legend, view.tasks.map((task, at) => h("span", { class: "key" }, h("i", { class: "box", style: { background: colourOf(at) } }), h("a", { href: `#ranks/${encodeURIComponent(task.name)}` }, task.name))),
      [["free", "--line", 1], ["isolated, cordoned or drained", "--warn", 0.5], ["lost", "--bad", 0.5]].map(([text, colour, opacity]) => h("span", { class: "key faint" }, h("i", { class: "box", style: { background: `var(${colour})`, opacity } }), text)));
    if (!view.nodes.length) show(this.legend, "No node has joined yet: unicrond enroll NODE, then unicron-agent on it.");
    this.judge(view);
    this.progress(view);
    this.recall(view);
    this.paint();
    this.tell();
    const out = view.nodes.filter((node) => node.status !== "up");
    const types = view.nodes.some((node) => node.gpu);
    show(this.trouble, out.length ? [h("h2", {}, "Nodes that are not up"), table(["node", "status", ...(types ? ["GPU"] : []), "reason"], out.slice(0, 100).map((node) => [
      node.name, h("span", { class: STATUS[node.status] }, node.status), ...(types ? [node.gpu ?? "-"] : []), h("td", { class: "wide" }, node.reason || "-")]), (row) => this.choose(out[row])),
    out.length > 100 && h("p", { class: "faint" }, `and ${out.length - 100} more`)] : []);
  }

  /** What needs somebody, each with what to do. */
  judge(view) {
    const { health, replay } = this.source, alarms = replay ? [] : health?.alarms ?? [];
    const all = [...(health?.trouble && !replay ? [{ what: health.trouble, remedy: "unicronctl status" }] : []),
      ...alarms.map((row) => ({ what: row.text, remedy: `unicronctl acknowledge ${row.alarm}`, ...row })), ...view.attention];
    const isQuiet = ({ handling }) => /^(acknowledged|silenced)/.test(handling ?? "");
    const todo = all.filter((row) => !isQuiet(row)), quiet = all.filter(isQuiet);
    const line = ({ what, remedy, place, alarm, handling }) => h("li", {}, place ? h("a", { href: `#${place}` }, what) : what,
      handling && h("span", { class: "handling" }, ` — ${handling}`), remedy && [" ", h("code", { class: "faint" }, remedy)], alarm && alarmButtons(this.source, alarm, !isQuiet({ handling })));
    show(this.verdict, h("h2", { class: todo.length ? "bad" : "good" }, todo.length ? `${todo.length} ${todo.length === 1 ? "thing needs" : "things need"} somebody` : "All is well", quiet.length > 0 && h("span", { class: "faint" }, ` · ${quiet.length} acknowledged or silenced`)),
      all.length > 0 && h("ul", { class: "todo" }, [...todo, ...quiet].slice(0, 12).map(line),
        all.length > 12 && h("li", { class: "faint" }, `and ${all.length - 12} more: unicronctl alarms`)));
  }

  progress(view) {
    const live = view.tasks.filter((task) => task.status === "active"), ended = view.tasks.length - live.length;
    show(this.tasks, live.length ? table(["task", "progress", "#workers", "#loss", "#to go", "state"], live.slice(0, 50).map((task) => {
      const share = Math.min(1, task.iteration / Math.max(1, task.iterations));
      const state = task.reason || (task.workers < task.min_workers ? "below its least workers" : task.whole ? "trains" : "gathers");
      return [h("a", { href: `#ranks/${encodeURIComponent(task.name)}` }, task.name), h("td", {}, h("span", { class: "progress" }, h("i", { style: { width: `${100 * share}%` } })), `${task.iteration} of ${task.iterations}`),
        `${task.workers} of ${task.min_workers === task.max_workers ? task.max_workers : `${task.min_workers}..${task.max_workers}`}`, task.loss === null || task.loss === undefined ? "-" : Number(task.loss.toPrecision(4)), task.eta_us ? span(task.eta_us) : "-", h("td", { class: "wide" }, state)];
    })) : h("p", {}, "No task is active."), ended > 0 && h("p", { class: "faint" }, h("a", { href: "#tasks" }, `${ended} ended`)));
  }

  /** What changed in the last hour, while somebody looks. */
  recall(view) {
    if (this.recalled === view.seq || this.recalling || document.hidden) return;
    this.recalling = true;
    told(this.source, `v1/story?last_s=${HOUR_S}`, this.hour, (story) => {
      if (story) this.recalled = story.seq;
      setTimeout(() => { this.recalling = false; if (this.element.isConnected && this.view.seq !== this.recalled) this.recall(this.view); }, this.source.replay ? 200 : HOUR_MS);
    });
  }

  /** The size of a cell follows from how many nodes must fit. */
  layout() {
    const { nodes } = this.view, width = Math.max(240, this.element.clientWidth), most = Math.max(1, ...nodes.map((node) => node.slots));
    const small = nodes.length > 120;
    const slot = small ? (most > 4 ? 4 : 7) : Math.min(nodes.length > 40 ? 22 : 34, Math.max(9, 200 / most)), gap = small ? 1 : 2;
    const across = small ? Math.ceil(Math.sqrt(most)) : most;
    const cell = { width: across * (slot + gap) + (small ? 5 : 10), height: Math.ceil(most / across) * (slot + gap) + (small ? 5 : 22) };
    if (!small) cell.width = Math.max(cell.width, 74);
    const columns = Math.max(1, Math.floor(width / cell.width));
    return { slot, gap, across, cell, columns, small, width: columns * cell.width, height: Math.ceil(nodes.length / columns) * cell.height };
  }

  paint() {
    const at = this.grid = this.layout();
    const context = sharp(this.canvas, at.width, at.height);
    const [line, front, bad, warn, faint, accent] = ["--line", "--front", "--bad", "--warn", "--faint", "--accent"].map(css);
    context.font = "11px system-ui, sans-serif";
    this.view.nodes.forEach((node, number) => {
      const x = (number % at.columns) * at.cell.width, y = Math.floor(number / at.columns) * at.cell.height, top = at.small ? 1 : 16;
      const out = node.status !== "up";
      if (!at.small) {
        context.fillStyle = out ? (STATUS[node.status] === "bad" ? bad : warn) : front;
        context.fillText(out ? `${node.name} ${node.status}` : node.name, x + 2, y + 11, at.cell.width - 6);
      }
      for (let slot = 0; slot < node.slots; slot++) {
        const worker = node.workers[slot];
        const left = x + 2 + (slot % at.across) * (at.slot + at.gap), up = y + top + Math.floor(slot / at.across) * (at.slot + at.gap);
        if (worker && !out) {
          context.fillStyle = colourOf(worker[0]);
          context.globalAlpha = worker[3] === "member" ? 1 : ENDING.has(worker[3]) ? 0.25 : 0.55;
          context.fillRect(left, up, at.slot, at.slot);
          context.globalAlpha = 1;
          if (at.slot >= 20 && worker[2] >= 0) { // its rank
            context.fillStyle = "#fff";
            context.textAlign = "center";
            context.fillText(worker[2], left + at.slot / 2, up + at.slot / 2 + 4, at.slot - 2);
            context.textAlign = "left";
          }
        } else {
          context.fillStyle = out ? (STATUS[node.status] === "bad" ? bad : STATUS[node.status] ? warn : faint) : line;
          context.globalAlpha = out ? 0.5 : 1;
          context.fillRect(left, up, at.slot, at.slot);
          context.globalAlpha = 1;
        }
      }
      if (node.name === this.chosen) {
        context.strokeStyle = accent;
        context.lineWidth = 2;
        context.strokeRect(x + 0.5, y + 0.5, at.cell.width - 2, at.cell.height - 2);
      }
    });
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect(), { cell, columns } = this.grid;
    const column = Math.floor((event.clientX - box.left) / cell.width), row = Math.floor((event.clientY - box.top) / cell.height);
    return column < columns ? this.view.nodes[row * columns + column] : undefined;
  }

  text(node) { return node ? `${node.name}: ${node.status}, ${node.workers.length} of ${node.slots} slots${node.gpu ? ` of ${node.gpu}` : ""}${node.domain ? ` in ${node.domain}` : ""}${node.reason ? `; ${node.reason}` : ""}` : ""; }

  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.grid.columns, ArrowUp: -this.grid.columns }[event.key];
    if (!by) return;
    const now = this.view.nodes.findIndex((node) => node.name === this.chosen);
    const node = this.view.nodes[now < 0 ? 0 : now + by];
    if (node) { this.choose(node); event.preventDefault(); }
  }

  choose(node) {
    if (!node) return;
    this.chosen = node.name;
    this.paint();
    this.tell(true);
  }

  tell(anew) {
    const node = this.view.nodes.find((one) => one.name === this.chosen);
    const seen = JSON.stringify(node ?? null);
    if (seen === this.told && !anew) return;
    this.told = seen;
    show(this.details, node && h("div", { class: "panel" }, h("h3", {}, `${node.name} `, h("span", { class: STATUS[node.status] }, node.status)),
      node.reason && h("p", {}, node.reason), h("p", { class: "faint" }, `${node.slots} ${node.slots === 1 ? "slot" : "slots"}${node.gpu ? ` of ${node.gpu}` : ""}${node.domain ? ` in ${node.domain}` : ""}${node.address ? ` at ${node.address}` : ""}`),
      node.workers.length ? table(["worker", "#rank", "status"], node.workers.map(([task, number, rank, status]) => {
        const name = this.view.tasks[task].name;
        return [h("a", { href: `#ranks/${encodeURIComponent(name)}` }, `${name}.${number}`), rank < 0 ? "-" : rank, status];
      })) : h("p", {}, "no workers"), h("p", {}, h("a", { href: `#plan/lose/${encodeURIComponent(node.name)}` }, "What if it were lost?")), accountButton(this.source, "node", node.name), nodeButtons(this.source, node)));
  }
}
