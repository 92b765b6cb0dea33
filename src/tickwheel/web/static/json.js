// JSON as text: a payload is shown and stored as it was sent. Parsing it would change large numbers,
// the order of keys, duplicate keys, and 1.0.

const SPACE = " \t\n\r";
const MARKS = "{}[],:";

/** Return the end of the string that begins at `at`. */
function stringEnd(text, at) {
  for (let end = text.indexOf('"', at + 1); end >= 0; end = text.indexOf('"', end + 1)) {
    let slashes = 0;
    while (text[end - 1 - slashes] === "\\") slashes++;
    if (slashes % 2 === 0) return end + 1;
  }
  return text.length;
}

/** Yield the first character, the beginning and the end of each token. */
function* tokens(text) {
  for (let at = 0; at < text.length;) {
    const mark = text[at];
    let end = at + 1;
    if (mark === '"') end = stringEnd(text, at);
    else if (!SPACE.includes(mark) && !MARKS.includes(mark)) {
      while (end < text.length && !SPACE.includes(text[end]) && !MARKS.includes(text[end])) end++;
    }
    if (!SPACE.includes(mark)) yield [mark, at, end];
    at = end;
  }
}

/** Return the text of a member of an object, as it is in the object's text; null if there is none. */
export function memberText(text, member) {
  let depth = 0;
  let key = null;
  let start = -1; // of the member's value
  for (const [mark, at, end] of tokens(text)) {
    if (depth === 1) {
      if (start < 0 && mark === '"') key = JSON.parse(text.slice(at, end));
      else if (start < 0 && mark === ":") start = end;
      else if (mark === "," || mark === "}") {
        if (key === member) return text.slice(start, at).trim();
        start = -1;
      }
    }
    if (mark === "{" || mark === "[") depth++;
    else if (mark === "}" || mark === "]") depth--;
  }
  return null;
}

/** Return JSON with line breaks and indentation; every token stays as it is. */
export function indent(text) {
  let shown = "";
  let depth = 0;
  let before = "";
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [mark, at, end] of tokens(text)) {
    const opened = before === "{" || before === "[";
    const closes = mark === "}" || mark === "]";
    if (closes) depth--;
    if (closes ? !opened : opened || before === ",") shown += line();
    shown += mark === ":" ? ": " : text.slice(at, end);
    if (mark === "{" || mark === "[") depth++;
    before = mark;
  }
  return shown;
}

/** Return a text that a user has written if it is JSON; empty: null. */
export function checkedJson(text) {
  if (!text.trim()) return "null";
  try { JSON.parse(text); } catch (error) { throw new Error(`the payload is not JSON: ${error.message}`); }
  return text;
}

/** Return an object as JSON; the members in `texts` are JSON already. */
export function encode(value, texts) {
  const members = Object.entries({ ...value, ...texts }).filter(([, one]) => one !== undefined);
  return `{${members.map(([key, one]) => `${JSON.stringify(key)}:${key in texts ? one : JSON.stringify(one)}`).join(",")}}`;
}
