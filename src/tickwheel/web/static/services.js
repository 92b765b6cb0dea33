// Services: how each does, its configuration, a test call, and its recent errors in groups.

import { encodeQuery, get, may, post, put, remove, textOf } from "./api.js";
import { ago, ask, block, card, empty, fill, foreign, h, name, pill, toast } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { checkedJson, indent } from "./json.js";
import { live, watch } from "./live.js";

const PLACEHOLDER = "********";
const PROTOCOLS = ["http", "grpc", "kafka", "rabbitmq", "nats", "redis", "celery"];
const WITHOUT_MESSAGES = ["http", "grpc", "celery"]; // protocols whose messages, if any, tickwheel does not make
/** How a test call ended; nothing is retried, so these differ from the events of an attempt. Below, the error says why. */
const TEST_EVENTS = { finish: "finished", accept: "accepted", retry: "failed", fail: "failed", snooze: "postponed", release: "released" };
const MOST_DELAYS = 20; // of a backoff that are shown outside of the form
const BREAKER = { failures: 10, pause: 5, max_pause: 60, probes: 1 };

/** The state of a service as a pill: paused, or its breaker. */
function state(service, figures) {
  if (!service.enabled) return pill("off", "paused");
  const breaker = figures?.breaker ?? "closed";
  return pill(breaker.replace("_", "-"), breaker === "closed" ? "healthy" : `breaker ${breaker.replace("_", "-")}`);
}

export async function services(page, { signal, go }) {
  const body = h("tbody");
  const heads = ["Service", "State", "Endpoint", "Running", "Waiting", "Latency p99"];
  const table = h("div", { class: "table-wrap" }, h("table", { class: "cards" }, h("thead", {}, h("tr", {}, heads.map((text, index) => h("th", { scope: "col", class: index > 2 ? "right" : null }, text)))), body));
  const content = h("section", { class: "card flush" }, table);
  fill(page, h("div", { class: "page-head" }, h("h1", {}, "Services"), h("div", { class: "actions" },
    may("admin") && h("button", { class: "primary", type: "button", onclick: async () => {
      const made = await edit(null);
      if (made) go(`services/${encodeURIComponent(made.name)}`);
    } }, "New service"))), content);
  const { items } = await get("v1/services");
  if (signal.aborted) return;
  if (!items.length) fill(content, empty("No services", "A service is where tasks are sent when they are due."));
  const rows = items.map((service) => {
    const cells = { state: h("td", { class: "end" }), running: h("td", { class: "right", "data-label": "running" }), waiting: h("td", { class: "right", "data-label": "waiting" }), late: h("td", { class: "right", "data-label": "p99" }) };
    body.append(h("tr", {}, h("td", {}, h("a", { href: `services/${encodeURIComponent(service.name)}` }, name(service.name, 60)), service.problem && h("span", { class: "sub" }, foreign(service.problem))),
      cells.state, h("td", { class: "wide break" }, h("span", { class: "soft" }, name(service.endpoint || "a function of a process", 80))), cells.running, cells.waiting, cells.late));
    return (figures) => {
      const found = figures?.[service.name];
      fill(cells.state, state(service, found));
      fill(cells.running, `${count(found?.running)} of ${count(found?.limit ?? service.concurrency)}`);
      fill(cells.waiting, count(found?.waiting));
      fill(cells.late, duration(found?.latency.p99));
    };
  });
  rows.forEach((update) => update(live.last.figures?.stats.services));
  watch(signal, "figures", ({ stats }) => rows.forEach((update) => update(stats.services)));
}

