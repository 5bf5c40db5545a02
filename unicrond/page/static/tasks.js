// Tasks: how fast, how far, on how many workers; with the course of loss, step time and workers as far as entries are here.

import { STATUS, colourOf, h, peak, peakField, percent, show, si, span, svg, table, worth } from "./dom.js";
import { taskButtons } from "./acting.js";

const POINTS = 300;

export class Tasks {
  constructor(source) {
    this.source = source;
    this.body = h("div", {});
    const again = () => { this.drawn = -1; if (this.view) this.draw(this.view); };
    this.element = h("section", {}, h("h2", {}, "Tasks"), this.body, h("form", { onsubmit: (event) => event.preventDefault() }, peakField(again)));
    this.courses = new Map();
    this.upTo = 0;
  }

  draw(view) {
    this.view = view;
    if (this.drawn === view.seq && this.source.replay) return;
    this.drawn = view.seq;
    this.follow();
    const types = view.tasks.some((task) => task.gpu !== undefined); // nodes have several types of GPU
    show(this.body, view.tasks.length ? table(
      ["task", "status", "workers", "#iteration", "#loss", "#step", "#tokens/s", "#FLOP/s", "#MFU", "#WAF", "#ETA", "layout", ...(types ? ["GPU"] : [])],
      view.tasks.map((task, at) => [
        h("span", {}, h("i", { class: "box", style: { background: colourOf(at) } }), h("a", { href: `#ranks/${encodeURIComponent(task.name)}` }, task.name)),
        h("span", { class: STATUS[task.status] }, task.status, task.status === "active" && !task.whole && h("span", { class: "warn" }, task.workers ? " (regrouping)" : " (no workers)")),
        `${task.workers} of ${task.min_workers}..${task.max_workers}`, `${task.iteration} / ${task.iterations} (${percent(task.iteration / task.iterations, 1)})`,
        task.loss === null ? "-" : task.loss.toFixed(4), task.step_us ? span(task.step_us) : "-", si(task.tokens_per_s), si(task.flops, "FLOP/s"), task.flops && peak() ? percent(task.flops / task.workers / (peak() * 1e12), 1) : "-", worth(view, task.waf),
        task.eta_us === null ? "-" : span(task.eta_us), `${task.layout}, replicas ${task.workers / task.replica_workers}`, ...(types ? [task.gpu || "-"] : [])])) : h("p", {}, "No task yet: unicronctl submit examples/big.yaml"),
    view.tasks.map((task, at) => this.course(task, at)));
  }

  entries() { if (this.source.replay && this.view) { this.drawn = -1; this.draw(this.view); } }

  /** Take the entries that have come since; all of them again where a replay has moved. */
  follow() {
    const { entries } = this.source;
    if (this.source.replay) { this.courses.clear(); this.upTo = 0; }
    for (let at = entries.findLastIndex((entry) => entry.seq <= this.upTo) + 1; at < entries.length; at++) this.take(entries[at]);
    this.upTo = entries.at(-1)?.seq ?? this.upTo;
  }

  take(entry) {
    const event = entry.envelope?.event;
    if (event?.type !== "StepCommitted") return;
    const course = this.courses.get(event.task) ?? [];
    course.push({ us: entry.recorded_at_us, iteration: event.last, loss: event.loss, step: event.duration_us / Math.max(1, event.last - event.first + 1), replicas: event.micro_batches_by_rank?.length ?? 0 });
    if (course.length > POINTS) course.shift();
    this.courses.set(event.task, course);
  }

  course(task, at) {
    const points = this.courses.get(task.name) ?? [];
    return h("div", { class: "panel" }, h("h3", {}, task.name), task.reason && h("p", {}, task.reason),
      points.length > 1 ? h("div", { class: "cards" }, [["loss", (point) => point.loss, (value) => value.toFixed(3)], ["step time", (point) => point.step, span], ["workers", (point) => point.replicas * task.replica_workers, String]].map(
        ([name, value, text]) => spark(name, points.map((point) => [point.us, value(point)]).filter(([, y]) => y !== null), text, colourOf(at)))) : h("p", { class: "faint" }, "no steps among the entries here"),
      h("p", { class: "faint" }, `weight ${task.weight}, generation ${task.generation}, newest checkpoint after iteration ${task.checkpoint}${task.stragglers ? `, ${task.stragglers} stragglers` : ""}`),
      task.healing && h("p", { class: "faint" }, `healing is ${task.healing}`),
      taskButtons(this.source, task));
  }
}

/** A line over time, with its least, greatest and last value. */
export function spark(name, points, text, colour) {
  const width = 260, height = 60, [from, to] = [points[0]?.[0] ?? 0, points.at(-1)?.[0] ?? 1];
  const values = points.map(([, y]) => y), low = Math.min(...values), high = Math.max(...values);
  const x = (us) => ((us - from) / Math.max(1, to - from)) * width, y = (value) => (high > low ? height - 3 - ((value - low) / (high - low)) * (height - 6) : height / 2);
  const path = points.map(([us, value], number) => `${number ? "L" : "M"}${x(us).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${name} from ${text(low)} to ${text(high)}` },
    svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.5 }));
  return h("div", {}, h("div", { class: "faint" }, `${name}: ${text(values.at(-1))} (${text(low)} to ${text(high)})`), drawing);
}
