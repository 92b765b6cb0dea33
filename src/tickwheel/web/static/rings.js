// The wheels as concentric rings: the finest level inside, and what is due falls inward.
//
// Each slot shows its load, each pointer turns with the server's clock. Between two snapshots a
// slot that the pointer has reached loses its entries to the next finer ring: that is the cascade.

import { h } from "./dom.js";
import { count, now } from "./format.js";

const TURN = 2 * Math.PI;
const TOP = -Math.PI / 2;
const GAP = 0.16; // of a slot
const FLIGHT = 650; // milliseconds that an entry takes from ring to ring
const MOST_FLYING = 160;

/** Read the colours and the font of the theme, which a canvas cannot name. */
function palette(element) {
  const probe = h("i");
  element.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(
    ["text", "soft", "faint", "line", "heat-0", "heat-1", "pointer", "accent", "finished", "surface"].map((name) => [name, read(name)]),
  );
  found.font = getComputedStyle(probe).fontFamily;
  probe.remove();
  return found;
}

/** Rings on a canvas, with a list of the levels below it. */
export class Rings {
  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "The wheels" });
    this.legend = h("ul", { class: "ring-legend" });
    this.element = h("div", { class: "rings" }, this.canvas, this.legend);
    this.levels = [];
    this.flying = [];
    this.pulse = 0;
    this.rate = 0;
    this.held = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.colours = null;
    this.slots = document.createElement("canvas"); // they change with a snapshot, not with a frame
    this.stale = true;
  }

  /** Draw until the signal aborts. */
  start(signal) {
    const recolour = () => { this.colours = null; this.stale = true; this.draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour, { signal });
    addEventListener("theme", recolour, { signal });
    addEventListener("resize", () => this.draw(), { signal });
    let last = 0;
    const frame = (at) => {
      if (signal.aborted) return;
      if (at - last >= 30 && !this.still.matches) { // half of the frames: it costs half as much
        this.step(at - last);
        last = at;
        this.draw();
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** Take the fires per second, for the hub. */
  setRate(sent, held) {
    this.rate = sent ?? 0;
    this.held = held;
  }

  /** Take a snapshot of the levels, and let entries fly where they have moved. */
  update(levels) {
    for (const level of levels) {
      const before = this.levels.find((one) => one.tick === level.tick && one.size === level.size);
      if (before) this.#compare(level, before);
    }
    this.levels = levels;
    this.stale = true;
    this.#describe();
    if (this.still.matches) this.draw();
  }

  #compare(level, before) {
    if (level.level === 1) return; // it turns many times between two snapshots
    for (let slot = 0; slot < level.size; slot++) {
      const change = level.counts[slot] - before.counts[slot];
      if (change < 0) this.#launch(level.level - 1, level.level - 2, slot / level.size, -change);
      else if (change > 0 && level.level === this.levels.length) this.#launch(level.level, level.level - 1, slot / level.size, change);
    }
  }

  #launch(from, to, part, entries) {
    const number = Math.min(14, Math.ceil(Math.log2(entries + 1) * 2));
    for (let n = 0; n < number && this.flying.length < MOST_FLYING; n++) {
      this.flying.push({ from, to, angle: TOP + TURN * (part + 0.5 / 64), swirl: (Math.random() - 0.5) * 0.5, age: -Math.random() * 350 });
    }
  }

  step(passed) {
    const fired = Math.min(40, this.rate) * passed / 1000;
    const whole = Math.floor(fired + Math.random());
    for (let n = 0; n < whole && this.flying.length < MOST_FLYING; n++) {
      const angle = TOP + TURN * Math.random();
      this.flying.push({ from: 0, to: -1, angle, swirl: (Math.random() - 0.5) * 0.3, age: 0 });
    }
    for (const one of this.flying) one.age += passed;
    const landed = this.flying.filter((one) => one.age >= FLIGHT && one.to < 0).length;
    if (landed) this.pulse = Math.min(1, this.pulse + 0.15 * landed);
    this.flying = this.flying.filter((one) => one.age < FLIGHT);
    this.pulse *= Math.exp(-passed / 260);
  }

  draw() {
    const size = this.canvas.clientWidth;
    if (!size) return;
    const ratio = Math.min(2, devicePixelRatio || 1);
    const pixels = Math.round(size * ratio);
    if (this.canvas.width !== pixels) {
      for (const one of [this.canvas, this.slots]) one.width = one.height = pixels;
      this.stale = true;
    }
    this.colours ??= palette(this.element);
    const begin = (canvas) => {
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, size, size);
      return context;
    };
    if (this.stale) {
      const context = begin(this.slots);
      context.translate(size / 2, size / 2);
      const most = Math.max(8, ...this.levels.flatMap((level) => level.counts));
      this.levels.forEach((level, index) => this.#slots(context, size, level, index, most));
      this.stale = false;
    }
    const context = begin(this.canvas);
    context.drawImage(this.slots, 0, 0, size, size);
    context.translate(size / 2, size / 2);
    const time = now();
    this.levels.forEach((level, index) => this.#pointer(context, size, level, index, time));
    this.#fly(context, size);
    this.#hub(context, size);
  }

  /** The inner and outer radius of a ring; -1 is the hub, one too many is the outside. */
  radii(index, size) {
    const number = Math.max(3, this.levels.length);
    const half = size / 2;
    if (index < 0) return [0, half * 0.1];
    const from = half * 0.3;
    const width = (half * 0.985 - from) / number;
    return [from + index * width, from + (index + 0.82) * width];
  }

  #slots(context, size, level, index, most) {
    const [inner, outer] = this.radii(index, size);
    const slot = TURN / level.size;
    for (let n = 0; n < level.size; n++) {
      const start = TOP + (n + GAP / 2) * slot;
      const end = TOP + (n + 1 - GAP / 2) * slot;
      sector(context, inner, outer, start, end, this.colours["heat-0"], 1);
      const load = level.counts[n];
      if (load) {
        const part = Math.log(load + 1) / Math.log(most + 1);
        sector(context, inner, inner + (outer - inner) * (0.24 + 0.76 * part), start, end, this.colours["heat-1"], 0.35 + 0.65 * part);
      }
    }
  }

  #pointer(context, size, level, index, time) {
    const [inner, outer] = this.radii(index, size);
    const slot = TURN / level.size;
    const here = ((time / level.tick) % level.size + level.size) % level.size;
    if (level.tick * level.size < 1000) { // its pointer is too fast to follow: the whole ring glows as tasks fire
      sector(context, inner, outer, 0, TURN - 0.001, this.colours.pointer, 0.06 + 0.12 * this.pulse);
      return;
    }
    for (let back = 7; back >= 1; back--) { // the trail
      const n = Math.floor(here) - back;
      sector(context, inner, outer, TOP + (n + GAP / 2) * slot, TOP + (n + 1 - GAP / 2) * slot, this.colours.pointer, 0.26 * (1 - back / 8));
    }
    const angle = TOP + here * slot;
    context.save();
    context.rotate(angle);
    context.strokeStyle = this.colours.pointer;
    context.lineWidth = 2.5;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(inner - 3, 0);
    context.lineTo(outer + 3, 0);
    context.stroke();
    context.restore();
  }

  #fly(context, size) {
    for (const one of this.flying) {
      if (one.age < 0) continue;
      const part = one.age / FLIGHT;
      const eased = part * part * (3 - 2 * part);
      const middle = (index) => this.radii(index, size).reduce((a, b) => a + b) / 2;
      const dot = size / 190;
      const start = one.from >= this.levels.length ? size / 2 - dot : middle(one.from);
      const radius = start + (middle(one.to) - start) * eased;
      const angle = one.angle + one.swirl * eased;
      context.globalAlpha = one.to < 0 ? 1 - part * 0.6 : 1 - Math.abs(part - 0.5);
      context.fillStyle = this.colours.pointer;
      context.beginPath();
      context.arc(Math.cos(angle) * radius, Math.sin(angle) * radius, dot, 0, TURN);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  #hub(context, size) {
    const radius = size / 2 * 0.245;
    const glow = context.createRadialGradient(0, 0, 0, 0, 0, radius * 1.1);
    glow.addColorStop(0, fade(this.colours.pointer, 0.1 + 0.35 * this.pulse));
    glow.addColorStop(1, fade(this.colours.pointer, 0));
    context.fillStyle = glow;
    context.beginPath();
    context.arc(0, 0, radius * 1.1, 0, TURN);
    context.fill();
    context.textAlign = "center";
    context.textBaseline = "middle";
    const { font } = this.colours;
    context.fillStyle = this.colours.text;
    context.font = `650 ${Math.round(size / 15)}px ${font}`;
    context.fillText(count(this.held), 0, -size / 70);
    context.fillStyle = this.colours.faint;
    context.font = `500 ${Math.max(10, Math.round(size / 42))}px ${font}`;
    context.fillText("in memory", 0, size / 24);
  }

  /** Say in words and numbers what the rings show. */
  #describe() {
    const items = this.levels.map((level) => [level.counts.reduce((a, b) => a + b, 0), level]);
    if (this.legend.children.length !== items.length) {
      this.legend.replaceChildren(...items.map(() => h("li", {}, h("b"), h("span"), h("span"))));
    }
    items.forEach(([total, level], index) => {
      const [value, place, slots] = this.legend.children[index].children;
      value.textContent = count(total);
      place.textContent = `level ${level.level}`;
      slots.textContent = `${level.size} × ${level.tick < 1000 ? `${level.tick} ms` : `${(level.tick / 1000).toFixed(1)} s`}`;
    });
    const said = items.map(([total, level]) => `level ${level.level}: ${total} entries`).join(", ");
    this.canvas.setAttribute("aria-label", `The wheels as rings; ${said || "no levels"}`);
  }
}

function sector(context, inner, outer, start, end, fill, alpha) {
  context.globalAlpha = alpha;
  context.fillStyle = fill;
  context.beginPath();
  context.arc(0, 0, outer, start, end);
  context.arc(0, 0, inner, end, start, true);
  context.closePath();
  context.fill();
  context.globalAlpha = 1;
}

/** A colour of the palette with another alpha. */
function fade(colour, alpha) {
  const parts = colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  return `rgb(${parts.join(" ")} / ${alpha})`;
}
