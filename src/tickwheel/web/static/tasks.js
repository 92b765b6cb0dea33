// Lists of tasks: live and final ones together, or the backlog; filters, selection, bulk actions.

import { encodeQuery, get, may, post } from "./api.js";
import { ago, ask, empty, fill, h, name, pill, toast } from "./dom.js";
import { fromLocal, parseDelay, plural, time, toLocal } from "./format.js";
import { watch } from "./live.js";

const STATES = ["delay", "ready", "running", "finished", "failed", "cancelled"];
const FINAL = STATES.slice(3);
const LIMIT = 50;
const MOST_PAGES = 15; // that a search reads before it asks whether to go on
const COUNTED = 5000; // tasks that are counted before a bulk action
const COUNTED_PAGES = 30; // that are read for it: a page may be almost empty
const TOGETHER = 4; // requests at once, of an action on selected tasks
const FIELDS = ["state", "service", "key", "tag", "due_after", "due_before"];

export const tasks = (page, context) => list(page, context, { path: "tasks", title: "Tasks", states: STATES, note: "Live and final tasks, newest first." });
export const backlog = (page, context) => list(page, context, { path: "backlog", title: "Backlog", states: FINAL, note: "Tasks that have ended, newest first. A replay runs one again, as a new task." });

function list(page, context, kind) {
  const { signal, query, go } = context;
  const filter = Object.fromEntries(FIELDS.map((field) => [field, query.get(field) ?? ""]));
  const body = h("tbody");
  const pager = h("div", { class: "pager" });
  const selected = new Map();
  const selection = h("div", { class: "selection hidden", role: "group", "aria-label": "Selected tasks" });
  const all = h("input", { type: "checkbox", "aria-label": "Select all tasks of this page" });
  const content = h("section", { class: "card flush" });
  const heads = [may("submit") && all, "Task", "Service", "State", "Due", "Attempts", "Changed"];
  const table = h("div", { class: "table-wrap" }, h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, heads.filter(Boolean).map((text) => h("th", { scope: "col", class: text === "Attempts" ? "right" : null }, text)))), body));
  fill(content, selection, table, pager);
  const newer = h("button", { class: "hidden", type: "button", onclick: () => { newer.classList.add("hidden"); load(null); } }, "Show newer tasks");
  fill(page, h("div", { class: "page-head" }, h("h1", {}, kind.title), h("span", { class: "faint small" }, kind.note), h("div", { class: "actions" }, newer, bulkButtons(kind, filter, () => load(null)))),
    filterForm(kind, filter, go), content);

  const choose = () => {
    selection.classList.toggle("hidden", !selected.size);
    fill(selection, h("b", {}, `${plural(selected.size, "task")} selected`), h("span", { class: "grow" }), selectionButtons(selected, () => load(cursor)));
    all.checked = selected.size > 0 && selected.size === body.children.length;
  };
  all.addEventListener("change", () => {
    const wanted = all.checked; // each click decides anew whether all are selected
    for (const box of body.querySelectorAll("input[type=checkbox]")) {
      if (box.checked !== wanted) box.click();
    }
  });

  let cursor = query.get("cursor");
  const trail = []; // of cursors, to go back
  async function load(from) {
    cursor = from;
    if (from === null) trail.length = 0;
    selected.clear();
    choose();
    const found = await search(kind, filter, from, signal, (cursor) => fill(pager, h("span", { role: "status" }, `searching: looked back to ${submitted(cursor)} …`)));
    if (signal.aborted) return;
    const further = found.next_cursor && found.items.length < LIMIT; // the search has ended at its bound
    const looked = further ? `looked at the tasks submitted since ${submitted(found.next_cursor)}` : "";
    fill(content, selection, found.items.length ? table : empty("No tasks", further ? `None matches among those submitted since ${submitted(found.next_cursor)}. There are older ones.` : "No task matches these filters."), pager);
    fill(body, found.items.map((task) => row(task, selected, choose)));
    fill(pager,
      h("button", { type: "button", disabled: !trail.length, onclick: () => load(trail.pop()) }, "← Newer"),
      h("button", { type: "button", disabled: !found.next_cursor, onclick: () => { trail.push(from); load(found.next_cursor); } }, further ? "Search older tasks →" : "Older →"),
      h("span", { class: "grow" }, [found.items.length && `${plural(found.items.length, "task")} on this page`, looked].filter(Boolean).join(", ")));
  }
  // Something was submitted: offer the new tasks instead of moving the list under the reader.
  let before = null;
  watch(signal, "figures", ({ stats }) => {
    const mark = stats.submitted_here;
    if (before !== null && mark !== before && cursor === null && !trail.length) newer.classList.remove("hidden");
    before = mark;
  });
  return load(cursor);
}

const tagsOf = (text) => text.split(/[\s,]+/).filter(Boolean);

