// The log, newest first, with filters; a click shows the whole entry.

import { clock, h, show } from "./dom.js";

const SHOWN = 400;
const ROUTINE = new Set(["StepCommitted", "CommandApplied", "SnapshotStored", "CheckpointSaved"]);

export class Log {
  constructor(source) {
    this.source = source;
    const again = () => this.paint();
    this.filter = h("input", { id: "filter", type: "search", placeholder: "text, node or task", "aria-label": "filter by text", oninput: again });
    this.types = h("select", { "aria-label": "type of event", onchange: again }, h("option", { value: "" }, "all types"));
    this.routine = h("input", { type: "checkbox", onchange: again });
    this.held = h("input", { type: "checkbox", onchange: again });
    this.count = h("span", { class: "faint" });
    this.rows = h("div", { class: "log", role: "log" });
    this.whole = h("div", {});
    this.known = new Set();
    this.element = h("section", {}, h("h2", {}, "Log"), h("form", { onsubmit: (event) => event.preventDefault() }, this.filter, this.types, h("label", {}, this.routine, " routine too"), h("label", {}, this.held, " hold"), this.count), this.whole, this.rows);
  }

  opened() { if (!this.held.checked) this.paint(); }

  draw() { if (!this.rows.childElementCount) this.paint(); }

  entries() {
    if (this.held.checked) return;
    const now = performance.now();
    if (this.later) return;
    this.later = setTimeout(() => { this.later = 0; this.paint(); }, Math.max(0, 200 - (now - (this.painted ?? 0))));
  }

  paint() {
    this.painted = performance.now();
    const { entries } = this.source, text = this.filter.value.toLowerCase(), type = this.types.value, found = [];
    for (const entry of entries.slice(-SHOWN)) if (!this.known.has(entry.type)) { this.known.add(entry.type); this.types.append(h("option", {}, entry.type)); }
    for (let at = entries.length - 1; at >= 0 && found.length < SHOWN; at--) {
      const entry = entries[at];
      if (type ? entry.type !== type : !this.routine.checked && ROUTINE.has(entry.type)) continue;
      const said = entry.summary ?? `not a valid event: ${entry.quarantined}`;
      if (text && !said.toLowerCase().includes(text)) continue;
      found.push(this.row(entry, said));
    }
    this.count.textContent = `${found.length} shown of ${entries.length} here`;
    show(this.rows, found);
  }

  row(entry, said) {
    const made = this.made ??= new WeakMap();
    let row = made.get(entry);
    if (!row) {
      row = h("div", { tabindex: 0, onclick: () => this.tell(entry), onkeydown: (event) => { if (event.key === "Enter") this.tell(entry); } }, h("span", { class: "faint" }, entry.seq), h("span", {}, clock(entry.recorded_at_us)), h("span", { class: "faint" }, entry.type), h("span", {}, said));
      made.set(entry, row);
    }
    return row;
  }

  tell(entry) { show(this.whole, h("pre", {}, JSON.stringify(entry, null, 1))); this.whole.scrollIntoView({ block: "nearest" }); }
}
