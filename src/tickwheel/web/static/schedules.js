// Schedules: what is submitted again and again, and when next.

import { get, may, put, remove, textOf } from "./api.js";
import { ago, ask, block, card, empty, fill, h, name, pill, toast } from "./dom.js";
import { duration, time } from "./format.js";
import { checkedJson, indent } from "./json.js";

const rule = (one) => (one.cron ? [h("code", {}, one.cron), h("span", { class: "faint" }, one.tz)] : `every ${duration(one.interval)}`);

export async function schedules(page, { signal, go }) {
  const body = h("tbody");
  const heads = ["Schedule", "State", "Rule", "Service", "Next firing"];
  const content = h("section", { class: "card flush" });
  const more = h("div", { class: "pager hidden" });
  fill(page, h("div", { class: "page-head" }, h("h1", {}, "Schedules"), h("div", { class: "actions" },
    may("admin") && h("button", { class: "primary", type: "button", onclick: async () => { const made = await edit(null); if (made) go(`schedules/${encodeURIComponent(made.name)}`); } }, "New schedule"))), content);
  const load = async (cursor) => {
    const found = await get("v1/schedules", { cursor, limit: 100 });
    if (signal.aborted) return;
    body.append(...found.items.map((one) => h("tr", {}, h("td", {}, h("a", { href: `schedules/${encodeURIComponent(one.name)}` }, name(one.name, 60))),
      h("td", { class: "end" }, pill(one.enabled ? "on" : "off", one.enabled ? "active" : "paused")), h("td", { class: "wide" }, rule(one)),
      h("td", {}, h("a", { href: `services/${encodeURIComponent(one.service)}` }, name(one.service, 40))), h("td", { class: "nowrap end" }, one.next_at ? time(one.next_at) : "–", h("span", { class: "sub" }, ago(one.next_at))))));
    more.classList.toggle("hidden", !found.next_cursor);
    fill(more, h("button", { type: "button", onclick: () => load(found.next_cursor) }, "More"));
    if (!body.children.length) fill(content, empty("No schedules", "A schedule submits a task by a cron rule or an interval."));
    else fill(content, h("div", { class: "table-wrap" }, h("table", { class: "cards" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), body)), more);
  };
  await load();
}

export async function schedule(page, { signal, go, parts: [encoded] }) {
  const path = `v1/schedules/${encoded}`;
  const [found, firings] = await Promise.all([get(path), get(`${path}/firings`, { limit: 12 })]);
  if (signal.aborted) return;
  const reload = () => schedule(page, { signal, go, parts: [encoded] });
  const row = (term, ...value) => [h("dt", {}, term), h("dd", {}, value)];
  fill(page,
    h("div", { class: "page-head" }, h("h1", {}, name(found.name)), pill(found.enabled ? "on" : "off", found.enabled ? "active" : "paused"), h("div", { class: "actions" }, may("admin") && [
      h("button", { type: "button", onclick: async () => {
        try { await put(path, body({ ...found, enabled: !found.enabled }), { texts: { payload: textOf(found, "payload") }, replaces: found }); toast(found.enabled ? "Paused" : "Resumed"); await reload(); } catch (error) { toast(error.message, true); await reload(); }
      } }, found.enabled ? "Pause" : "Resume"),
      h("button", { type: "button", onclick: async () => { await edit(found); await reload(); } }, "Edit"),
      h("button", { type: "button", class: "danger", onclick: async () => {
        if (await ask({ title: "Delete this schedule?", action: "Delete", danger: true, body: h("p", { class: "soft" }, "Its next firing is cancelled with it."), check: () => remove(path).then(() => true) })) { toast("Deleted"); go("schedules"); }
      } }, "Delete")])),
    h("div", { class: "columns side" },
      h("div", { class: "stack" }, card("Next firings", found.enabled ? "in your time zone" : "if it were active", firings.items.length ? h("ol", { class: "timeline" }, firings.items.map((at, index) => h("li", { "data-state": index ? "delay" : "next" },
        h("div", { class: "what" }, h("b", {}, time(at)), h("span", { class: "when", title: at }, ago(at)))))) : empty("No further firing", "The rule has no further time.")),
        card("Payload", null, block(indent(textOf(found, "payload")), "Payload"))),
      card("Schedule", null, h("dl", { class: "facts" }, row("Rule", rule(found)), row("Service", h("a", { href: `services/${encodeURIComponent(found.service)}` }, name(found.service))),
        row("Missed", { once: "one firing for all of them", all: "all of them", skip: "skipped" }[found.missed]), row("Attempts", found.max_attempts), found.timeout !== null && row("Timeout", duration(found.timeout)), row("Created", time(found.created_at))))));
}

/** The body of a put. */
function body({ name: _, next_at, created_at, ...rest }) {
  return rest;
}

function edit(found) {
  const stored = found ? textOf(found, "payload") : "null";
  const payload = h("textarea", { name: "payload", rows: "4", spellcheck: "false", ".value": indent(stored) });
  const unchanged = payload.value; // a text area has its own line breaks
  const now = found ?? { service: "", payload: null, cron: "0 3 * * *", interval: null, tz: "UTC", missed: "once", enabled: true, priority: 0, timeout: null, max_attempts: null };
  const input = (label, key, value, more = {}) => h("label", { class: "field" }, label, h("input", { name: key, value: value ?? "", autocomplete: "off", ...more }));
  return ask({ title: found ? `Edit ${found.name}` : "New schedule", action: "Store", large: true, body: h("div", { class: "form-grid" }, !found && input("Name", "name", "", { required: true }), input("Service", "service", now.service, { required: true }),
    input("Cron, five fields", "cron", now.cron, { placeholder: "0 3 * * *" }), input("Or every … seconds", "interval", now.interval, { type: "number", step: "any" }), input("Time zone", "tz", now.tz),
    h("label", { class: "field" }, "Missed firings", h("select", { name: "missed" }, ["once", "all", "skip"].map((one) => h("option", { value: one, selected: one === now.missed }, one)))),
    h("label", { class: "field wide" }, "Payload, as JSON", payload),
    h("label", { class: "check wide" }, h("input", { type: "checkbox", name: "enabled", checked: now.enabled }), "Active")),
  check: (data) => {
    const text = payload.value === unchanged ? stored : checkedJson(payload.value);
    if (Boolean(data.cron) === Boolean(data.interval)) throw new Error("give a cron rule or an interval, one of them");
    return put(`v1/schedules/${encodeURIComponent(found?.name ?? data.name)}`, { ...body(now), service: data.service, cron: data.cron || null, interval: data.interval ? Number(data.interval) : null, tz: data.tz, missed: data.missed, enabled: Boolean(data.enabled) }, { texts: { payload: text }, replaces: found });
  } });
}
