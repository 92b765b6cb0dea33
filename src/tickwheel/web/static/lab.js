// The lab: a scene in the address, its state from the server, and controls that change the scene.
//
// The server plays every scene on the package's own structures. This script draws what it returns,
// and never computes where an entry goes.

import { card, empty, fill, h, icon, name, pill, s, toast } from "./dom.js";

const KINDS = [["wheel", "Hierarchical wheel"], ["simple", "Simple wheel"], ["rounds", "Wheel with rounds"],
  ["idle", "Idle connections"], ["purgatory", "Purgatory"]];
const SPEEDS = [1, 5, 20, 100, 500, 2000];
const CENTRE = 300;
const TURN = 2 * Math.PI;
const root = document.getElementById("main");
const views = {}; // the parts of the page that a new state changes

let scene = Object.fromEntries(new URLSearchParams(location.search));
let state = null;
let presets = [];
let playing = null; // the time at which a run began, and the scene's time then
let busy = false;

// -- the scene ---------------------------------------------------------------------------------

const at = () => Number(scene.at ?? 0);
const end = () => Math.max(20, ...(state?.moments ?? []), at());

/** Return the actions up to now: a new action rewrites what would have come later. */
function past() {
  const actions = scene.do ? scene.do.split(",") : [];
  return actions.filter((action) => Number(action.split(":")[0]) <= at());
}

/** Act at the scene's time. */
function act(...parts) {
  scene.do = [...past(), [at(), ...parts].join(":")].join(",");
  load();
}

async function load() {
  if (busy) {
    busy = "again";
    return;
  }
  busy = true;
  const query = readable(new URLSearchParams(Object.entries(scene).filter(([, value]) => value !== "")));
  try {
    const response = await fetch(`v1/lab/scene?${query}`);
    const answer = await response.json();
    if (!response.ok) throw new Error(response.status === 401 ? "sign in to the dashboard first" : answer.detail);
    state = answer;
    history.replaceState(null, "", `lab?${query}`);
    show();
  } catch (error) {
    stop();
    toast(error.message, true);
    if (!state) fill(views.stage, empty("This scene cannot be shown", error.message));
  } finally {
    const again = busy === "again";
    busy = false;
    if (again) load();
  }
}

/** A query keeps its colons and commas: a link can be read. */
const readable = (query) => query.toString().replaceAll("%3A", ":").replaceAll("%2C", ",");

function moveTo(time) {
  scene.at = String(Math.max(0, Math.round(time)));
  load();
}

/** Replace the scene, and rebuild the controls for its kind. */
function replaceScene(next) {
  stop();
  scene = { ...next };
  build();
  load();
}

// -- running -----------------------------------------------------------------------------------

function run() {
  if (playing) return stop();
  if (at() >= end()) scene.at = "0";
  playing = { began: performance.now(), from: at() };
  fill(views.run, "Pause");
  requestAnimationFrame(frame);
}

function stop() {
  playing = null;
  if (views.run) fill(views.run, "Run");
}

function frame(time) {
  if (!playing) return;
  const passed = Math.max(0, time - playing.began); // a frame's time may be before the click that began it
  const now = Math.floor(playing.from + (passed / 1000) * Number(views.speed.value));
  const last = end();
  if (now >= last) {
    stop();
    moveTo(last);
    return;
  }
  if (!busy && now !== at()) moveTo(now);
  requestAnimationFrame(frame);
}

function step(direction) {
  stop();
  if (!state) return;
  const moments = state.moments;
  const next = direction > 0 ? moments.find((one) => one > at()) : moments.findLast((one) => one < at());
  if (next !== undefined) moveTo(next);
}

// -- the page ----------------------------------------------------------------------------------

function build() {
  const stage = h("section", { class: "card" }, h("h1", { class: "visually-hidden" }, "Lab"),
    (views.about = h("p", { class: "about" })), (views.stage = h("div")), (views.levels = h("ul", { class: "ring-legend" })), transport());
  const side = h("div", { class: "stack side" }, actionsCard(), (views.entries = h("div")), (views.figures = h("div")),
    card("What happened", null, (views.log = h("ol", { class: "log", tabindex: "0", "aria-label": "What happened" }))));
  fill(root, h("div", { class: "page" }, h("div", { class: "lab-grid" }, stage, side, presetsCard())));
}

