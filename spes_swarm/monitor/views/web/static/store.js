// The page's copy of the monitor's state, updated by whole states and changes (see changes.py).

export class Store extends EventTarget {
  constructor() {
    super();
    this.head = null; // the state without peers and experts; null until the first one arrives
    this.peers = new Map(); // by peer id, each with `seen`: the time of its last record
    this.experts = [];
    this.points = []; // the history, by round
    this._skew = 0; // the monitor's clock minus ours
    this._pending = null;
  }

  /** The monitor's current time; fixed in a replay. */
  now() {
    if (this.head?.status === "replay") return this.head.time;
    return Date.now() / 1000 + this._skew;
  }

  /** Replaces the whole state. */
  replace(state) {
    const { peers, experts, ...head } = state;
    const otherRun = this.head !== null && this.head.run.run_id !== head.run.run_id;
    this.head = head;
    this._setClock(head.time);
    this.peers = new Map(peers.map((peer) => [peer.peer_id, { ...peer, seen: head.time - peer.age_s }]));
    this.experts = experts;
    if (otherRun) this.points = [];
    this._tell({ all: true, history: otherRun });
  }

  /** Applies a change to the last state. */
  change({ time, head, peers = [], gone = [], experts = [], history = [] }) {
    if (this.head === null) return;
    Object.assign(this.head, head, { time });
    this._setClock(time);
    for (const fields of peers) {
      const peer = this.peers.get(fields.peer_id) ?? {};
      Object.assign(peer, fields);
      if (fields.age_s !== undefined) peer.seen = time - fields.age_s;
      this.peers.set(fields.peer_id, peer);
    }
    for (const id of gone) this.peers.delete(id);
    for (const entry of experts) this.experts[entry.expert] = entry;
    this.addPoints(history);
    this._tell({ peers: peers.length + gone.length > 0, experts: experts.map((entry) => entry.expert) });
  }

  /** Adds or corrects points of the history; rounds mostly come in order. */
  addPoints(points) {
    for (const point of points) {
      let index = this.points.length;
      while (index > 0 && this.points[index - 1].round > point.round) index--;
      if (index > 0 && this.points[index - 1].round === point.round) this.points[index - 1] = point;
      else this.points.splice(index, 0, point);
    }
    if (points.length) this._tell({ history: true });
  }

  /** Replaces the history, and keeps newer points that arrived since the request. */
  replaceHistory(points) {
    const last = points.length ? points[points.length - 1].round : -1;
    const newer = this.points.filter((point) => point.round > last);
    this.points = points;
    this.addPoints(newer);
    this._tell({ history: true });
  }

  _setClock(time) {
    const skew = time - Date.now() / 1000;
    // Small differences are network latency, not clock skew: following them would make ages jitter.
    if (Math.abs(skew - this._skew) > 0.5) this._skew = skew;
  }

  /** Reports what changed, at most once per frame. */
  _tell(what) {
    if (this._pending === null) {
      this._pending = { all: false, peers: false, experts: new Set(), history: false };
      requestAnimationFrame(() => {
        const detail = this._pending;
        this._pending = null;
        this.dispatchEvent(new CustomEvent("change", { detail }));
      });
    }
    const pending = this._pending;
    pending.all ||= what.all ?? false;
    pending.peers ||= what.peers ?? false;
    pending.history ||= what.history ?? false;
    for (const expert of what.experts ?? []) pending.experts.add(expert);
  }
}
