// Line charts as SVG: a few series over the last minutes.

import { fill, h, s } from "./dom.js";
import { duration } from "./format.js";

const HEIGHT = 150;
const LEFT = 44;
const BOTTOM = 20;
const PAUSE = 5000; // milliseconds without a sample that are a gap
const SPANS = [60000, 120000, 240000, 480000]; // milliseconds that a chart shows, as it has data

/** A chart of series `{label, key, value(row), format}` over rows `[at, ...]`. */
export class Chart {
  constructor(label, series, format) {
    this.series = series;
    this.format = format;
    this.legend = h("ul", { class: "legend" }, series.map((one) => h("li", { class: `key-${one.key}` }, one.label, h("b", {}, "–"))));
    this.svg = s("svg", { class: "chart", role: "img", "aria-label": label });
    this.label = label;
    this.element = h("div", {}, this.legend, this.svg);
  }

  update(rows, at) {
    const width = this.svg.clientWidth || 600;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const span = SPANS.find((one) => rows.length && rows[0][0] > at - one) ?? SPANS.at(-1);
    const shown = rows.filter((row) => row[0] > at - span);
    const values = shown.flatMap((row) => this.series.map((one) => one.value(row)).filter((value) => value !== null && value !== undefined));
    const most = nice(Math.max(this.least ?? 0, ...values));
    const x = (time) => LEFT + (width - LEFT) * (1 - (at - time) / span);
    const y = (value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - value / most);
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width, y1: y(part * most), y2: y(part * most) }));
      parts.push(s("text", { class: "axis-text", x: LEFT - 8, y: y(part * most) + 4, "text-anchor": "end" }, this.format(part * most).replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "")));
    }
    for (const part of [1, 0.5, 0]) {
      const [place, anchor] = part === 1 ? [LEFT, "start"] : part ? [x(at - part * span), "middle"] : [width, "end"];
      parts.push(s("text", { class: "axis-text", x: place, y: HEIGHT - 4, "text-anchor": anchor }, part ? `−${duration(part * span / 1000)}` : "now"));
    }
    this.series.forEach((one, index) => {
      const path = line(shown, one.value, x, y);
      if (index === 0 && path) parts.push(s("path", { class: `area fill-${one.key}`, d: area(shown, one.value, x, y, HEIGHT - BOTTOM) }));
      parts.push(s("path", { class: `stroke-${one.key}`, d: path }));
      const last = shown.length ? one.value(shown.at(-1)) : null;
      this.legend.children[index].lastChild.textContent = this.format(last);
    });
    fill(this.svg, parts);
    const said = this.series.map((one, index) => `${one.label} ${this.legend.children[index].lastChild.textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}: ${said}`);
  }
}

/** The next number of 1, 2, 5 × 10^n. */
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * unit >= value) * unit;
}

function line(rows, value, x, y) {
  let path = "";
  let gap = true;
  let before = 0;
  for (const row of rows) {
    const found = value(row);
    if (found === null || found === undefined) { gap = true; continue; }
    path += `${gap || row[0] - before > PAUSE ? "M" : "L"}${x(row[0]).toFixed(1)} ${y(found).toFixed(1)}`;
    gap = false;
    before = row[0];
  }
  return path;
}

/** The area below a line: a part for each stretch without a pause. */
function area(rows, value, x, y, floor) {
  return line(rows, value, x, y).split("M").filter(Boolean).map((part) => {
    const places = part.split("L");
    const [first, last] = [places[0], places.at(-1)].map((place) => place.split(" ")[0]);
    return `M${first} ${floor}L${places.join("L")}L${last} ${floor}Z`;
  }).join("");
}
