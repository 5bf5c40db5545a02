// Elements, numbers and colours: what all views share.

/** An element: h("td", {class: "n", onclick: f}, "text", child...). Text is text: nothing is ever parsed as HTML. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Rows of cells; a header that begins with "#" is of numbers. `open(row)`: what a click or Enter on a row does. */
export function table(headers, rows, open) {
  const numeric = headers.map((name) => name.startsWith("#"));
  const head = h("tr", {}, headers.map((name, at) => h("th", { class: numeric[at] && "n" }, name.replace("#", ""))));
  const body = rows.map((row, number) => h("tr", open && {
    class: "click", tabindex: 0, onclick: () => open(number),
    onkeydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) open(number); },
  }, row.map((cell, at) => (cell instanceof HTMLTableCellElement ? cell : h("td", { class: numeric[at] && "n" }, cell)))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

export function card(name, value, kind) { return h("div", { class: "card" }, h("b", { class: kind }, value), h("span", { class: "faint" }, name)); }

export function si(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  for (const [prefix, size] of [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    const digits = Number((value / size).toPrecision(3)); // 999.9 M is 1 G
    if (Math.abs(digits) >= 1) return `${digits} ${prefix}${unit}`;
  }
  return `${Number(value.toPrecision(3))} ${unit}`.trim();
}

/** A WAF in the one unit of all the page: weighted workers until the throughput of any task is known. */
export function worth(view, waf, unit = view.waf_unit) {
  return unit === "FLOP/s" ? si(waf, unit) : `${Number((waf / view.linear_flops).toPrecision(3))} ${unit}`;
}

export const percent = (share, digits = 2) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(digits)} %`);

export function span(us) {
  if (us === null || us === undefined) return "-";
  const s = us / 1e6;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (s >= 2 * size) return `${(s / size).toFixed(1)} ${unit}`;
  if (us && s < 0.0005) return `${Math.round(us)} µs`;
  return s >= 0.9995 ? `${Number(s.toPrecision(3))} s` : `${Number((s * 1000).toPrecision(3))} ms`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("sv-SE", { year: "numeric", month: "2-digit", day: "2-digit" }); // 2026-11-23, whoever looks
export const clock = (us) => (us ? CLOCK.format(us / 1000) : "-");
/** Without milliseconds, which only short times need. */
export const moment = (us) => (us ? `${DAY.format(us / 1000)} ${CLOCK.format(us / 1000).slice(0, 8)}` : "-");

/** Okabe and Ito's palette: told apart by those who see fewer colours, on light and on dark. */
export const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b59f00", "#8c6bb1"];
export const colourOf = (task) => COLOURS[task % COLOURS.length];
export const SEVERITY = { SEV1: "#d55e00", SEV2: "#e69f00", SEV3: "#56b4e9" };
export const STATUS = { up: "good", active: "good", completed: "good", lost: "bad", failed: "bad", isolated: "warn", cordoned: "warn", drained: "warn", leaving: "warn" };

/** Dense peak TFLOP/s of one worker, for MFU: kept in this browser; 0: not known. */
export function peakField(changed) {
  const input = h("input", { type: "number", min: 0, max: 1000000, placeholder: "not set", "aria-label": "peak TFLOP/s of one worker", style: { width: "6.5rem" },
    value: peak() || "", onchange: () => { try { localStorage.setItem("peak", input.value); } catch { /* not kept */ } changed(); } });
  return h("label", { title: "Dense peak of one worker. Kept in this browser." }, "Peak ", input, " TFLOP/s per worker, for MFU");
}

export function peak() {
  try { return Math.max(0, Number(localStorage.getItem("peak")) || 0); } catch { return 0; }
}

const focusable = (element) => [...element.querySelectorAll("a, button, input, select, [tabindex]")];

/** Children in place of an element's own; the focus stays at its place. */
export function show(element, ...children) {
  const at = element.contains(document.activeElement) ? focusable(element).indexOf(document.activeElement) : -1;
  element.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  if (at >= 0) focusable(element)[at]?.focus({ preventScroll: true });
}

/** A 2D context at the screen's own resolution, `width` x `height` in CSS pixels. */
export function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const probe = document.body.appendChild(h("i", { hidden: true }));

/** A colour of the style sheet as a canvas understands it, in the scheme that is on. */
export function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