function transport() {
  views.run = h("button", { class: "primary", onclick: run }, "Run");
  views.speed = h("select", { "aria-label": "Speed", onchange: () => playing && (playing = { began: performance.now(), from: at() }) },
    SPEEDS.map((speed) => h("option", { value: speed, selected: speed === 20 }, `${speed} per second`)));
  views.time = h("output", { "aria-label": "Time" });
  views.slider = h("input", { type: "range", min: 0, max: 20, step: 1, "aria-label": "Time of the scene",
    oninput: (event) => { stop(); moveTo(Number(event.target.value)); } });
  views.marks = h("div", { class: "time-marks", "aria-hidden": "true" });
  const button = (text, label, action) => h("button", { "aria-label": label, title: label, onclick: () => { stop(); action(); } }, text);
  return h("div", {},
    h("div", { class: "time-line" }, views.slider, views.marks),
    h("div", { class: "transport" }, button("|◀", "To the start", () => moveTo(0)), button("◀", "To the moment before", () => step(-1)),
      views.run, button("▶", "To the next moment", () => step(1)), button("+1", "One unit of time on", () => moveTo(at() + 1)),
      views.speed, views.time,
      h("button", { class: "quiet", onclick: copyLink }, "Copy link")));
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href); // a page over plain HTTP has no clipboard
    toast("The link is copied: it reproduces this scene.");
  } catch {
    toast("The browser does not let this page copy. The link is this page's address.", true);
  }
}

function presetsCard() {
  const groups = Map.groupBy ? Map.groupBy(presets, (one) => one.group) : grouped(presets);
  const examples = card("Worked examples", null, h("div", { class: "presets form-grid" }, [...groups].map(([title, members]) =>
    h("div", { class: "stack" }, h("h3", {}, title), members.map((preset) =>
      h("button", { "aria-pressed": String(isPreset(preset)), onclick: () => replaceScene(preset.scene) }, preset.title))))));
  examples.classList.add("examples");
  return examples;
}

function grouped(members) {
  const groups = new Map();
  for (const one of members) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}

const isPreset = (preset) => ["kind", "do", "size", "sizes"].every((key) => (preset.scene[key] ?? "") === (scene[key] ?? ""));

/** Fields of a form: label, name, value and the attributes of its input. */
function field(label, key, value, attributes = {}) {
  return h("label", { class: "field" }, label, h("input", { name: key, value, ...attributes }));
}

function form(label, fields, submit) {
  return h("form", { class: "row lab-form", onsubmit: (event) => {
    event.preventDefault();
    stop();
    submit(Object.fromEntries(new FormData(event.target)));
  } }, fields, h("button", { type: "submit" }, label));
}

function actionsCard() {
  const kind = scene.kind ?? "wheel";
  const choose = h("label", { class: "field" }, "Kind", h("select", { id: "kind", onchange: (event) => replaceScene({ kind: event.target.value }) },
    KINDS.map(([value, text]) => h("option", { value, selected: value === kind }, text))));
  const number = { type: "number", min: 0, required: true };
  const word = { pattern: "[A-Za-z0-9_\\-]{1,20}", required: true };
  if (kind === "idle") {
    return card("Scene", null, h("div", { class: "stack" }, choose,
      form("Packet", [field("User", "user", "dan", word)], ({ user }) => act("packet", user)),
      form("Apply", [field("Silent seconds", "timeout", scene.timeout ?? 30, number)], ({ timeout }) => change({ timeout }))));
  }
  if (kind === "purgatory") {
    return card("Scene", null, h("div", { class: "stack" }, choose,
      form("Wait", [field("Key", "key", "orders", word), field("Events", "needed", 2, number), field("Deadline", "timeout", 10, number)],
        ({ key, needed, timeout }) => act("wait", key, needed, timeout)),
      form("Event", [field("On key", "key", "orders", word)], ({ key }) => act("event", key))));
  }
  const shape = [field("Tick", "tick", scene.tick ?? 1, { ...number, min: 1 }),
    scene.sizes ? field("Sizes", "sizes", scene.sizes, { pattern: "[0-9]+(\\.[0-9]+)*", required: true, title: "such as 60.60.12" })
      : field("Size", "size", scene.size ?? 20, { ...number, min: 2, max: 64 })];
  return card("Scene", null, h("div", { class: "stack" }, choose,
    form("Add", [field("Delay", "delay", 42, number)], ({ delay }) => act("add", delay)),
    form("Apply", shape, change), kind === "wheel" && levelsForm()));
}

