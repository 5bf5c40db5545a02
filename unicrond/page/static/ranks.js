// One task's ranks: what each does, since when; a worker's log on demand.

import { h, show, span } from "./dom.js";
import { inject, mayOperate } from "./acting.js";

const LOG_BYTES = 16384;
/** Of more ranks only the essence is shown: a click tells the rest. */
const COMPACT = 48;

export class Ranks {
  constructor(source) {
    this.source = source;
    this.task = "";
    this.tabs = h("p", {});
    this.summary = h("p", { class: "faint", id: "ranks-summary" });
    this.note = h("div", {});
    this.grid = h("div", { class: "ranks" });
    this.marks = {};
    this.panel = h("div", { "aria-live": "polite" });
    this.element = h("section", {}, h("h2", {}, "Ranks"), this.tabs, this.summary, this.note, this.panel, this.grid);
  }

  opened([task]) { if (task && task !== this.task) { this.task = task; this.asked = -1; this.marks = {}; show(this.panel); } }

  async draw(view) {
    this.task ||= (view.tasks.find((task) => task.workers > 0) ?? view.tasks.find((task) => task.status === "active") ?? view.tasks.at(-1))?.name ?? "";
    const about = this.task;
    show(this.tabs, view.tasks.map((task) => [h("a", { href: `#ranks/${encodeURIComponent(task.name)}`, "aria-current": task.name === about && "true", class: task.name === about ? "good" : "" }, task.name), " "]));
    if (!about) { show(this.grid, h("p", {}, "No task yet.")); return; }
    this.look();
    if (this.asking || this.asked === view.seq) return;
    this.asking = true;
    try {
      const rows = await this.source.ask(`v1/ranks/${encodeURIComponent(about)}`);
      if (about === this.task) { this.asked = view.seq; this.rows = rows; this.paint(); }
    } catch (error) { show(this.grid, error.message); } finally { this.asking = false; }
  }

  /** Where each worker is at this moment: asked of its node's agent, while this view is on the screen. */
  async look() {
    if (this.source.replay || this.looking || document.hidden || !this.element.isConnected) return;
    const about = this.task;
    this.looking = true;
    try {
      const { marks, silent } = await this.source.ask(`v1/marks/${encodeURIComponent(about)}`);
      const which = Object.entries(silent);
      if (about === this.task) { this.marks = marks; this.paint(); show(this.note, which.length > 0 && h("p", { class: "warn" }, `${which.length} nodes do not say where their workers are, ${which[0][0]}: ${which[0][1]}`)); }
    } catch (error) { this.marks = {}; show(this.note, h("p", { class: "faint" }, error.message)); }
    setTimeout(() => { this.looking = false; if (this.element.isConnected) this.look(); }, (this.rows?.length ?? 0) > 256 ? 10000 : 2000);
  }

  paint() {
    const counts = { train: 0, wait: 0, other: 0 };
    const cells = (this.rows ?? []).map((row) => this.cell(row, this.marks[row.worker], counts));
    show(this.summary, cells.length > 0 && `${cells.length} ranks: ${counts.train} train, ${counts.wait} wait in a collective, ${counts.other} stand out`);
    this.grid.className = cells.length > COMPACT ? "ranks compact" : "ranks";
    show(this.grid, cells.length ? cells : h("p", {}, "The task has no members now."));
  }

  cell(row, mark, counts) {
    const kind = row.still || row.status === "lost" || row.status === "stopping" ? "bad" : row.factor || row.busy || !row.in_group ? "warn" : "";
    const at = row.still ?? (mark && { ...mark, collective: mark.collectives_entered });
    const doing = row.busy ? `busy: ${row.busy}` : row.factor ? `${row.factor.toFixed(2)} times as slow${row.deal ? `: ${row.deal}` : ""}` : row.in_group ? (mark ? "" : "trains") : row.status;
    counts[kind ? "other" : mark?.is_waiting ? "wait" : "train"]++;
    const name = h("b", {}, `rank ${row.rank}`), about = { class: `rank ${kind}`, onclick: () => this.tell(row), title: `${row.worker} on ${row.node}` };
    if (this.rows.length > COMPACT) return h("button", about, name, h("small", {}, at ? `${at.phase} ${at.micro_batch}, ${at.is_waiting ? "in " : ""}c${at.collective}` : doing), at && h("small", {}, span(at.still_us)));
    return h("button", about, name, ` ${row.worker} `, h("small", {}, `on ${row.node}, pid ${row.pid || "-"}, replica ${row.replica}, shard ${row.shard}`),
      at && h("small", {}, `iteration ${at.iteration}, ${at.phase}, micro-batch ${at.micro_batch}`), at && h("small", {}, `${at.is_waiting ? "waits in" : "last"} collective ${at.collective}, since ${span(at.still_us)}`),
      row.still && h("small", { class: "bad" }, "stands still"), doing && h("small", {}, doing));
  }

  async tell(row) {
    const log = h("pre", {}, "asking"), stacks = h("pre", { hidden: true });
    const look = async () => {
      stacks.hidden = false;
      show(stacks, "asking");
      try {
        const told = await this.source.ask(`v1/stacks/${encodeURIComponent(this.task)}?rank=${row.rank}`);
        show(stacks, told.text || told.no_stacks);
      } catch (error) { show(stacks, error.message); }
    };
    show(this.panel, h("div", { class: "panel" }, h("h3", {}, `${row.worker} on ${row.node}`), this.source.inject && mayOperate(this.source) && h("button", { class: "danger", onclick: () => inject(this.source, { task: this.task, rank: row.rank }) }, "Inject…"), !this.source.replay && h("button", { onclick: look }, "What is it doing?"), stacks, h("p", { class: "faint" }, "The end of its log:"), log));
    if (this.source.replay) { show(log, "A replay has the log of events, not the workers' output."); return; }
    try { show(log, (await this.source.ask(`v1/logs/${encodeURIComponent(this.task)}?rank=${row.rank}&tail_bytes=${LOG_BYTES}`)).text || "(empty)"); log.scrollTop = log.scrollHeight; } catch (error) { show(log, error.message); }
  }
}
