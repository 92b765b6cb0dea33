// The overview: figures, rings, due times, rates, services, nodes and shards, live.

import { Chart } from "./charts.js";
import { encodeQuery, session } from "./api.js";
import { card, empty, fill, h, name, pill, setForeign, setText } from "./dom.js";
import { count, duration, plural, rate } from "./format.js";
import { live, watch } from "./live.js";
import { Rings } from "./rings.js";
import { ShardMap } from "./nodes.js";

const SPANS = { minute: "Next minute", hour: "Next hour", day: "Next day", week: "Next week" };
const ENDS = { minute: "60 s", hour: "60 min", day: "24 h", week: "7 d" };
const COUNTED = 100000; // tasks that a store counts one by one

export function overview(page, { signal, go }) {
  const one = session.known.confined || session.namespace !== null; // it sees no totals of other namespaces
  const tiles = new Tiles(one);
  const rings = new Rings();
  const heat = new Heat(go);
  const rates = new Chart("Rates", [
    { label: "submitted", key: "accent", value: (row) => row[1] },
    { label: "fired", key: "pointer", value: (row) => row[2] },
    { label: "finished", key: "finished", value: (row) => row[3] },
    { label: "failed or retried", key: "failed", value: (row) => (row[4] === null ? null : row[4] + row[5]) },
  ], (value) => (value === null || value === undefined ? "–" : `${rate(value)}/s`));
  const lateness = new Chart("Lateness", [
    { label: "p99", key: "pointer", value: (row) => row[7] },
    { label: "p50", key: "accent", value: (row) => row[6] },
  ], duration);
  lateness.least = 0.001;
  const services = new Services(go);
  const cluster = new ShardMap();
  const trouble = h("p", { class: "banner bad hidden", role: "alert" });
  const partial = h("p", { class: "banner hidden", role: "status" });
  const due = card("Due times", "tasks in the store", heat.element);
  fill(page, trouble, partial, tiles.element,
    one ? due : h("div", { class: "columns two" },
      card("The wheels", "of all namespaces", rings.element),
      h("div", { class: "stack" }, due, card("Rates", "of all nodes and namespaces", rates.element), card("Lateness", "of the last 10 s", lateness.element))),
    h("section", { class: "card flush" }, h("div", { class: "card-head" }, h("h2", {}, "Services")), services.element),
    card("Nodes and shards", null, cluster.element));
  rings.start(signal);

  watch(signal, "store", (found) => tiles.updateStore(found));
  watch(signal, "wheel", (found) => rings.update(found.levels));
  watch(signal, "due", (found) => heat.update(found));
  watch(signal, "cluster", (found) => cluster.update(found, live.last.figures?.stats));
  watch(signal, "trouble", (found) => {
    trouble.classList.remove("hidden");
    setText(trouble, `There are no figures now: ${found.detail}`);
  });
  watch(signal, "figures", (found) => {
    trouble.classList.add("hidden");
    const { stats } = found;
    const silent = stats.by_node.filter((node) => node.error !== null && node.error !== undefined);
    partial.classList.toggle("hidden", !silent.length);
    setForeign(partial, `Figures of ${stats.by_node.length - silent.length} of ${plural(stats.by_node.length, "node")}: ${silent.map((node) => `${node.name}: ${node.error}`).join("; ")}`);
    tiles.update(found);
    if (!one) {
      const { rows } = live.last.history;
      rings.setRate(found.rates.sent, stats.held);
      rings.update(stats.wheel);
      rates.update(rows, found.at);
      lateness.update(rows, found.at);
    }
    services.update(stats.services, found.at);
  });
}

/** A count of the store's tasks: it may end at a bound, and beyond it is an estimate. */
const estimate = (n) => (n > COUNTED ? `≈ ${count(n)}` : n === COUNTED ? `${count(n)}+` : count(n));

