// One task: its life as a timeline, its payload, result and errors, and what can be done with it.

import { get, may, post, textOf } from "./api.js";
import { ago, ask, block, card, fill, h, name, pill, toast } from "./dom.js";
import { bytes, count, duration, now, plural, time } from "./format.js";
import { indent } from "./json.js";
import { askDelay, keyOf } from "./tasks.js";

const TRUNCATE = 65536; // bytes of a payload, result or error that are read
const ATTEMPTS = 100; // shown at once
const MOST_ATTEMPTS = 1000; // of one answer
const REFRESH = 1000; // milliseconds between two reads of a task that has not ended
const MAX_WAIT = 30000;
const EVENTS = {
  finish: "finished", retry: "failed, to be retried", fail: "failed for good", snooze: "asked for more time", release: "given back unsent",
  accept: "accepted", lose: "lost: its node stopped", lost: "lost: its node stopped", expire: "expired",
};

export async function task(page, { signal, go, parts: [id] }) {
  let shown = "";
  let timer = null;
  let wait = REFRESH;
  let after = null; // the attempt after which the page begins; null: it shows the newest
  let newest = ATTEMPTS; // how many of them fit in an answer
  const attempts = async (cursor, limit) => ({ after: cursor, ...await get(`v1/tasks/${id}/attempts`, { cursor, limit }) });
  const readLog = async (task) => {
    if (after !== null) return attempts(after, ATTEMPTS);
    for (;; newest = Math.ceil(newest / 4)) { // an answer with long errors ends early
      const log = await attempts(Math.max(0, task.attempt - newest), MOST_ATTEMPTS);
      if (!log.next_cursor || newest === 1) return log;
    }
  };
  const refresh = async () => {
    clearTimeout(timer);
    const wanted = after;
    const found = await get(`v1/tasks/${id}`, { truncate: TRUNCATE });
    const log = await readLog(found);
    if (signal.aborted || after !== wanted) return;
    const text = JSON.stringify([found, log]);
    if (text !== shown) {
      shown = text;
      render(page, found, log, { refresh, go, turn });
    }
    wait = REFRESH;
    if (!isFinal(found)) again();
  };
  const turn = (cursor) => {
    after = cursor;
    refresh().catch((error) => { toast(error.message, true); again(); });
  };
  // A server that cannot be reached is asked again, ever less often; one that refuses is not.
  const again = () => {
    clearTimeout(timer);
    timer = setTimeout(() => signal.aborted || document.hidden || refresh().catch((error) => {
      if (error.status && error.status < 500) { if (error.status !== 401) toast(error.message, true); return; }
      wait = Math.min(MAX_WAIT, 2 * wait);
      again();
    }), wait);
  };
  await refresh();
  document.addEventListener("visibilitychange", () => document.hidden || signal.aborted || again(), { signal });
}

const isFinal = (task) => ["finished", "failed", "cancelled"].includes(task.state);

function render(page, task, log, context) {
  fill(page,
    h("div", { class: "page-head" }, h("h1", { class: "mono" }, task.id), pill(task.state), h("div", { class: "actions" }, actions(task, context))),
    h("div", { class: "columns side" },
      h("div", { class: "stack" },
        card("Life", shownAttempts(log), timeline(task, log, context)),
        text(task, "error", "Last error"), text(task, "result", "Result"), text(task, "payload", "Payload")),
      h("div", { class: "stack" }, card("Task", null, facts(task)))));
}

function shownAttempts({ items, after, next_cursor }) {
  if (!items.length || !(after || next_cursor)) return plural(items.length, "attempt ended", "attempts ended");
  return `attempts ${count(items[0].attempt)} to ${count(items.at(-1).attempt)}`;
}

function actions(task, { refresh, go }) {
  if (!may("submit")) return null;
  const act = async (path, body, done) => {
    try {
      const answer = await post(path, body);
      if (answer.won === false) toast(`The task is ${answer.state} already`, true);
      else done(answer);
      await refresh();
    } catch (error) {
      toast(error.message, true);
    }
  };
  const button = (label, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, label);
  if (task.state === "delay" || task.state === "ready") {
    return [
      button("Run now", () => act(`v1/tasks/${task.id}/reschedule`, { delay: 0 }, () => toast("The task is due now")), { class: "primary" }),
      button("Reschedule", async () => {
        const when = await askDelay("this task");
        if (when) await act(`v1/tasks/${task.id}/reschedule`, when, () => toast("Rescheduled"));
      }),
      button("Cancel", async () => {
        if (await ask({ title: "Cancel this task?", action: "Cancel the task", danger: true, body: h("p", { class: "soft" }, "It will not run. It can be replayed from the backlog.") })) {
          await act(`v1/tasks/${task.id}/cancel`, {}, () => toast("Cancelled"));
        }
      }, { class: "danger" }),
    ];
  }
  if (!isFinal(task)) return null;
  return button("Replay", async () => {
    const again = Boolean(task.replayed_as);
    if (await ask({ title: "Run this task again?", action: "Replay", body: h("p", { class: "soft" }, again ? "It has been replayed before. This makes one more task with the same payload." : "This makes a new task with the same payload, due now.") })) {
      await act(`v1/backlog/${task.id}/replay`, { force: again }, (made) => { toast("Replayed as a new task"); go(`tasks/${made.id}`); });
    }
  }, { class: "primary" });
}

