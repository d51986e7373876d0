// The figures at the top, the state of the connection to the monitor, and the banner.

import { byId, setAttribute, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const TREND_ROUNDS = 10;

export class Headline {
  constructor(store) {
    this._store = store;
    this._link = { status: "connecting", since: Date.now() };
  }

  /** Shows the state of the connection to the monitor. */
  setLink(link) {
    this._link = link;
    this._drawLink();
  }

  /** Draws a new state. */
  draw() {
    const { head, points, peers } = this._store;
    if (head === null) return;
    const run = head.run;
    setText(byId("run-name"), run.name || "unnamed run");
    setText(
      byId("run-detail"),
      [run.model, format.plural(run.num_experts, "expert"), `${format.plural(head.inner_steps ?? run.inner_steps, "step")} a round`, run.run_id].join(" · "),
    );
    setText(byId("round"), format.whole(head.round));
    setText(byId("train-loss"), format.loss(head.train_loss));
    setText(byId("eval-loss"), format.loss(head.eval_loss));
    setText(byId("rate"), format.count(head.tokens_per_second));
    setText(byId("tokens"), format.count(head.tokens_total));
    setText(byId("peer-count"), format.whole([...peers.values()].filter((peer) => peer.state !== "left").length));
    this._drawNotes(head, points, peers);
    this.tick();
    this._drawLink();
    const lossText = head.train_loss == null ? "" : ` · loss ${format.loss(head.train_loss)}`;
    document.title = `round ${head.round}${lossText} · ${run.name || "spes_swarm"}`;
  }

  /** Updates what changes with the clock alone. */
  tick() {
    const head = this._store.head;
    if (head === null) return;
    let note = "";
    let progress = head.round_progress;
    if (head.next_round_s !== null && this._link.status === "live") {
      const passed = Math.max(0, this._store.now() - head.time);
      const left = Math.max(0, head.next_round_s - passed);
      note = left > 0 ? `next in ${format.age(Math.ceil(left))}` : "next one due";
      if (head.next_round_s > 0) progress += (1 - progress) * Math.min(1, passed / head.next_round_s);
    }
    setText(byId("next-round"), note);
    byId("round-progress").value = progress;
  }

  _drawNotes(head, points, peers) {
    setText(byId("train-note"), _trend(points, "train_loss"));
    const measured = (head.eval_round ?? head.round) === head.round ? "" : `round ${format.whole(head.eval_round)}`;
    setText(byId("eval-note"), [_error(head.eval_loss_stderr), measured || _trend(points, "eval_loss")].filter(Boolean).join(" · "));
    const states = new Map();
    for (const peer of peers.values()) states.set(peer.state, (states.get(peer.state) ?? 0) + 1);
    setText(byId("peer-note"), [...states].sort((a, b) => b[1] - a[1]).map(([state, n]) => `${format.whole(n)} ${state}`).join(", "));
    const busy = (states.get("training") ?? 0) + (states.get("syncing") ?? 0);
    setText(byId("rate-note"), busy ? `${format.count(head.tokens_per_second / busy)} per training peer` : "");
    const steps = head.steps ?? head.round * head.run.inner_steps;
    const total = head.run.total_steps;
    const done = steps > total ? `schedule ended at step ${format.whole(total)}` : `step ${format.whole(steps)} of ${format.whole(total)}`;
    setText(byId("tokens-note"), done);
  }

  _drawLink() {
    const head = this._store.head;
    const { status, since } = this._link;
    const at = format.clockTime(since / 1000);
    const pill = byId("link");
    const quiet = status === "live" && head !== null && head.status !== "live";
    setAttribute(pill, "data-link", quiet ? head.status : status);
    const texts = { live: "live", connecting: "connecting", gone: "monitor gone", busy: "waiting", no_peers: "no peers", replay: "replay" };
    setText(byId("link-text"), texts[quiet ? head.status : status]);
    document.documentElement.classList.toggle("stale", status === "gone" || status === "busy");
    let message = "";
    if (status === "gone") {
      message = head === null
        ? "The monitor does not answer. Retrying …"
        : `The monitor has not answered since ${at}. The page shows the state at that time. Retrying …`;
    } else if (status === "busy") {
      message = "The monitor has too many open pages. Close some, or wait: retrying …";
    } else if (head?.status === "no_peers") {
      const silent = head.silent_s;
      message = silent === null
        ? "No peers. None has been seen in this run yet; they appear here once they join."
        : `No peers. The last one was seen ${format.duration(silent)} ago. They appear here once they return.`;
    }
    setText(byId("banner"), message);
    setHidden(byId("banner"), message === "");
  }
}

/** The standard error of a loss, as text. */
function _error(stderr) {
  return stderr == null ? "" : `± ${format.loss(stderr)}`;
}

/** How a loss has changed over the last rounds. */
function _trend(points, field) {
  const isKnown = (point) => point[field] !== null;
  const newest = points.findLast(isKnown);
  if (newest === undefined) return "";
  const before = points.findLast((point) => isKnown(point) && point.round <= newest.round - TREND_ROUNDS) ?? points.find(isKnown);
  const rounds = newest.round - before.round;
  if (rounds === 0) return "";
  const change = newest[field] - before[field];
  const amount = Math.abs(change).toFixed(3);
  const text = amount === "0.000" ? "steady" : `${change < 0 ? "▼" : "▲"} ${amount}`;
  return `${text} in ${format.plural(rounds, "round")}`;
}