class Tiles {
  constructor(one) {
    this.one = one; // whether the figures are those of one namespace
    this.parts = {};
    const tile = (key, label, sub) => {
      const value = h("span", { class: "value" }, "–");
      const note = h("span", { class: "sub" }, sub);
      this.parts[key] = { value, note, tile: h("div", { class: "figure" }, h("span", { class: "label" }, label), value, note) };
      return this.parts[key].tile;
    };
    const waiting = tile("waiting", "Waiting", "for a permit");
    const running = tile("running", "Running", "calls under way");
    this.element = h("section", { class: "figures", "aria-label": one ? "Figures" : "Figures of all namespaces" },
      one ? [tile("submitted", "Submitted", "tasks stored"), waiting, running] : [
        tile("live", "Live tasks", "in the store"), tile("memory", "On the wheel", "due within a minute"), waiting, running,
        tile("sent", "Fired", "attempts begun"), tile("late", "Lateness p99", "of the last 10 s"), tile("failed", "Failing", "failed or retried")]);
  }

  set(key, text, unit = "", tone = null, sub = null) {
    const { value, note, tile } = this.parts[key];
    if (value.dataset.text !== text + unit) {
      value.dataset.text = text + unit;
      fill(value, text, unit && h("span", { class: "unit" }, unit));
    }
    if (tone) tile.dataset.tone = tone;
    else delete tile.dataset.tone;
    if (sub !== null) setText(note, sub);
  }

  updateStore(store) {
    this.set("live", store ? estimate(store.live) : "–", "", null, store ? `${estimate(store.final)} ended` : "the store does not answer");
  }

  update({ stats, rates: r, lateness }) {
    this.set("waiting", count(stats.waiting), "", stats.waiting > 0 ? "warn" : null);
    this.set("running", count(stats.running));
    if (this.one) {
      this.set("submitted", rate(r.submitted), "/s", null, `${count(stats.submitted)} since the start`);
      return;
    }
    this.set("memory", count(Math.max(0, stats.held - stats.waiting)));
    this.set("sent", rate(r.sent), "/s", null, `${count(stats.sent)} in all`);
    this.set("late", duration(lateness.p99), "", lateness.p99 > 1 ? "warn" : null, `p50 ${duration(lateness.p50)}`);
    const failing = r.fail === undefined ? null : r.fail + r.retry;
    this.set("failed", rate(failing), "/s", failing > 0 ? "bad" : null, `${count(stats.ended.fail ?? 0)} failed for good`);
  }
}

/** Strips of cells; a colour is a count on a logarithmic scale, an estimate is marked. */
class Heat {
  constructor(go) {
    this.go = go;
    this.rows = {};
    this.element = h("div", { class: "heat" }, Object.entries(SPANS).map(([span, label]) => this.#row(span, label)));
  }

  #row(span, label) {
    const strip = h("div", { class: "heat-strip", role: "group", "aria-label": label });
    const total = h("span", { class: "total" }, "–");
    const middle = h("span");
    strip.addEventListener("click", (event) => event.target.dataset.link && this.go(event.target.dataset.link));
    strip.addEventListener("keydown", (event) => this.#press(strip, event));
    this.rows[span] = { strip, total, middle, label };
    return h("div", { class: "heat-row" }, h("span", { class: "soft" }, label), strip, total,
      h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, "now"), middle, h("span", {}, ENDS[span])));
  }