export async function service(page, { signal, go, parts: [encoded] }) {
  const path = `v1/services/${encoded}`;
  const figures = h("section", { class: "figures", "aria-label": "Figures" });
  const shown = new AbortController(); // ends with the page, or when it is read again
  const reload = () => { shown.abort(); return service(page, { signal, go, parts: [encoded] }); };
  const found = await get(path);
  const errors = await get(`${path}/errors`);
  if (signal.aborted) return;
  const stored = found.version > 0;
  const own = h("span");
  fill(page,
    h("div", { class: "page-head" }, h("h1", {}, name(found.name)), own, h("div", { class: "actions" }, may("admin") && stored && buttons(found, path, reload, go))),
    found.problem && h("p", { class: "banner bad" }, foreign(found.problem)), figures,
    h("div", { class: "columns side" },
      h("div", { class: "stack" }, card("Recent errors", `among ${plural(errors.looked_at, "task")}`, errorList(errors.items)),
        h("div", { class: "row" }, h("a", { class: "button", href: `tasks${encodeQuery({ service: found.name })}` }, "Tasks of this service"),
          h("a", { class: "button", href: `backlog${encodeQuery({ service: found.name, state: "failed" })}` }, "Failed tasks"))),
      h("div", { class: "stack" }, card("Configuration", stored ? `version ${found.version}` : "a task function", facts(found)))));
  const show = (all) => {
    const now = all?.[found.name];
    fill(own, state(found, now));
    const tile = (label, value, sub) => h("div", { class: "figure" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value), h("span", { class: "sub" }, sub));
    fill(figures, tile("Running", count(now?.running), `of ${count(now?.limit ?? found.concurrency)} permits`), tile("Waiting", count(now?.waiting), "for a permit"),
      tile("Calls", count(now?.latency.count), "since the start"), tile("Latency p50", duration(now?.latency.p50), "of all calls"), tile("Latency p99", duration(now?.latency.p99), "of all calls"));
  };
  show(live.last.figures?.stats.services);
  watch(AbortSignal.any([signal, shown.signal]), "figures", ({ stats }) => show(stats.services));
}

function buttons(found, path, reload, go) {
  const attempt = async (work, done) => {
    try {
      await work();
      toast(done);
    } catch (error) {
      toast(error.message, true);
    }
    await reload();
  };
  return [
    h("button", { type: "button", onclick: () => attempt(() => put(path, configuration({ ...found, enabled: !found.enabled }), { replaces: found }), found.enabled ? "Paused: its tasks wait" : "Resumed") }, found.enabled ? "Pause" : "Resume"),
    h("button", { type: "button", onclick: () => tryCall(found, path) }, "Test call"),
    h("button", { type: "button", onclick: async () => { await edit(found); await reload(); } }, "Edit"),
    h("button", { type: "button", class: "danger", onclick: async () => {
      if (await ask({ title: "Delete this service?", action: "Delete", danger: true, body: h("p", { class: "soft" }, "A service that has live tasks or schedules is kept."), check: () => remove(path).then(() => true) })) { toast("Deleted"); go("services"); }
    } }, "Delete"),
  ];
}

/** The body of a put that keeps everything, secrets included. */
function configuration(found) {
  const { name: _, version, updated_at, problem, ...rest } = found;
  return rest;
}

function errorList(groups) {
  if (!groups.length) return empty("No errors", "None of its newest tasks has one.");
  return h("ul", { class: "stack" }, groups.map((group) => h("li", {},
    h("div", { class: "row" }, h("b", {}, plural(group.count, "task")), group.retried > 0 && h("span", { class: "soft small" }, `${group.retried} to be retried`),
      h("span", { class: "faint small" }, "last ", ago(group.last_at)), h("a", { class: "small", href: `tasks/${group.task}` }, "the last task")),
    block(group.error, "Error"))));
}

function backoffText({ first, factor, max, delays }) {
  if (!delays.length) return `${duration(first)} × ${factor}, up to ${duration(max)}`;
  const rest = delays.length - MOST_DELAYS;
  return delays.slice(0, MOST_DELAYS).map(duration).join(", ") + (rest > 0 ? `, and ${rest} more` : "");
}