/** The choices that only the hierarchical wheel has. */
function levelsForm() {
  const select = (label, key, options) => h("label", { class: "field" }, label, h("select", { onchange: (event) => choices[key](event.target.value) },
    options.map(([value, text, chosen]) => h("option", { value, selected: chosen }, text))));
  const choices = {
    levels: (value) => change(value === "fixed" ? { size: "", sizes: "8.8.8" } : { size: "20", sizes: "", overflow: "" }),
    pointers: (value) => change({ pointers: value }),
    overflow: (value) => change({ overflow: value, ...(value && !scene.sizes ? { size: "", sizes: "8.8.8" } : {}) }),
  };
  return h("div", { class: "form-grid" },
    select("Levels", "levels", [["demand", "on demand", !scene.sizes], ["fixed", "fixed", Boolean(scene.sizes)]]),
    select("Pointers", "pointers", [["own", "each by itself", scene.pointers !== "pushed"], ["pushed", "pushed by the level below", scene.pointers === "pushed"]]),
    select("Overflow", "overflow", [["", "refused", !scene.overflow], ["memory", "kept in a buffer", Boolean(scene.overflow)]]));
}

function change(options) {
  const next = Object.fromEntries(Object.entries({ ...scene, ...options }).filter(([, value]) => value !== ""));
  replaceScene(next);
}

// -- showing a state ---------------------------------------------------------------------------

function show() {
  const kind = scene.kind ?? "wheel";
  fill(views.about, presets.find(isPreset)?.about ?? "");
  views.time.textContent = `t = ${state.now.toLocaleString("en")}`;
  views.slider.max = end();
  views.slider.value = state.now;
  views.slider.setAttribute("aria-valuetext", `${state.now} of ${end()}`);
  fill(views.marks, state.moments.map((moment) => mark(moment)));
  for (const button of root.querySelectorAll(".presets button")) {
    button.setAttribute("aria-pressed", String(isPreset(presets.find((one) => one.title === button.textContent))));
  }
  if (kind === "purgatory") showOperations();
  else showRings();
  showEntries(kind);
  fill(views.figures, figures(kind));
  fill(views.log, state.events.toReversed().map((event) => h("li", {}, h("span", { class: "when" }, event.at.toLocaleString("en")), event.what,
    h("span", {}, name(event.entry), event.level ? ` · level ${event.level}, slot ${event.slot}` : ""))));
}

function mark(moment) {
  const element = h("i", { class: moment <= state.now ? "past" : null });
  element.style.left = `${(100 * moment) / end()}%`;
  return element;
}

// The rings are built once for a shape; afterwards only classes and positions change, so that
// entries glide from slot to slot.

function showRings() {
  const shape = JSON.stringify([scene.kind, state.levels.map((level) => [level.tick, level.size]), Boolean(scene.overflow)]);
  if (views.shape !== shape || !views.stage.firstChild) {
    views.shape = shape;
    fill(views.stage, drawing());
  }
  state.levels.forEach((level, index) => turn(level, index));
  fill(views.levels, state.levels.map((level) => h("li", {}, h("b", {}, `Level ${level.level}`),
    h("span", {}, `tick ${level.tick.toLocaleString("en")}`), h("span", {}, `slot ${level.pointer} of ${level.size}`))));
  setHub();
  placeDots();
}

/** The inner and outer radius of a ring; the finest level is inside. */
function radii(index) {
  const number = state.levels.length;
  const from = number === 1 ? 170 : 88;
  const width = (292 - from) / number;
  return [from + index * width, from + (index + 0.86) * width];
}

const point = (radius, angle) => [CENTRE + radius * Math.sin(angle), CENTRE - radius * Math.cos(angle)];

function sector(inner, outer, from, to) {
  const [a, b, c, d] = [point(outer, from), point(outer, to), point(inner, to), point(inner, from)];
  const large = to - from > Math.PI ? 1 : 0;
  return `M${a} A${outer} ${outer} 0 ${large} 1 ${b} L${c} A${inner} ${inner} 0 ${large} 0 ${d} Z`;
}

function drawing() {
  views.slots = [];
  views.hands = [];
  views.dots = new Map();
  const rings = state.levels.map((level, index) => ring(level, index));
  views.hubTime = s("text", { class: "hub-time", x: CENTRE, y: CENTRE - 6 });
  views.hubNote = s("text", { class: "hub-note", x: CENTRE, y: CENTRE + 20 });
  views.layer = s("g", {});
  const buffer = scene.overflow ? [s("rect", { class: "buffer", x: 606, y: 40, width: 88, height: 520, rx: 12 }),
    s("text", { class: "buffer-name", x: 650, y: 30 }, "overflow")] : [];
  return s("svg", { class: "stage", viewBox: `0 0 ${scene.overflow ? 700 : 600} 600`, role: "img", "aria-label": "The wheel" },
    rings, buffer, views.hubTime, views.hubNote, views.layer);
}

