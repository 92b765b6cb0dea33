// The JSON API, from a browser: the session's cookie and its CSRF token, and problems as errors.

import { encode, memberText } from "./json.js";

export const session = { known: null, namespace: sessionStorage.getItem("tickwheel-namespace") };

export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

const CHANGED = "Somebody else has changed it since you opened it. Nothing was stored: cancel, look at the change, and edit it again.";
const EXISTS = "There is one of this name already. Nothing was stored.";
const url = (path) => new URL(path, document.baseURI);

const answers = new WeakMap(); // from a decoded answer to its text and its version

/** The JSON of a member of an answer, as the server sent it. */
export const textOf = (found, member) => memberText(answers.get(found).text, member);

/** Make a request; return the decoded answer, or throw a Problem.
 *
 * `texts`: members of the body that are JSON already. `replaces`: the answer whose version must still
 * be the stored one; null: nothing may be stored yet. */
export async function request(method, path, body, { texts = {}, replaces } = {}) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (replaces === null) headers["if-none-match"] = "*";
  else if (replaces) headers["if-match"] = answers.get(replaces).etag;
  if (session.known?.csrf && method !== "GET") headers["tickwheel-csrf"] = session.known.csrf;
  if (session.namespace) headers["tickwheel-namespace"] = session.namespace;
  let answer;
  try {
    answer = await fetch(url(path), {
      method, headers, body: body === undefined ? undefined : encode(body, texts), cache: "no-store",
    });
  } catch {
    throw new Problem(0, "unreachable", "the server does not answer");
  }
  if (answer.status === 204) return null;
  const text = await answer.text();
  const found = decode(text);
  if (!answer.ok) {
    if (answer.status === 401 && path !== "v1/session") dispatchEvent(new Event("signed-out"));
    const conflict = answer.status === 412 && (replaces === null ? EXISTS : CHANGED);
    throw new Problem(answer.status, found.code, conflict || (found.detail ?? `the server answered ${answer.status}`));
  }
  answers.set(found, { text, etag: answer.headers.get("etag") });
  return found;
}

function decode(text) {
  try { return JSON.parse(text); } catch { return {}; }
}

export const get = (path, query) => request("GET", path + encodeQuery(query));
export const post = (path, body = {}, options = {}) => request("POST", path, body, options);
export const put = (path, body, options) => request("PUT", path, body, options);
export const remove = (path) => request("DELETE", path);

/** Encode a query; a list repeats its name, and what is empty is left out. */
export function encodeQuery(query = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") found.append(name, one);
    }
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

export const may = (scope) => Boolean(session.known?.scopes.includes(scope));

/** Read who we are; throws a Problem of status 401 if a token is needed. */
export async function readSession() {
  session.known = await inAllowedNamespace(() => request("GET", "v1/session"));
  return session.known;
}

export async function signIn(token) {
  session.known = await inAllowedNamespace(() => request("POST", "v1/session", { token }));
}

/** Make a request; leave the chosen namespace if the token is for another one. */
async function inAllowedNamespace(ask) {
  try {
    return await ask();
  } catch (error) {
    if (error.status !== 403 || !session.namespace) throw error;
    chooseNamespace(null);
    return ask();
  }
}

export async function signOut() {
  await request("DELETE", "v1/session");
  session.known = null;
}

/** Choose the namespace of all requests; null: the token's own. */
export function chooseNamespace(name) {
  session.namespace = name || null;
  if (name) sessionStorage.setItem("tickwheel-namespace", name);
  else sessionStorage.removeItem("tickwheel-namespace");
}
