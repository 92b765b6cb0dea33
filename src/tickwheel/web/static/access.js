// Tokens and the audit log, for admins.

import { get, post, remove, session } from "./api.js";
import { ago, ask, empty, fill, foreign, h, name, toast } from "./dom.js";
import { parseDelay, time } from "./format.js";

const SCOPES = { submit: "submit and change tasks", read: "see everything", admin: "everything" };

export async function tokens(page, { signal, go }) {
  const { items } = await get("v1/tokens");
  if (signal.aborted) return;
  const reload = () => tokens(page, { signal, go });
  const heads = ["Token", "Scopes", "Namespace", "Created", "Expires", ""];
  fill(page, h("div", { class: "page-head" }, h("h1", {}, "Tokens"), h("div", { class: "actions" }, h("button", { class: "primary", type: "button", onclick: () => create(items.length === 0 && !session.known.csrf, reload) }, "New token"))),
    h("section", { class: "card flush" }, items.length ? h("div", { class: "table-wrap" }, h("table", { class: "cards" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text || h("span", { class: "visually-hidden" }, "Actions"))))),
      h("tbody", {}, items.map((one) => h("tr", {}, h("td", { class: "wide" }, name(one.name, 60), h("span", { class: "sub mono" }, one.id)), h("td", {}, one.scopes.map((scope) => h("span", { class: "tag" }, scope))),
        h("td", { "data-label": "namespace" }, one.namespace === "*" ? "all" : name(one.namespace)), h("td", { class: "nowrap", "data-label": "created" }, ago(one.created_at)), h("td", { class: "nowrap", "data-label": "expires" }, one.expires_at ? time(one.expires_at) : "never"),
        h("td", { class: "right" }, h("button", { type: "button", class: "danger", "aria-label": `Revoke ${one.name}`, onclick: () => revoke(one, reload) }, "Revoke"))))))) : empty("No tokens", "Without a token, everybody on this machine may do everything.")));
}

async function revoke(token, reload) {
  const own = session.known.actor.startsWith(token.id);
  const done = await ask({ title: "Revoke this token?", action: "Revoke", danger: true, body: h("p", { class: "soft" }, own ? "It is your own: you will be signed out." : ["Programs and sessions that use ", name(token.name, 60), " are refused from now on."]), check: () => remove(`v1/tokens/${token.id}`).then(() => true) });
  if (!done) return;
  toast("Revoked");
  reload();
}

async function create(first, reload) {
  const body = h("div", { class: "form-grid" }, first && h("p", { class: "banner wide" }, "This is the first token: from then on every request needs one. Keep it, or you lock yourself out."),
    h("label", { class: "field" }, "Name", h("input", { name: "name", required: true, autocomplete: "off" })), h("label", { class: "field" }, "Namespace", h("input", { name: "namespace", value: first ? "*" : session.known.confined ? session.known.namespace : "*", autocomplete: "off" })),
    h("label", { class: "field" }, "Expires after", h("input", { name: "lifetime", placeholder: "never; 90d", autocomplete: "off" })),
    h("fieldset", { class: "field wide" }, h("legend", {}, "Scopes"), Object.entries(SCOPES).map(([scope, text]) => h("label", { class: "check" }, h("input", { type: "checkbox", name: `scope-${scope}`, checked: first ? scope === "admin" : scope === "read" }), `${scope}: ${text}`))));
  const made = await ask({ title: "New token", action: "Create", body, check: (data) => {
    const scopes = Object.keys(SCOPES).filter((scope) => data[`scope-${scope}`]);
    if (!scopes.length) throw new Error("choose a scope");
    return post("v1/tokens", { name: data.name, scopes, namespace: data.namespace || null, lifetime: data.lifetime ? parseDelay(data.lifetime) : null });
  } });
  if (!made) return;
  await ask({ title: "Keep this token", action: "Done", cancel: false, body: [h("p", { class: "soft" }, "It is shown this one time."), h("pre", { class: "text", tabindex: "0", role: "group", "aria-label": "Token" }, made.token)] });
  reload();
}

/** Who did it: a token's name above its id, or another word. */
function actor(text) {
  const [, id, called] = /^([0-9a-f]{12}) (.+)$/s.exec(text) ?? [];
  return id ? [name(called, 60), h("span", { class: "sub mono" }, id)] : name(text, 60);
}

/** What a change was; what has been created is told without the "none" that it was before. */
function detail(text) {
  const changes = text.split("; ").filter((one) => one.includes(" -> "));
  return changes.every((one) => one.includes(": none -> ")) ? text.replaceAll(": none -> ", ": ") : text.replaceAll(" -> ", " → ");
}

export async function audit(page, { signal }) {
  const list = h("tbody");
  const more = h("div", { class: "pager hidden" });
  const heads = ["Time", "Who", "What", "Which", "Detail"];
  const content = h("section", { class: "card flush" }, h("div", { class: "table-wrap" }, h("table", { class: "cards" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), list)), more);
  fill(page, h("div", { class: "page-head" }, h("h1", {}, "Audit log"), h("span", { class: "faint small" }, "Who changed what, newest first.")), content);
  const load = async (cursor) => {
    const found = await get("v1/audit", { cursor, limit: 50 });
    if (signal.aborted) return;
    list.append(...found.items.map((line) => h("tr", {}, h("td", { class: "nowrap", title: line.at }, time(line.at)), h("td", { class: "end" }, actor(line.actor)), h("td", {}, h("span", { class: "tag" }, line.action)), h("td", { class: "end break" }, name(line.target, 80)), h("td", { class: "wide break soft" }, foreign(detail(line.detail.slice(0, 1000)))))));
    more.classList.toggle("hidden", !found.next_cursor);
    fill(more, h("button", { type: "button", onclick: () => load(found.next_cursor) }, "Older"));
    if (!list.children.length) fill(content, empty("Nothing yet", "Changes of services, schedules and tokens are noted here."));
  };
  await load();
}
