// The JSON API, from a browser: the session's cookie and its CSRF token, and problems as errors.

export const session = { known: null, namespace: sessionStorage.getItem("tickwheel-namespace") };

export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

const url = (path) => new URL(path, document.baseURI);

/** Make a request; return the decoded answer, or throw a Problem. */
export async function request(method, path, body) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (session.known?.csrf && method !== "GET") headers["tickwheel-csrf"] = session.known.csrf;
  if (session.namespace) headers["tickwheel-namespace"] = session.namespace;
  let answer;
  try {
    answer = await fetch(url(path), {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
    });
  } catch {
    throw new Problem(0, "unreachable", "the server does not answer");
  }
  if (answer.status === 204) return null;
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    if (answer.status === 401 && path !== "v1/session") dispatchEvent(new Event("signed-out"));
    throw new Problem(answer.status, found.code, found.detail ?? `the server answered ${answer.status}`);
  }
  return found;
}

export const get = (path, query) => request("GET", path + encodeQuery(query));
export const post = (path, body = {}) => request("POST", path, body);
export const put = (path, body) => request("PUT", path, body);
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
  session.known = await request("GET", "v1/session");
  return session.known;
}

export async function signIn(token) {
  session.known = await request("POST", "v1/session", { token });
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