function facts(found) {
  const row = (term, ...value) => [h("dt", {}, term), h("dd", {}, value)];
  return h("dl", { class: "facts" }, row("Endpoint", name(found.endpoint || "–", 300)), row("Protocol", found.protocol), row("Timeout", found.timeout === null ? "no limit" : duration(found.timeout)),
    row("Attempts", found.max_attempts), row("Backoff", backoffText(found.backoff)),
    row("Concurrency", count(found.concurrency)), row("Rate", found.rate === null ? "no limit" : `${found.rate}/s`),
    row("Breaker", found.breaker ? `after ${found.breaker.failures} failures, for ${duration(found.breaker.pause)}` : "none"),
    row("Secret", found.secret ? "set" : "none"), row("Headers", Object.keys(found.headers).length ? Object.keys(found.headers).map((one) => h("span", { class: "tag" }, one)) : "none"),
    found.updated_at && row("Changed", ago(found.updated_at)));
}

async function tryCall(found, path) {
  const payload = h("textarea", { name: "payload", rows: "6", spellcheck: "false", ".value": "null" });
  const answer = await ask({ title: "Test call", action: "Call it", body: [h("p", { class: "soft small" }, "Calls the service once, now. No task is stored, and a paused service is called, too."), h("label", { class: "field" }, "Payload, as JSON", payload)],
    check: () => post(`${path}/try`, {}, { texts: { payload: checkedJson(payload.value) } }) });
  if (!answer) return;
  await ask({ title: "Result of the test call", action: "Close", cancel: false, body: h("div", { class: "stack" }, h("div", { class: "row" }, pill(answer.event, TEST_EVENTS[answer.event] ?? answer.event), h("span", { class: "soft" }, `in ${duration(answer.seconds)}`)),
    answer.error !== null && block(answer.error, "Error"), answer.result !== null && block(indent(textOf(answer, "result")), "Result")) });
}

/** Headers as lines `name: value`, and back. */
const headerLines = (headers) => Object.entries(headers ?? {}).map(([one, value]) => `${one}: ${value}`).join("\n");
function parseHeaders(text) {
  return Object.fromEntries(text.split("\n").filter((line) => line.trim()).map((line) => {
    const colon = line.indexOf(":");
    if (colon < 1) throw new Error(`a header is a line "name: value"; got "${line}"`);
    return [line.slice(0, colon).trim(), line.slice(colon + 1).trim()];
  }));
}

