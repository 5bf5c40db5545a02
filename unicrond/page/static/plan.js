// The plan with its reasons, what each next event would lead to, and "what if".

import { accountButton } from "./account.js";
import { h, moment, show, si, span, table, worth } from "./dom.js";

/** How the plan was obtained. */
const WAYS = { table: "looked up in the table", incremental: "solved on rows that stood", fresh: "solved afresh" };

export class Plan {
  constructor(source) {
    this.source = source;
    this.now = h("div", {});
    this.answer = h("div", { "aria-live": "polite" });
    this.foreseen = h("div", {});
    this.lose = h("input", { list: "nodes", placeholder: "node, node", "aria-label": "nodes to lose" });
    this.add = h("input", { type: "number", min: 0, max: 10000, value: 0, "aria-label": "nodes to add", style: { width: "6rem" } });
    this.names = h("datalist", { id: "nodes" });
    const form = h("form", { id: "whatif", onsubmit: (event) => { event.preventDefault(); this.ask(); } }, "Without ", this.lose, this.names, " and with ", this.add, " more nodes ",
      h("button", {}, "What if?"), h("button", { type: "button", onclick: () => { this.lose.value = ""; this.add.value = 2; this.ask(); } }, "two spares"));
    this.element = h("section", {}, this.now, h("h2", {}, "What if"), h("p", { class: "faint" }, "Asks the planner; changes nothing."), form, this.answer, this.foreseen);
  }

  /** "#plan/lose/NODE" asks at once. */
  opened([verb, node]) { if (verb === "lose" && node) { this.lose.value = node; this.add.value = 0; this.ask(); } }

  draw(view) {
    if (this.seen === `${view.plan.epoch}/${view.seq}`) return;
    const { plan } = view, types = plan.tasks.some((one) => one.gpu !== undefined); // nodes have several types of GPU
    this.seen = `${plan.epoch}/${view.seq}`;
    if (this.names.childElementCount !== view.nodes.length) show(this.names, view.nodes.map((node) => h("option", { value: node.name })));
    show(this.now, h("h2", {}, plan.epoch ? `Plan ${plan.epoch}` : "No plan yet"), plan.epoch ? [
      h("p", {}, h("b", {}, plan.trigger), ". ", plan.reason), plan.why && h("p", {}, `Why: ${plan.why}`), h("p", { class: "faint" }, `adopted ${moment(plan.adopted_us)}, ${WAYS[plan.method] ?? plan.method} in ${span(plan.took_us)}; WAF ${worth(view, plan.waf)} planned, ${worth(view, plan.waf_if_healthy)} in health`),
      table(["task", "#workers", "#in health", "#WAF", ...(types ? ["GPU"] : [])], plan.tasks.map((one) => [one.task, one.workers, one.healthy, worth(view, one.waf), ...(types ? [one.gpu || "-"] : [])])), accountButton(this.source, "plan", plan.epoch)] : []);
    if (this.epoch !== plan.epoch && !this.source.replay) { this.epoch = plan.epoch; this.foresee(); }
  }

  async foresee() {
    try {
      const { rows, unforeseen } = await this.source.ask("v1/plan/table");
      show(this.foreseen, h("h2", {}, "Should this come next"), table(["event", "of", "#WAF then", "workers"], rows.map((row) => [
        row.event, `${row.subject}${row.nodes.length ? ` and ${row.nodes.length} alike` : ""}`, worth(this.source.view, row.waf), Object.entries(row.workers).map(([task, count]) => `${task} ${count}${row.gpus?.[task] ? ` on ${row.gpus[task]}` : ""}`).join(", ")])),
      unforeseen > 0 && h("p", { class: "faint" }, `${unforeseen} more may come; with several types of GPU some plans are made later`));
      if (unforeseen && rows.length !== this.rows) this.epoch = -1; // more are being made
      this.rows = rows.length;
    } catch { this.epoch = -1; /* not made yet: with the next view again */ }
  }

  async ask() {
    const lose = this.lose.value.split(/[\s,]+/).filter(Boolean), add = Number(this.add.value);
    show(this.answer, "planning");
    try {
      const { now, then, waf_now: wafs, unit } = await this.source.ask("v1/plan/whatif", { lose, add_nodes: add });
      const workers = (plan) => Object.fromEntries(Object.entries(plan.assignments ?? {}).map(([name, one]) => [name, one.workers]));
      const had = workers(now), would = workers(then), view = this.source.view;
      show(this.answer, h("div", { class: "panel" }, h("p", {}, h("b", {}, `WAF ${worth(view, Object.values(wafs).reduce((sum, waf) => sum + waf, 0), unit)} → ${worth(view, then.waf ?? 0, unit)}`), `; the change would cost ${si(then.transition_flop ?? 0, "FLOP")}`),
        table(["task", "#workers", "#would have"], Object.entries(would).map(([name, count]) => [name, had[name] ?? 0, h("b", { class: (had[name] ?? 0) === count ? "" : "warn" }, count)])), h("p", {}, then.reason)));
    } catch (error) { show(this.answer, h("p", { class: "bad" }, error.message)); }
  }
}
