// Elements without markup: text becomes text nodes, so that no value can be HTML.

import { relative } from "./format.js";

/** Make an element: attributes, listeners (`onclick`), properties (`.value`), then children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) element[name.slice(1)] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

/** Make an SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace what an element has. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Change an element's text, and nothing if it is the same. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Control characters, and those that change the direction of text or are invisible.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** Return foreign text as nodes: characters that could deceive are shown by their number. */
export function foreign(text) {
  const parts = [];
  let end = 0;
  for (const match of String(text).matchAll(ODD)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(h("span", { class: "odd" }, `U+${code}`));
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

/** Change an element's foreign text, and nothing if it is the same. */
export function setForeign(element, text) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  fill(element, foreign(text));
}

/** A name or other short foreign text, isolated from the direction of the text around it. */
export function name(text, most = 200) {
  const short = text.length > most ? `${text.slice(0, most)}…` : text;
  return h("bdi", { title: text.length > most ? `${text.length} characters` : null }, foreign(short));
}

/** A block of foreign text: a payload, a result, an error. */
export function block(text, label) {
  return h("pre", { class: "text", tabindex: "0", role: "group", "aria-label": label }, foreign(text));
}

/** How far a time is from now, as an element that stays right. */
export function ago(text) {
  return text ? h("time", { class: "ago", datetime: text }, relative(text)) : "";
}

setInterval(() => {
  if (document.hidden) return;
  for (const one of document.querySelectorAll("time.ago")) setText(one, relative(one.dateTime));
}, 1000);

const ICONS = {
  overview: "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-4H4zM14 8h6V4h-6z",
  tasks: "M4 6h16M4 12h16M4 18h10",
  backlog: "M4 7h16v12H4zM4 7l2-3h12l2 3M9 12h6",
  services: "M4 5h16v5H4zM4 14h16v5H4zM8 7.5h.01M8 16.5h.01",
  schedules: "M5 6h14v14H5zM5 10h14M9 3v4M15 3v4",
  cluster: "M12 5a2 2 0 1 0 0-.01M5 18a2 2 0 1 0 0-.01M19 18a2 2 0 1 0 0-.01M12 7v4M12 11l-6 5M12 11l6 5",
  tokens: "M14 10a4 4 0 1 0-3.5 4L12 15.5h2V18h2v2h4v-4l-6-6",
  audit: "M6 3h9l4 4v14H6zM14 3v5h5M9 13h7M9 17h7",
  theme: "M12 4v16a8 8 0 0 0 0-16zM12 4a8 8 0 0 0 0 16",
  lab: "M9 3h6M10 3v6l-5 9a2 2 0 0 0 2 3h10a2 2 0 0 0 2-3l-5-9V3M8 15h8",
  leave: "M14 4H6v16h8M10 12h11M18 9l3 3-3 3",
};

/** A line icon. */
export function icon(which) {
  return s("svg", { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8",
    "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true" }, s("path", { d: ICONS[which] }));
}

/** A state as a pill. */
export function pill(state, text = state) {
  return h("span", { class: "pill", "data-state": state }, text);
}

/** A card with a heading. */
export function card(title, note, ...children) {
  return h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, title),
    note && h("span", { class: "note" }, note)), children);
}

/** What a list shows when it has nothing. */
export function empty(title, text) {
  return h("div", { class: "empty" }, h("strong", {}, title), text);
}

/** Show a message for some seconds. */
export function toast(text, bad = false) {
  const shown = h("div", { class: bad ? "toast bad" : "toast" }, foreign(text.slice(0, 500)));
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), bad ? 9000 : 5000);
}

/** Open a dialog with a form; resolve to the form's data, or null if it is left. */
export function ask({ title, body, action = "OK", cancel = true, danger = false, large = false, check = null }) {
  return new Promise((resolve) => {
    const problem = h("p", { class: "banner bad hidden", role: "alert" });
    const submit = h("button", { class: danger ? "primary danger" : "primary", type: "submit" }, action);
    const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), body, problem,
      h("div", { class: "buttons" }, cancel && h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), submit));
    const dialog = h("dialog", { class: large ? "large" : null, "aria-labelledby": "dialog-title" }, form);
    let answer = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      submit.disabled = true;
      try {
        const data = Object.fromEntries(new FormData(form));
        answer = check ? ((await check(data, form)) ?? data) : data;
        dialog.close();
      } catch (error) {
        problem.classList.remove("hidden");
        fill(problem, foreign(error.message));
      } finally {
        submit.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
