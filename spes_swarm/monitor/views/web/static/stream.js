// The connection to the monitor: follows its event stream, detects silence, and reconnects by itself.

const SILENCE_MS = 20_000; // the monitor sends a heartbeat every 5 s
const HIDDEN_MS = 30_000; // browsers allow six connections to a host: hidden tabs release theirs
const RETRY_MS = [500, 1_000, 2_000, 4_000, 8_000];

export class Stream extends EventTarget {
  /** Keeps `store` up to date; emits `link` events {status: "live" | "connecting" | "gone" | "busy", since}. */
  constructor(store) {
    super();
    this._store = store;
    this._events = null;
    this._failures = 0;
    this._since = Date.now();
    this._status = "connecting";
    this._timer = 0;
    this._hiddenTimer = 0;
    document.addEventListener("visibilitychange", () => this._visibility());
    addEventListener("pagehide", () => this._close());
    addEventListener("pageshow", (event) => event.persisted && this.open());
    addEventListener("online", () => this._events === null && this.open());
  }

  /** Reconnects at once. */
  open() {
    this._close();
    const events = new EventSource("/api/events");
    this._events = events;
    const heard = (handle) => (event) => {
      this._failures = 0;
      this._expectSign();
      this._setStatus("live");
      handle(JSON.parse(event.data));
    };
    events.addEventListener("state", heard((state) => {
      this._store.replace(state);
      this._fetchHistory();
    }));
    events.addEventListener("change", heard((change) => this._store.change(change)));
    events.addEventListener("beat", heard(() => {}));
    events.addEventListener("error", () => this._retry());
    this._expectSign();
  }

  async _fetchHistory() {
    const events = this._events;
    try {
      const answer = await fetch("/api/history", { cache: "no-store" });
      if (!answer.ok) throw new Error(`history: ${answer.status}`);
      const points = await answer.json();
      if (events === this._events) this._store.replaceHistory(points);
    } catch {
      // If the monitor is gone, the stream breaks as well; otherwise only this request has failed.
      if (events === this._events) setTimeout(() => events === this._events && this._fetchHistory(), 3_000);
    }
  }

  _expectSign() {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._retry(), SILENCE_MS);
  }

  _retry() {
    this._close();
    const wait = RETRY_MS[Math.min(this._failures, RETRY_MS.length - 1)];
    this._failures += 1;
    if (this._failures > 1) this._diagnose();
    else this._setStatus("connecting");
    this._timer = setTimeout(() => this.open(), wait);
  }

  /** An event stream does not report why it ended; a plain request distinguishes a monitor that is gone from a full one. */
  async _diagnose() {
    let status = "gone";
    try {
      if ((await fetch("/healthz", { cache: "no-store", signal: AbortSignal.timeout(4_000) })).ok) status = "busy";
    } catch {
      // gone
    }
    if (this._failures > 1) this._setStatus(status);
  }

  _close() {
    clearTimeout(this._timer);
    this._events?.close();
    this._events = null;
  }

  _visibility() {
    clearTimeout(this._hiddenTimer);
    if (document.hidden) this._hiddenTimer = setTimeout(() => this._close(), HIDDEN_MS);
    else if (this._events === null) this.open();
  }

  _setStatus(status) {
    if (status === this._status) return;
    if (this._status === "live") this._since = Date.now();
    this._status = status;
    this.dispatchEvent(new CustomEvent("link", { detail: { status, since: this._since } }));
  }
}