/** When the task with this id was submitted: an id begins with that time. */
const submitted = (id) => time(new Date(parseInt(id.slice(0, 12), 16)).toISOString());

/** Read a page; a filter may skip many tasks, so follow the cursor for a while. */
async function search(kind, filter, from, signal, onProgress) {
  const { tag, ...rest } = filter;
  if (kind.path === "backlog") { delete rest.due_after; delete rest.due_before; }
  let cursor = from;
  const items = [];
  for (let pages = 1; ; pages++) {
    const found = await get(`v1/${kind.path}`, { ...rest, tag: tagsOf(tag), cursor, limit: LIMIT - items.length, truncate: 0 });
    items.push(...found.items);
    cursor = found.next_cursor;
    if (!cursor || items.length >= LIMIT || pages >= MOST_PAGES || signal.aborted) return { items, next_cursor: cursor };
    onProgress(cursor);
  }
}

function row(task, selected, choose) {
  const box = may("submit") && h("input", { type: "checkbox", "aria-label": `Select the task ${task.id}`, onchange: (event) => {
    if (event.target.checked) selected.set(task.id, task);
    else selected.delete(task.id);
    choose();
  } });
  return h("tr", {},
    box && h("td", {}, box),
    h("td", { class: "wide" }, h("a", { class: "mono", href: `tasks/${task.id}` }, shortId(task.id)),
      (task.key !== null || task.tags.length > 0) && h("span", { class: "sub row" }, task.key !== null && h("span", { class: "clip" }, keyOf(task, 60)), task.tags.map((tag) => h("span", { class: "tag" }, tag)))),
    h("td", {}, h("a", { href: `services/${encodeURIComponent(task.service)}` }, name(task.service, 40))),
    h("td", { class: "end" }, pill(task.state)),
    h("td", { class: "nowrap" }, time(task.due_at), h("span", { class: "sub" }, ago(task.due_at))),
    h("td", { class: "right", "data-label": "attempts" }, `${task.attempt} / ${task.max_attempts}`),
    h("td", { class: "nowrap", "data-label": "changed" }, ago(task.updated_at)));
}

/** The key of a task; that of a schedule's firing leads to the schedule. No submit can have such a key. */
export function keyOf({ key }, most) {
  const firing = /^schedule:(?:[^/]*\/)?(.+)\u001f\d+$/.exec(key);
  return firing ? ["schedule ", h("a", { href: `schedules/${encodeURIComponent(firing[1])}` }, name(firing[1], most))] : name(key, most);
}

export const shortId = (id) => `${id.slice(0, 8)}…${id.slice(-6)}`;

function filterForm(kind, filter, go) {
  const field = (label, control, wide = false) => h("label", { class: wide ? "field wide" : "field" }, label, control);
  const input = (field, more = {}) => h("input", { name: field, value: filter[field], autocomplete: "off", ...more });
  const local = (field) => h("input", { type: "datetime-local", step: "1", name: field, value: filter[field] ? toLocal(filter[field]) : "" });
  const dues = kind.path === "tasks" ? [field("Due from", local("due_after")), field("Due before", local("due_before"))] : [];
  return h("form", { class: "card filters", role: "search", onsubmit: (event) => {
    event.preventDefault();
    const data = Object.fromEntries(new FormData(event.target));
    if (/^[0-9a-f]{32}$/i.test(data.key.trim())) return go(`tasks/${data.key.trim().toLowerCase()}`);
    for (const one of ["due_after", "due_before"]) data[one] = data[one] ? fromLocal(data[one]) : "";
    return go(kind.path + encodeQuery({ ...data, key: data.key.trim() }));
  } },
  field("Id or key", input("key", { placeholder: "id or key", type: "search" }), true),
  field("Service", input("service", { placeholder: "any" })),
  field("State", h("select", { name: "state" }, h("option", { value: "" }, "any"), kind.states.map((state) => h("option", { value: state, selected: state === filter.state }, state)))),
  field("Tags", input("tag", { placeholder: "any" })),
  dues,
  h("div", { class: "buttons" }, h("button", { class: "primary", type: "submit" }, "Search"),
    h("button", { type: "button", onclick: () => go(kind.path) }, "Clear")));
}