function ring(level, index) {
  const [inner, outer] = radii(index);
  const angle = TURN / level.size;
  const every = level.size <= 24 ? 1 : 5;
  const slots = level.counts.map((_, slot) => {
    const title = s("title", {});
    const path = s("path", { class: "slot", d: sector(inner, outer, slot * angle, (slot + 1) * angle) }, title);
    return { path, title };
  });
  views.slots.push(slots);
  const numbers = level.counts.map((_, slot) => {
    if (slot % every) return null;
    const [x, y] = point(outer - 9, (slot + 0.5) * angle);
    return s("text", { class: "slot-number", x, y }, slot);
  });
  const hand = s("line", { class: "hand", x1: CENTRE, y1: CENTRE - inner + 4, x2: CENTRE, y2: CENTRE - outer + 19 });
  hand.style.transformOrigin = `${CENTRE}px ${CENTRE}px`;
  views.hands.push({ hand, angle: 0 });
  return s("g", {}, slots.map((slot) => slot.path), numbers, hand);
}

function turn(level, index) {
  const last = level.starts.map((start) => start + level.tick - 1);
  views.slots[index].forEach(({ path, title }, slot) => {
    path.setAttribute("class", `slot${level.counts[slot] ? " full" : ""}${slot === level.pointer ? " here" : ""}`);
    const span = level.tick === 1 ? `at ${level.starts[slot]}` : `${level.starts[slot]} to ${last[slot]}`;
    title.textContent = `level ${level.level}, slot ${slot}: ${span}; ${level.counts[slot]} entries`;
  });
  const hand = views.hands[index];
  const wanted = ((level.pointer + 0.5) * 360) / level.size;
  hand.angle += ((wanted - hand.angle) % 360 + 540) % 360 - 180; // the short way round
  hand.hand.style.transform = `rotate(${hand.angle}deg)`;
}

function setHub() {
  views.hubTime.textContent = state.now.toLocaleString("en");
  const pending = state.entries.filter((one) => one.slot !== null).length;
  views.hubNote.textContent = `${pending} pending`;
  const levels = state.levels.map((level) => `level ${level.level}: pointer at slot ${level.pointer}`).join("; ");
  views.stage.firstChild.setAttribute("aria-label", `The wheel at ${state.now}. ${levels}. ${pending} entries are pending.`);
}

function placeDots() {
  const together = new Map(); // entries by place, so that they share a slot side by side
  for (const entry of state.entries) {
    if (entry.slot === null) continue;
    const place = `${entry.level}/${entry.slot}`;
    together.set(place, [...(together.get(place) ?? []), entry.name]);
  }
  const names = new Set(state.entries.map((one) => one.name));
  for (const [key, dot] of views.dots) {
    if (!names.has(key)) {
      dot.remove();
      views.dots.delete(key);
    }
  }
  for (const entry of state.entries) placeDot(entry, together.get(`${entry.level}/${entry.slot}`) ?? []);
}

function placeDot(entry, neighbours) {
  let dot = views.dots.get(entry.name);
  if (!dot) {
    dot = s("g", { class: "dot" }, s("circle", { r: 11 }), s("text", {}, entry.name.slice(0, 3)));
    views.dots.set(entry.name, dot);
    views.layer.append(dot);
  }
  dot.dataset.state = entry.state;
  const [x, y] = spot(entry, neighbours.indexOf(entry.name), neighbours.length);
  dot.style.transform = `translate(${x}px, ${y}px)`;
}

/** Where an entry is drawn: in its slot, in the buffer, or in the hub once it has fired. */
function spot(entry, place, number) {
  if (entry.slot === null) return [CENTRE, CENTRE];
  if (entry.level === 0) return [632 + (place % 2) * 36, 66 + Math.floor(place / 2) * 30];
  const [inner, outer] = radii(entry.level - 1);
  const level = state.levels[entry.level - 1];
  const depth = number === 1 ? 0.42 : 0.16 + (0.6 * place) / (number - 1);
  return point(inner + (outer - inner) * depth, ((entry.slot + 0.5) * TURN) / level.size);
}

