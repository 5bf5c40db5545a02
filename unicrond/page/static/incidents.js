// Incidents on a line of time and in a table, and the head's account of one.

import { account } from "./account.js";
import { SEVERITY, clock, css, h, moment, sharp, show, span, table } from "./dom.js";

const ROW = 14;

export class Incidents {
  constructor(source) {
    this.source = source;
    this.chosen = "";
    this.canvas = h("canvas", { role: "img", "aria-label": "incidents by time; the table below lists them", onclick: (event) => this.tell(this.under(event)),
      onmousemove: (event) => { const one = this.under(event); this.canvas.title = one ? `${one.id} ${one.kind} ${one.severity}, ${one.node}` : ""; } });
    this.story = h("div", { "aria-live": "polite", id: "story" });
    this.list = h("div", {});
    this.element = h("section", {}, h("h2", {}, "Incidents"), this.canvas, this.story, this.list);
    new ResizeObserver(() => this.view && this.paint()).observe(this.element);
  }

  opened([id]) { if (id) this.wanted = id; }

  draw(view) {
    const seen = JSON.stringify(view.incidents.map((one) => [one.id, one.closed_us, one.kind]));
    this.view = view;
    this.canvas.hidden = !view.incidents.length;
    this.paint();
    if (this.wanted) { const one = view.incidents.find(({ id }) => id === this.wanted); this.wanted = ""; if (one) this.tell(one); }
    if (seen === this.seen) return;
    this.seen = seen;
    if (this.chosen && this.story.childElementCount) this.tell(view.incidents.find(({ id }) => id === this.chosen));
    const newest = [...view.incidents].reverse();
    show(this.list, newest.length ? table(["incident", "severity", "cause", "node", "tasks", "response", "#detection", "#transition", "#repeated", "when"], newest.map((one) => [
      one.id, h("span", { style: { borderLeft: `.4rem solid ${SEVERITY[one.severity]}`, paddingLeft: ".4rem" } }, one.severity), one.kind, one.node, one.tasks.join(", ") || "-",
      one.closed_us ? one.response : h("b", { class: "bad" }, `${one.response} (open)`), span(one.detection_us), one.transition_us ? span(one.transition_us) : "-", one.micro_batches_repeated, moment(one.detected_us)]),
    (row) => this.tell(newest[row])) : h("p", {}, "No incident so far."));
  }

  paint() {
    const { incidents, now_us: now } = this.view, width = Math.max(240, this.element.clientWidth - 4);
    const from = Math.min(now - 1, ...incidents.map((one) => one.detected_us)), scale = (width - 12) / Math.max(1, now - from);
    const rows = [];
    this.boxes = incidents.map((one) => {
      const x = 4 + (one.detected_us - from) * scale, end = one.resumed_us || one.closed_us || now, w = Math.max(5, (end - one.detected_us) * scale);
      let row = rows.findIndex((until) => until < x);
      if (row < 0) row = rows.length < 10 ? rows.length : 9;
      rows[row] = x + w + 1;
      return { one, x, y: row * ROW, w };
    });
    const height = Math.max(1, rows.length) * ROW + 18, context = sharp(this.canvas, width, height);
    context.font = "11px system-ui, sans-serif";
    for (const { one, x, y, w } of this.boxes) {
      context.fillStyle = SEVERITY[one.severity];
      context.fillRect(x, y + 1, w, ROW - 3);
      if (one.id === this.chosen) { context.strokeStyle = css("--front"); context.lineWidth = 2; context.strokeRect(x - 1, y, w + 2, ROW - 1); }
    }
    context.fillStyle = css("--faint");
    context.fillText(clock(from), 2, height - 4);
    context.textAlign = "right";
    context.fillText(clock(now), width - 2, height - 4);
    context.textAlign = "left";
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return this.boxes.findLast((one) => x >= one.x - 2 && x <= one.x + one.w + 2 && y >= one.y && y < one.y + ROW)?.one;
  }

  /** The head's own account, and nothing of ours. */
  async tell(incident) {
    if (!incident) return;
    this.chosen = incident.id;
    this.paint();
    const box = account(this.source, "incident", incident.id);
    show(this.story, h("div", { class: "panel" }, box));
    this.story.scrollIntoView({ block: "nearest" });
  }
}
