// The frame of the dashboard: which page an address shows, navigation, theme and session.

import { chooseNamespace, may, Problem, readSession, request, session, signOut } from "./api.js";
import { ask, empty, fill, foreign, h, icon, name, toast } from "./dom.js";
import { live } from "./live.js";
import { audit, tokens } from "./access.js";
import { cluster } from "./cluster.js";
import { overview } from "./overview.js";
import { schedule, schedules } from "./schedules.js";
import { service, services } from "./services.js";
import { signInPage } from "./sign_in.js";
import { backlog, tasks } from "./tasks.js";
import { task } from "./task.js";

const PAGES = [
  [/^$/, "Overview", overview],
  [/^tasks$/, "Tasks", tasks],
  [/^tasks\/([0-9a-f]{32})$/, "Task", task],
  [/^backlog$/, "Backlog", backlog],
  [/^services$/, "Services", services],
  [/^services\/([^/]+)$/, "Service", service],
  [/^schedules$/, "Schedules", schedules],
  [/^schedules\/([^/]+)$/, "Schedule", schedule],
  [/^cluster$/, "Cluster", cluster],
  [/^tokens$/, "Tokens", tokens],
  [/^audit$/, "Audit log", audit],
  [/^sign-in$/, "Overview", (_, { go }) => go("./", { replace: true })], // the form was here
];
const LINKS = [
  ["", "Overview", "overview", "read"],
  ["tasks", "Tasks", "tasks", "read"],
  ["backlog", "Backlog", "backlog", "read"],
  ["services", "Services", "services", "read"],
  ["schedules", "Schedules", "schedules", "read"],
  ["cluster", "Cluster", "cluster", "read"],
  ["tokens", "Tokens", "tokens", "admin"],
  ["audit", "Audit log", "audit", "admin"],
];
const base = new URL(document.baseURI);
const main = document.getElementById("main");
let showing = new AbortController();

/** Return the path of an address below the base. */
const localPath = (address) => new URL(address, base).pathname.slice(base.pathname.length).replace(/\/$/, "");

/** Show a page of the dashboard, by its path and query. */
export function go(target, { replace = false } = {}) {
  const address = new URL(target, base);
  if (replace) history.replaceState(null, "", address);
  else if (address.href !== location.href) history.pushState(null, "", address);
  show();
}

function show() {
  showing.abort();
  showing = new AbortController();
  const { signal } = showing;
  const path = localPath(location.href);
  const [page, title, parts] = find(path);
  document.title = path === "" ? "tickwheel" : `${title} · tickwheel`;
  for (const link of document.querySelectorAll(".nav-link")) {
    const at = link.dataset.path;
    if (path === at || (at && path.startsWith(`${at}/`))) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone the links scroll
    } else link.removeAttribute("aria-current");
  }
  const content = h("div", { class: "page" });
  fill(main, content);
  if (document.activeElement !== document.body) main.focus({ preventScroll: true });
  scrollTo(0, 0);
  const fail = (error) => {
    if (signal.aborted || error.status === 401) return;
    if (error.status === 404) fill(content, h("h1", {}, "Not found"), h("section", { class: "card" }, empty("There is no such thing, or not any more", foreign(error.message))));
    else fill(content, h("h1", {}, "This did not work"), h("p", { class: "banner bad" }, foreign(error.message)));
    if (!(error instanceof Problem)) throw error;
  };
  try {
    Promise.resolve(page(content, { signal, go, parts, query: new URLSearchParams(location.search) })).catch(fail);
  } catch (error) {
    fail(error);
  }
}

function find(path) {
  for (const [pattern, title, page] of PAGES) {
    const match = pattern.exec(path);
    if (match) return [page, title, match.slice(1)];
  }
  return [(content) => fill(content, h("h1", {}, "Not found"), empty("There is no such page", "The navigation has all of them.")), "Not found", []];
}

/** Links inside the dashboard change the page without loading it. */
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || link.target) return;
  const address = new URL(link.href);
  if (address.origin !== base.origin || !address.pathname.startsWith(base.pathname) || link.hasAttribute("data-plain")) return;
  event.preventDefault();
  if (link.getAttribute("href") === "#main") main.focus(); // the base is not this page's address
  else go(address);
});
addEventListener("popstate", show);
addEventListener("unhandledrejection", (event) => {
  if (!(event.reason instanceof Problem)) return;
  event.preventDefault();
  if (event.reason.status !== 401) toast(event.reason.message, true); // with 401 the form is shown
});
addEventListener("signed-out", () => needToken());