function showOperations() {
  views.shape = null;
  fill(views.levels);
  if (!state.entries.length) return fill(views.stage, empty("No operation waits", "Add one, and send events to its key."));
  return fill(views.stage, state.entries.map((one) => {
    const bar = h("i");
    bar.style.width = `${(100 * one.arrived) / Math.max(1, one.needed)}%`;
    return h("div", { class: "operation" }, h("span", {}, "operation ", name(one.name), h("span", { class: "sub" }, one.ended_at === null ? `deadline ${one.due_at}` : `ended at ${one.ended_at}`)),
      h("div", { class: "track" }, bar, h("em", {}, `${one.arrived} of ${one.needed} events on `, name(one.key))), pill(one.state));
  }));
}

function showEntries(kind) {
  if (kind === "purgatory") return fill(views.entries);
  const title = kind === "idle" ? "Users" : "Entries";
  if (!state.entries.length) return fill(views.entries, card(title, null, empty("None yet", kind === "idle" ? "Send a packet." : "Add one with a delay.")));
  const heads = kind === "idle" ? ["User", "Last packet", "State"] : ["Entry", "Due at", "Where", "State", ""];
  const rows = state.entries.map((one, index) => (kind === "idle" ? userRow(one) : entryRow(one, index)));
  return fill(views.entries, card(title, null, h("div", { class: "table-wrap" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head || h("span", { class: "visually-hidden" }, "Actions"))))), h("tbody", {}, rows)))));
}

function userRow(one) {
  return h("tr", {}, h("td", {}, name(one.name)), h("td", {}, one.seen),
    h("td", {}, pill(one.state, one.offline_at === null ? one.state : `offline at ${one.offline_at}`)));
}

function entryRow(one, index) {
  const path = one.path.map((step) => (step.level ? `${step.level}:${step.slot}` : "buffer")).join(" → ");
  const cancel = h("button", { class: "quiet icon", title: "Cancel", "aria-label": `Cancel ${one.name}`, onclick: () => { stop(); act("cancel", index + 1); } }, "×");
  return h("tr", { "data-entry": one.name }, h("td", {}, h("b", {}, name(one.name))), h("td", {}, one.expiry.toLocaleString("en")),
    h("td", { "data-level": one.level, "data-slot": one.slot }, h("span", { class: "path", title: "level:slot" }, path || one.error),
      one.rounds ? h("span", { class: "sub" }, `${one.rounds} ${one.rounds === 1 ? "round" : "rounds"} left`) : null),
    h("td", {}, pill(one.state)), h("td", {}, one.state === "pending" && cancel));
}

function figures(kind) {
  if (kind === "idle") return figureList("Cost", state.counts);
  if (kind === "purgatory") return figureList("Purgatory", { watched: state.watched, "in the timer": state.delayed });
  const { precise, ticking } = state.drivers;
  const row = (title, one) => h("tr", {}, h("td", {}, title), h("td", {}, one.wakeups.toLocaleString("en")), h("td", {}, one.empty.toLocaleString("en")));
  return card("Drivers", `${state.visits} ${state.visits === 1 ? "bucket" : "buckets"} visited`, h("table", { class: "compare" },
    h("thead", {}, h("tr", {}, ["Driver", "Wake-ups", "Empty"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, row("Precise", precise), row("Ticking", ticking))),
  state.wasted !== null && h("p", { class: "small faint" }, `${state.wasted} entries walked although they were not due`));
}

function figureList(title, values) {
  return card(title, null, h("dl", { class: "facts" }, Object.entries(values).map(([key, value]) => [h("dt", {}, key), h("dd", {}, value.toLocaleString("en"))])));
}

// -- start -------------------------------------------------------------------------------------

function header() {
  fill(document.getElementById("top"), h("a", { class: "lab-brand", href: "./" }, h("img", { src: "static/favicon.svg", alt: "" }), "tickwheel lab"),
    h("span", { class: "grow" }),
    h("button", { class: "quiet icon", "aria-label": "Light or dark", onclick: changeTheme }, icon("theme")));
}

function changeTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("tickwheel-theme", document.documentElement.dataset.theme);
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea, button") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = { " ": run, ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => moveTo(0) }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

async function start() {
  header();
  try {
    const response = await fetch("v1/lab/presets");
    if (response.status === 401) {
      fill(root, h("p", { class: "banner" }, "The lab of this server needs a session. ", h("a", { href: "sign-in" }, "Sign in")));
      return;
    }
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.detail);
    presets = answer.items;
  } catch (error) {
    fill(root, h("h1", {}, "The lab cannot be used now"), h("p", { class: "banner bad" }, error.message));
    return;
  }
  if (!scene.kind && !scene.do) scene = { ...presets.find((one) => one.title === "350 and 450").scene };
  build();
  await load();
}

start();