/** Ask for the configuration of a service, and store it; return it, or null. */
function edit(found) {
  const now = found ?? { endpoint: "", timeout: 30, max_attempts: 5, backoff: { first: 1, factor: 2, max: 3600, jitter: 0.1, delays: [] }, concurrency: 100, rate: null, breaker: BREAKER, enabled: true, protocol: "http", feedback_timeout: 3600, confirmed: "finished", cloudevents: null };
  const input = (label, key, value, more = {}, hint = null) => h("label", { class: more.wide ? "field wide" : "field" }, label, h("input", { name: key, value: value ?? "", ...more, wide: null }), hint && h("span", { class: "hint" }, hint));
  const number = (label, key, value, more = {}) => input(label, key, value, { type: "number", step: "any", min: "0", required: !more.placeholder, ...more });
  const choice = (label, key, value, options, hint = null) => h("label", { class: "field" }, label, h("select", { name: key }, options.map(([one, text]) => h("option", { value: one, selected: one === (value ?? "") }, text))), hint && h("span", { class: "hint" }, hint));
  const group = (title, ...fields) => h("fieldset", { class: "group wide" }, h("legend", {}, title), h("div", { class: "form-grid" }, fields));
  const headers = h("textarea", { name: "headers", rows: "2", spellcheck: "false", placeholder: "authorization: Bearer …", ".value": headerLines(found?.headers) });
  const guarded = found && (found.secret || Object.keys(found.headers).length);
  const messages = [
    choice("Confirmed message", "confirmed", now.confirmed, [["finished", "ends its task"], ["running", "leaves it running"]], "Message brokers only."),
    choice("CloudEvents", "cloudevents", now.cloudevents, [["", "no"], ["binary", "binary"], ["structured", "structured"]], "Message brokers only.")];
  const offerMessages = (protocol) => messages.forEach((one) => {
    const without = WITHOUT_MESSAGES.includes(protocol);
    one.classList.toggle("hidden", without);
    if (without) one.querySelector("select").selectedIndex = 0;
  });
  offerMessages(now.protocol);
  const body = h("div", { class: "form-grid" },
    !found && input("Name", "name", "", { required: true }),
    !found && [input("Protocol", "protocol", now.protocol, { required: true, list: "protocols", oninput: (event) => offerMessages(event.target.value) }), h("datalist", { id: "protocols" }, PROTOCOLS.map((one) => h("option", { value: one })))],
    input("Endpoint", "endpoint", now.endpoint, { required: true, wide: true, placeholder: "a URL" }, guarded ? "Another origin requires the secret and the values of the headers again." : null),
    group("Calls", number("Timeout, seconds", "timeout", now.timeout, { placeholder: "no limit" }), number("Concurrency", "concurrency", now.concurrency, { step: "1", min: "1" }), number("Rate per second", "rate", now.rate, { placeholder: "no limit" })),
    group("Retries", number("Attempts", "max_attempts", now.max_attempts, { step: "1", min: "1" }), number("First retry after, s", "first", now.backoff.first), number("Longest wait, s", "max", now.backoff.max),
      input("Or these waits, s", "delays", now.backoff.delays.join(", "), { placeholder: "none" }, "Instead of a growing wait, such as 60, 300, 3600. The last one repeats.")),
    group("Access", input("Secret", "secret", "", { type: "password", autocomplete: "new-password", placeholder: found?.secret ? PLACEHOLDER : "none" }, found?.secret ? "Empty: it stays." : "Signs each call."),
      found?.secret && h("label", { class: "check" }, h("input", { type: "checkbox", name: "without_secret" }), "Remove the secret"),
      h("label", { class: "field wide" }, "Headers, one in a line", headers, h("span", { class: "hint" }, `A value of ${PLACEHOLDER} stays as it is.`))),
    h("details", { class: "wide" }, h("summary", {}, "Breaker, backoff and feedback"), h("div", { class: "form-grid" },
      number("Breaker: failures", "failures", now.breaker?.failures, { step: "1", placeholder: "none" }), number("Breaker: pause, s", "pause", (now.breaker ?? BREAKER).pause), number("Breaker: longest pause, s", "max_pause", (now.breaker ?? BREAKER).max_pause), number("Breaker: probes", "probes", (now.breaker ?? BREAKER).probes, { step: "1", min: "1" }),
      number("Backoff: factor", "factor", now.backoff.factor), number("Backoff: jitter", "jitter", now.backoff.jitter, { max: "1" }), number("Feedback within, s", "feedback_timeout", now.feedback_timeout), messages)),
    h("label", { class: "check wide" }, h("input", { type: "checkbox", name: "enabled", checked: now.enabled }), "Send its tasks"));
  return ask({ title: found ? `Edit ${found.name}` : "New service", action: "Store", large: true, body, check: (data) => {
    const value = { endpoint: data.endpoint, protocol: data.protocol ?? now.protocol, timeout: data.timeout ? Number(data.timeout) : null, max_attempts: Number(data.max_attempts), concurrency: Number(data.concurrency), rate: data.rate ? Number(data.rate) : null,
      backoff: { first: Number(data.first), factor: Number(data.factor), max: Number(data.max), jitter: Number(data.jitter), delays: data.delays.split(/[\s,]+/).filter(Boolean).map(Number) },
      breaker: data.failures ? { failures: Number(data.failures), pause: Number(data.pause), max_pause: Number(data.max_pause), probes: Number(data.probes) } : null,
      headers: parseHeaders(headers.value), feedback_timeout: Number(data.feedback_timeout), confirmed: data.confirmed, cloudevents: data.cloudevents || null, enabled: Boolean(data.enabled) };
    if (data.without_secret) value.secret = null;
    else if (data.secret) value.secret = data.secret;
    return put(`v1/services/${encodeURIComponent(found?.name ?? data.name)}`, value, { replaces: found });
  } });
}