/** The life of a task: submitted, each attempt, and what comes next or how it ended. */
function timeline(task, log, { turn }) {
  const items = [step("delay", "Submitted", task.created_at, task.replay_of && ["as a replay of ", h("a", { class: "mono", href: `tasks/${task.replay_of}` }, task.replay_of)])];
  const start = Date.parse(task.created_at);
  const last = log.items.at(-1);
  const end = Math.max(start + 1, isFinal(task) ? Date.parse(task.updated_at) : now(), last ? Date.parse(last.ended_at) : 0);
  const others = (text, cursor) => h("li", { "data-state": "delay" }, h("button", { type: "button", onclick: () => turn(cursor) }, text));
  if (log.after) items.push(others("Earlier attempts", Math.max(0, log.after - (log.items.length || ATTEMPTS))));
  for (const attempt of log.items) items.push(attemptItem(attempt, start, end));
  if (log.next_cursor) items.push(others("Later attempts", log.next_cursor));
  if (task.state === "running") items.push(step("running", `Attempt ${task.attempt} is running`, task.updated_at, task.node && ["on ", name(task.node, 60)]));
  else if (!isFinal(task)) {
    const again = log.items.length > 0;
    items.push(step(task.state === "ready" ? "ready" : "next", task.state === "ready" ? "Due, waits for a permit" : again ? "Next attempt" : "Due", task.due_at, task.state !== "ready" && ago(task.due_at)));
  } else if (!last || task.state === "cancelled" || Date.parse(task.updated_at) > Date.parse(last.ended_at) + 1) {
    items.push(step(task.state, { cancelled: "Cancelled", failed: "Failed", finished: "Finished" }[task.state], task.updated_at));
  }
  if (task.replayed_as) items.push(step("delay", "Replayed", null, ["as ", h("a", { class: "mono", href: `tasks/${task.replayed_as}` }, task.replayed_as)]));
  return h("ol", { class: "timeline" }, items);
}

const step = (state, what, at, more = null) => h("li", { "data-state": state }, h("div", { class: "what" }, h("b", {}, what), at && h("span", { class: "when", title: at }, time(at)), more && h("span", { class: "soft small" }, more)));

function attemptItem(attempt, start, end) {
  const from = Date.parse(attempt.started_at);
  const to = Date.parse(attempt.ended_at);
  const bar = h("i");
  bar.style.left = `${Math.min(99, 100 * Math.max(0, from - start) / (end - start))}%`;
  bar.style.width = `${Math.min(100, 100 * (to - from) / (end - start))}%`;
  return h("li", { "data-state": attempt.event },
    h("div", { class: "what" }, h("b", {}, `Attempt ${attempt.attempt}`), pill(attempt.event, EVENTS[attempt.event] ?? attempt.event),
      h("span", { class: "when", title: `${attempt.started_at} – ${attempt.ended_at}` }, `${time(attempt.started_at)}, took ${duration((to - from) / 1000)}`),
      attempt.node && h("span", { class: "faint small" }, "on ", name(attempt.node, 60)),
      attempt.delivered_to && h("span", { class: "faint small" }, "to ", name(JSON.stringify(attempt.delivered_to), 120))),
    h("div", { class: "span-bar", role: "img", "aria-label": `from ${duration((from - start) / 1000)} to ${duration((to - start) / 1000)} after the submit` }, bar),
    attempt.error !== null && block(attempt.error.slice(0, TRUNCATE), `Error of attempt ${attempt.attempt}`));
}

/** A payload, result or error; JSON is indented, what is too long is cut by the server. */
function text(task, field, title) {
  const cut = task.truncated?.[field];
  if (cut) return card(title, `the first ${bytes(new Blob([cut.start]).size)} of ${bytes(cut.bytes)}`, block(cut.start, title));
  const value = task[field];
  if (value === null && field !== "payload") return null;
  const shown = field === "error" ? value : indent(textOf(task, field));
  return card(title, null, block(shown, title));
}

function facts(task) {
  const row = (term, ...value) => [h("dt", {}, term), h("dd", {}, value)];
  return h("dl", { class: "facts" },
    row("Service", h("a", { href: `services/${encodeURIComponent(task.service)}` }, name(task.service))),
    task.key !== null && row("Key", keyOf(task, 400)),
    task.tags.length > 0 && row("Tags", task.tags.map((tag) => h("span", { class: "tag" }, tag))),
    row("Due", h("span", { title: task.due_at }, time(task.due_at)), h("span", { class: "faint" }, " · ", ago(task.due_at))),
    row("Submitted", h("span", { title: task.created_at }, time(task.created_at))),
    row("Changed", h("span", { title: task.updated_at }, time(task.updated_at))),
    row("Attempts", count(task.attempt)),
    row("Failures", `${count(task.failures)} of ${count(task.max_attempts)}`),
    task.priority !== 0 && row("Priority", count(task.priority)),
    task.timeout !== null && row("Timeout", duration(task.timeout)),
    task.deadline && row("Deadline", time(task.deadline)),
    task.node && row("Node", name(task.node, 80)),
    row("Shard", `${task.shard} · epoch ${count(task.epoch)}`));
}