  /** One cell of a strip can be reached with Tab, the others with the arrow keys. */
  #press(strip, event) {
    const cells = [...strip.querySelectorAll("[data-link]")];
    const here = cells.indexOf(event.target);
    if (event.key === "Enter") this.go(event.target.dataset.link);
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (!cells[next]) return;
    event.target.tabIndex = -1;
    cells[next].tabIndex = 0;
    cells[next].focus();
  }

  #link(cell, link, label) {
    cell.title = label;
    if (!link) {
      for (const name of ["data-link", "role", "tabindex", "aria-label"]) cell.removeAttribute(name);
      return;
    }
    cell.dataset.link = link;
    cell.setAttribute("role", "link");
    cell.setAttribute("aria-label", label);
    if (!cell.hasAttribute("tabindex")) cell.tabIndex = -1;
  }

  update(spans) {
    for (const found of spans) {
      const { strip, total, label } = this.rows[found.span];
      const start = Date.parse(found.start);
      const most = Math.max(1, ...found.counts);
      const guessed = new Set(found.estimated);
      while (strip.children.length < found.counts.length) strip.append(h("span"));
      found.counts.forEach((tasks, index) => {
        const cell = strip.children[index];
        const from = new Date(start + index * found.step * 1000);
        const to = new Date(+from + found.step * 1000);
        const part = tasks ? 0.18 + 0.82 * Math.log(tasks + 1) / Math.log(most + 1) : 0;
        cell.style.background = tasks ? `color-mix(in srgb, var(--heat-1) ${Math.round(part * 100)}%, var(--heat-0))` : "";
        const label = `${guessed.has(index) ? "about " : ""}${plural(tasks, "task")} due from ${from.toLocaleTimeString()} to ${to.toLocaleTimeString()}`;
        this.#link(cell, tasks && `tasks${encodeQuery({ state: "delay", due_after: from.toISOString(), due_before: to.toISOString() })}`, label);
      });
      if (!strip.querySelector("[tabindex='0']")) strip.querySelector("[data-link]")?.setAttribute("tabindex", "0");
      const sum = found.counts.reduce((a, b) => a + b, 0);
      setText(total, (guessed.size ? "≈ " : "") + count(sum));
      const peak = found.counts.indexOf(Math.max(...found.counts));
      strip.setAttribute("aria-label", `${label}: ${guessed.size ? "about " : ""}${plural(sum, "task")} due${sum ? `, most at ${new Date(start + peak * found.step * 1000).toLocaleTimeString()}` : ""}`);
    }
  }
}

/** The services with breaker, permits, queue, rate and latency. */
class Services {
  constructor() {
    this.body = h("tbody");
    this.rows = new Map();
    this.before = null;
    this.table = h("table", { class: "cards" }, h("thead", {}, h("tr", {}, ["Service", "Breaker", "Permits in use", "Waiting", "Calls", "Latency p50", "p99"].map((text, index) => h("th", { scope: "col", class: index > 2 ? "right" : null }, text)))), this.body);
    this.element = h("div", {}, h("div", { class: "table-wrap" }, this.table));
    this.none = empty("No services", "A service is created with tickwheel services put, or on the page Services.");
  }

  update(services, at) {
    const names = Object.keys(services);
    if (!names.length) { fill(this.element, this.none); return; }
    if (!this.table.isConnected) fill(this.element, h("div", { class: "table-wrap" }, this.table));
    for (const key of [...this.rows.keys()]) {
      if (!(key in services)) { this.rows.get(key).row.remove(); this.rows.delete(key); }
    }
    for (const key of names) this.#row(key).update(services[key], this.before?.services[key], (at - this.before?.at) / 1000);
    this.before = { services, at };
  }

  #row(key) {
    let found = this.rows.get(key);
    if (found) return found;
    const cells = [h("td", { class: "right", "data-label": "waiting" }), h("td", { class: "right", "data-label": "calls" }), h("td", { class: "right", "data-label": "p50" }), h("td", { class: "right", "data-label": "p99" })];
    const breaker = h("td", { class: "end" }, pill("closed"));
    const bar = h("span", { class: "fill" });
    const permits = h("span", { class: "nowrap" });
    const row = h("tr", {}, h("td", {}, h("a", { href: `services/${encodeURIComponent(key)}` }, name(key, 60))), breaker,
      h("td", { class: "wide" }, h("span", { class: "meter" }, h("span", { class: "track" }, bar), permits)), cells);
    found = {
      row,
      update(service, before, seconds) {
        const state = service.enabled ? service.breaker : "off";
        if (breaker.dataset.state !== state) { breaker.dataset.state = state; fill(breaker, pill(state.replace("_", "-"), { off: "paused", half_open: "half-open" }[state] ?? state)); }
        bar.style.width = `${Math.min(100, 100 * service.running / Math.max(1, service.limit))}%`;
        setText(permits, `${count(service.running)} of ${count(service.limit)}`);
        const calls = before && seconds > 0 ? Math.max(0, service.latency.count - before.latency.count) / seconds : null;
        [count(service.waiting), calls === null ? "–" : `${rate(calls)}/s`, duration(service.latency.p50), duration(service.latency.p99)].forEach((text, index) => setText(cells[index], text));
      },
    };
    this.rows.set(key, found);
    const after = [...this.body.children].find((one) => one.dataset.name > key);
    row.dataset.name = key;
    this.body.insertBefore(row, after ?? null);
    return found;
  }
}
