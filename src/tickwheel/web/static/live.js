// The stream of figures: it reconnects by itself, and rests while the page is hidden.

import { encodeQuery, session } from "./api.js";
import { clock } from "./format.js";

const NAMES = ["figures", "store", "wheel", "cluster", "due", "history", "trouble"];
const MAX_WAIT = 10000;
const CLOCK_MESSAGES = 20;
const HISTORY = 600; // rows of figures that are kept for the charts

class Live extends EventTarget {
  last = {};
  state = "off";
  #source = null;
  #timer = null;
  #wait = 500;
  #wanted = false;
  #offsets = [];
  #again = false; // whether a stream that ended is being replaced

  start() {
    this.#wanted = true;
    if (!this.#source && !document.hidden) this.#connect();
  }

  stop() {
    this.#wanted = false;
    this.#close("off");
  }

  restart() {
    this.last = {};
    if (!this.#wanted) return;
    this.#close("off");
    this.#connect();
  }

  resume() {
    if (document.hidden) this.#close("paused");
    else if (this.#wanted && !this.#source) this.#connect();
  }

  #connect() {
    clearTimeout(this.#timer);
    const target = new URL(`v1/live${encodeQuery({ namespace: session.namespace })}`, document.baseURI);
    const source = (this.#source = new EventSource(target));
    source.addEventListener("open", () => {
      this.#wait = 500;
      this.#again = false;
      this.#become("live");
    });
    source.addEventListener("error", () => {
      if (source !== this.#source) return;
      if (this.state === "live" && !this.#again) { // a server may end a stream that goes on elsewhere
        this.#again = true;
        this.#source.close();
        this.#connect();
        return;
      }
      this.#close("lost");
      this.dispatchEvent(new Event("failed"));
      if (!this.#wanted) return;
      this.#timer = setTimeout(() => this.#wanted && !document.hidden && this.#connect(), this.#wait);
      this.#wait = Math.min(MAX_WAIT, this.#wait * 1.7);
    });
    for (const name of NAMES) {
      source.addEventListener(name, (event) => {
        const data = JSON.parse(event.data);
        this.last[name] = data;
        if (name === "figures") this.#remember(data);
        if (typeof data?.at === "number") this.#setClock(data.at - Date.now());
        this.dispatchEvent(new CustomEvent(name, { detail: data }));
      });
    }
  }

  /** Append figures to the history, which a page that is opened later shows. */
  #remember({ at, rates, lateness }) {
    const rows = this.last.history?.rows ?? [];
    if (rows.at(-1)?.[0] === at) return;
    const row = [at, ...["submitted", "sent", "finish", "retry", "fail"].map((one) => rates[one] ?? null), lateness.p50, lateness.p99];
    this.last.history = { at, rows: [...rows.slice(1 - HISTORY), row] };
  }

  /** The message that was under way for the shortest time tells the server's clock best. */
  #setClock(offset) {
    this.#offsets = [...this.#offsets.slice(1 - CLOCK_MESSAGES), offset];
    clock.offset = Math.max(...this.#offsets);
  }

  #close(state) {
    clearTimeout(this.#timer);
    this.#again = false;
    this.#source?.close();
    this.#source = null;
    this.#become(state);
  }

  #become(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}

export const live = new Live();
document.addEventListener("visibilitychange", () => live.resume());

/** Listen while a page is shown: now if there is a message already, then to each new one. */
export function watch(signal, name, listener) {
  live.addEventListener(name, (event) => listener(event.detail), { signal });
  if (live.last[name] !== undefined) listener(live.last[name]);
}
