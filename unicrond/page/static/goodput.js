// The waterfall from the failure-free work down to the delivered, by cause; the tasks' figures; suspect nodes.

import { h, moment, peak, peakField, percent, show, si, span, table } from "./dom.js";

const COLOUR = { goodput: "#009e73", detection: "#cc79a7", transition: "#d55e00", repeated: "#8c6bb1", "sub-health": "#e69f00", free: "#0072b2" };

const SPANS = [["since the log began", 0], ["in the last hour", 3600], ["in the last 24 hours", 86400], ["in the last 7 days", 604800]];

export class Goodput {
  constructor(source) {
    this.source = source;
    const again = () => { this.seq = -1; this.asked = -9e9; if (this.source.view) this.draw(this.source.view); };
    this.span = h("select", { "aria-label": "interval", onchange: again }, SPANS.map(([text, seconds]) => h("option", { value: seconds }, text)));
    this.body = h("div", {}, "asking");
    this.element = h("section", {}, h("h2", {}, "Goodput"), h("form", { onsubmit: (event) => event.preventDefault() }, this.span, peakField(again)), this.body);
  }

  async draw(view) {
    const now = performance.now();
    if (this.asking || this.seq === view.seq || (!this.source.replay && now - (this.asked ?? -9e9) < 3000)) return;
    this.asking = true;
    this.asked = now;
    const about = `${this.span.value}/${peak()}`;
    try {
      this.paint(await this.source.ask(`v1/goodput?last_s=${this.span.value}&peak_tflops=${Math.round(peak())}`));
    } catch (error) { show(this.body, error.message); }
    this.seq = view.seq;
    this.asking = false;
    const moved = this.source.replay && this.source.view.seq !== this.seq;
    if (moved || about !== `${this.span.value}/${peak()}`) { this.seq = -1; this.asked = -9e9; this.draw(this.source.view); }
  }

  paint(told) {
    const { cluster } = told;
    show(this.body, h("p", { class: "faint" }, told.from_us ? `${moment(told.from_us)} to ${moment(told.until_us)}` : ""),
      cluster.failure_free_flop ? waterfall(cluster) : h("p", {}, "No plan in this interval: there is nothing to measure against."),
      told.tasks.length > 0 && [h("h2", {}, "Tasks"), table(["task", "#goodput", "#ETTR", "#MFU", "#FLOP/s per worker", "#highest step", "#interruptions", "#mean between", "#iterations lost", "#repeated"], told.tasks.map((task) => [
        task.task, percent(task.goodput), percent(task.ettr), percent(task.mfu), si(task.flops_per_worker, "FLOP/s"), task.highest_step, task.interruptions, task.mtti_us === null ? "-" : span(task.mtti_us),
        task.iterations_lost ? `${task.iterations_lost} (${span(task.lost_work_us)})` : 0, task.micro_batches_repeated]))],
      told.tasks.map((task) => h("div", { class: "panel" }, h("h3", {}, `Where the time of ${task.task} went`), bars(Object.entries(task.times_us).map(([what, us]) => [what, us, `${span(us)}, ${percent(us / task.wall_us, 1)}`]), task.wall_us))),
      h("h2", {}, "Suspect nodes"), told.lemons.length ? table(["node", "#score", "verdict", "signals"], told.lemons.slice(0, 20).map((one) => [
        one.node, one.score, one.is_lemon ? h("b", { class: "bad" }, "lemon") : "-", h("td", { class: "wide" }, one.reason)])) : h("p", {}, "None."),
      told.lemons.length > 20 && h("p", { class: "faint" }, `and ${told.lemons.length - 20} more`),
      h("p", { class: "faint" }, "A score is a suggestion; nothing is done by itself."));
  }
}

function waterfall({ failure_free_flop: free, goodput_flop: good, goodput, badput }) {
  let left = 1;
  const rows = badput.map(({ group, cause, flop, share }) => {
    const from = share >= 0 ? left - share : left;
    left -= share;
    return row(`${group}: ${cause}`, from, Math.abs(share), COLOUR[group], `${si(flop, "FLOP")}, ${percent(share)}`);
  });
  return h("div", { class: "fall", role: "list", id: "waterfall" }, row("failure-free", 0, 1, COLOUR.free, si(free, "FLOP")), rows, row("goodput", 0, goodput, COLOUR.goodput, `${si(good, "FLOP")}, ${percent(goodput)}`));
}

function row(name, from, share, colour, text) {
  const part = h("i", { style: { left: `${100 * Math.max(0, from)}%`, width: `${100 * Math.min(1, share)}%`, background: colour } });
  return [h("span", { role: "listitem" }, name), h("div", { class: "bar", title: text }, part), h("span", {}, text)];
}

function bars(parts, of) {
  const colour = (what) => COLOUR[what.split(":")[0]] ?? { productive: COLOUR.goodput, repeating: COLOUR.repeated }[what] ?? COLOUR["sub-health"];
  return h("div", { class: "fall" }, parts.map(([what, us, text]) => row(what, 0, us / of, colour(what), text)));
}