function frame() {
  const known = session.known;
  fill(document.getElementById("nav"),
    h("a", { class: "brand", href: "./" }, h("img", { src: "static/favicon.svg", alt: "" }), "tickwheel"),
    LINKS.filter(([, , , scope]) => may(scope)).map(([path, title, symbol]) => h("a", { class: "nav-link", href: path || "./", "data-path": path }, icon(symbol), title)),
    h("a", { class: "nav-link", href: "lab", "data-plain": true }, icon("lab"), "Lab"),
    h("p", { class: "nav-foot" }, `version ${known.version}`, h("br"), h("a", { href: "openapi.json", "data-plain": true }, "API"), " · ", h("a", { href: "readyz", "data-plain": true }, "readiness")));
  const status = h("span", { class: "live", role: "status" });
  const told = () => {
    status.dataset.state = live.state;
    status.textContent = { live: "Live", lost: "Reconnecting …", paused: "Paused", off: "" }[live.state];
  };
  live.addEventListener("state", told);
  told();
  fill(document.getElementById("top"), status, h("span", { class: "grow" }), namespaceControl(),
    h("span", { class: "soft small nowrap actor" }, known.csrf ? name(known.actor.split(" ").slice(1).join(" "), 30) : "no token needed"),
    h("button", { class: "quiet icon", type: "button", "aria-label": "Change the theme", title: "Change the theme", onclick: changeTheme }, icon("theme")),
    known.csrf && h("button", { class: "quiet icon", type: "button", "aria-label": "Sign out", title: "Sign out", onclick: leave }, icon("leave")));
}

function namespaceControl() {
  const known = session.known;
  const shown = session.namespace ?? known.namespace;
  if (known.confined && !session.namespace) return h("span", { class: "tag" }, shown);
  return h("button", { class: "quiet", type: "button", title: "Choose a namespace", onclick: async () => {
    const input = h("input", { name: "namespace", value: shown, pattern: "[A-Za-z0-9._\\-]{1,50}", required: true });
    const answer = await ask({ title: "Namespace", action: "Use it", body: h("label", { class: "field" }, "Show the tasks of this namespace", input) });
    if (!answer) return;
    chooseNamespace(answer.namespace === "default" ? null : answer.namespace);
    frame();
    live.restart();
    show();
  } }, h("span", { class: "faint" }, "namespace"), name(shown, 30));
}

function changeTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = dark === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("tickwheel-theme", next);
  dispatchEvent(new Event("theme"));
}

async function leave() {
  await signOut();
  live.stop();
  needToken();
}

/** Ask for a token, then go on where the user was. */
function needToken() {
  live.stop();
  showing.abort();
  if (main.querySelector(".sign-in")) return; // keep what is typed
  const why = session.known?.csrf ? "Your session has ended: sign in again." : "";
  session.known = null;
  fill(document.getElementById("nav"));
  fill(document.getElementById("top"), h("a", { class: "brand", href: "./" }, h("img", { src: "static/favicon.svg", alt: "" }), "tickwheel"));
  fill(main, signInPage(begin, why));
  main.querySelector("input")?.focus();
}

/** Read the session and show the page; `signedIn`: right after the form. */
async function begin(signedIn = false) {
  try {
    await readSession();
  } catch (error) {
    if (error.status === 401 && !signedIn) return needToken();
    if (error.status === 401) throw new Error("The browser did not keep the session: allow cookies for this site.");
    fill(main, h("div", { class: "page" }, h("h1", {}, "The server cannot be used now"), h("p", { class: "banner bad" }, error.message)));
    return error.status && error.status < 500 && error.status !== 429 ? undefined : setTimeout(begin, 2000);
  }
  frame();
  if (!may("read")) {
    fill(main, h("div", { class: "page" }, h("h1", {}, "This token may not read"), h("p", { class: "banner" }, "The dashboard needs a token with the scope read.")));
    return undefined;
  }
  live.start();
  return show();
}

// A stream that fails may mean that the token was refused: ask each time, or it is tried for ever.
live.addEventListener("failed", () => {
  request("GET", "v1/session").catch((error) => {
    if (error.status === 401) needToken();
    else if (error.status && error.status < 500) toast(error.message, true);
  });
});
begin();