/** The actions on selected tasks. */
function selectionButtons(selected, done) {
  const all = [...selected.values()];
  const open = all.filter((task) => task.state === "delay" || task.state === "ready");
  const ended = all.filter((task) => FINAL.includes(task.state));
  const button = (text, tasks, ask, act, danger) => tasks.length > 0 && h("button", { type: "button", class: danger ? "danger" : null, onclick: async () => {
    if (await confirm(ask, tasks.length, text, danger)) { await each(tasks, act, text); done(); }
  } }, `${text} ${tasks.length}`);
  return [
    button("Run now", open, "Run these tasks now?", (task) => post(`v1/tasks/${task.id}/reschedule`, { delay: 0 })),
    open.length > 0 && h("button", { type: "button", onclick: async () => {
      const when = await askDelay(plural(open.length, "task"));
      if (when) { await each(open, (task) => post(`v1/tasks/${task.id}/reschedule`, when), "Reschedule"); done(); }
    } }, `Reschedule ${open.length}`),
    button("Replay", ended, "Run these tasks again, as new ones?", (task) => post(`v1/backlog/${task.id}/replay`, { force: Boolean(task.replayed_as) })),
    button("Cancel", open, "Cancel these tasks? A running task is not stopped.", (task) => post(`v1/tasks/${task.id}/cancel`), true),
  ];
}

const confirm = (title, number, action, danger) => ask({ title, action: `${action} ${plural(number, "task")}`, danger, body: h("p", { class: "soft" }, `This changes ${plural(number, "task")}.`) });

/** Ask for another due time; return the body of a reschedule, or null. */
export function askDelay(what) {
  const delay = h("input", { name: "delay", placeholder: "90s, 5m, 2h, 1d", autocomplete: "off" });
  const at = h("input", { name: "due_at", type: "datetime-local", step: "1" });
  return ask({ title: `Reschedule ${what}`, action: "Reschedule", body: h("div", { class: "form-grid" }, h("label", { class: "field" }, "After a delay", delay), h("label", { class: "field" }, "Or at a time", at)),
    check: (data) => {
      if (Boolean(data.delay) === Boolean(data.due_at)) throw new Error("give a delay or a time, one of them");
      return data.delay ? { delay: parseDelay(data.delay) } : { due_at: fromLocal(data.due_at) };
    } });
}

/** Act on tasks, a few at a time, and report how many went well. */
async function each(tasks, act, text) {
  const waiting = [...tasks];
  let good = 0;
  let problem = null;
  await Promise.all(Array.from({ length: TOGETHER }, async () => {
    for (let task = waiting.pop(); task; task = waiting.pop()) {
      try {
        const answer = await act(task);
        if (answer?.won === false) problem = `a task is ${answer.state} already`;
        else good++;
      } catch (error) {
        problem = error.message;
      }
    }
  }));
  toast(`${text}: ${good} of ${plural(tasks.length, "task")}${problem ? `; ${problem}` : ""}`, good < tasks.length);
}

/** The actions on all tasks that match the filters, after a count and a confirmation. */
function bulkButtons(kind, filter, done) {
  const { service, key, state, due_before, due_after } = filter;
  const tag = tagsOf(filter.tag);
  if (!may("submit") || !(service || key || tag.length)) return [];
  const which = Object.fromEntries(Object.entries({ service, key, state }).filter(([, value]) => value));
  if (tag.length) which.tag = tag;
  const button = (text, path, field, fits, danger) => h("button", { type: "button", class: danger ? "danger" : null, onclick: async () => {
    const { number, more } = await countMatching(kind, filter, fits);
    const all = `${more ? "at least " : ""}${plural(number, "task")}`;
    const failed = kind.path === "backlog" && !state ? "failed " : "";
    const matching = `${more ? "At least " : ""}${plural(number, `${failed}task matches`, `${failed}tasks match`)} these filters now.`;
    const answer = await ask({ title: `${text}?`, action: `${text.split(" ")[0]} ${all}`, danger, body: h("p", { class: "soft" }, matching, failed && " For finished or cancelled ones, choose the state first."), check: () => post(path, which) });
    if (answer) { toast(`${text.split(" ")[0]}: ${plural(answer[field], "task")}`); done(); }
  } }, `${text} …`);
  if (kind.path === "backlog") return [button("Replay all that match", "v1/backlog/replay", "replayed", (task) => !task.replayed_as && (state || task.state === "failed"))];
  if (due_after || (state && state !== "delay" && state !== "ready")) return [];
  if (due_before) which.due_before = due_before;
  return [button("Cancel all that match", "v1/tasks/cancel", "cancelled", (task) => task.state === "delay" || task.state === "ready", true)];
}

/** Count the tasks that match, up to a bound: a list reads a page at a time. */
async function countMatching(kind, filter, fits) {
  const { tag, ...rest } = filter;
  if (kind.path === "backlog") { delete rest.due_after; delete rest.due_before; }
  let number = 0;
  let cursor = null;
  for (let pages = 0; pages < COUNTED_PAGES && number < COUNTED; pages++) {
    const found = await get(`v1/${kind.path}`, { ...rest, tag: tagsOf(tag), cursor, limit: 1000, truncate: 0 });
    number += found.items.filter(fits).length;
    cursor = found.next_cursor;
    if (!cursor) return { number, more: false };
  }
  return { number, more: true };
}
