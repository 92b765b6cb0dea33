// Numbers, durations and times as text.

const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const WHOLE = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat([], { month: "short", day: "numeric" });
const YEAR = new Intl.DateTimeFormat([], { year: "numeric", month: "short", day: "numeric" });

/** The difference between the server's clock and this one, in milliseconds. */
export const clock = { offset: 0 };

/** The server's time. */
export const now = () => Date.now() + clock.offset;

export const count = (n) => (n === null || n === undefined ? "–" : n >= 100000 ? SHORT.format(n) : WHOLE.format(n));

export const plural = (n, one, many = `${one}s`) => `${WHOLE.format(n)} ${n === 1 ? one : many}`;

export function rate(n) {
  if (n === null || n === undefined) return "–";
  if (n >= 10000) return SHORT.format(n);
  return n >= 100 ? WHOLE.format(Math.round(n)) : n >= 10 ? n.toFixed(1) : n === 0 ? "0" : n.toFixed(2);
}

/** Seconds as a short duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size < 0.001) return size === 0 ? "0 ms" : `${(seconds * 1e3).toFixed(1)} ms`;
  if (size < 1) return `${Number((seconds * 1e3).toFixed(size < 0.01 ? 1 : 0))} ms`;
  if (size < 10) return `${Number(seconds.toFixed(2))} s`;
  if (size < 90) return `${seconds.toFixed(0)} s`;
  if (size < 5400) return `${(seconds / 60).toFixed(0)} min`;
  if (size < 129600) return `${Number((seconds / 3600).toFixed(1))} h`;
  return `${Number((seconds / 86400).toFixed(1))} d`;
}

/** A time as text in the reader's zone. */
export function time(text) {
  if (!text) return "–";
  const at = new Date(text);
  const days = Math.abs(at - now()) / 864e5;
  const clock = CLOCK.format(at);
  if (days < 0.5 && at.getDate() === new Date(now()).getDate()) return clock;
  return days < 180 ? `${DAY.format(at)}, ${clock}` : `${YEAR.format(at)}, ${clock}`;
}

/** How far a time is from now. */
export function relative(text) {
  if (!text) return "";
  const seconds = (new Date(text) - now()) / 1000;
  const size = Math.abs(seconds) < 10 ? Math.round(Math.abs(seconds)) : Math.abs(seconds);
  if (size < 1) return "now";
  return seconds > 0 ? `in ${duration(size)}` : `${duration(size)} ago`;
}

export const bytes = (n) => (n < 1024 ? `${n} bytes` : n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`);

/** Parse "90", "5m", "2h" or "1d" as seconds; throw for anything else. */
export function parseDelay(text) {
  const match = /^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|d)?\s*$/.exec(text);
  if (!match) throw new Error(`a delay is a number with s, m, h or d, such as 90s or 2h; got "${text}"`);
  return Number(match[1]) * { ms: 0.001, s: 1, m: 60, min: 60, h: 3600, d: 86400 }[match[2] ?? "s"];
}

/** The value of an input of local time, or null. */
export const fromLocal = (text) => (text ? new Date(text).toISOString() : null);
export function toLocal(text) {
  const at = new Date(text);
  return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19);
}
