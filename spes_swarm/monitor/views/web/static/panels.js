// Consensus, who is excluded, faults, refused records, and how to join.

import { byId, fillList, make, setAttribute, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const FAULTS_SHOWN = 50;
const COPIED_MS = 2_500;

/** The sentence about the data for newcomers, after that about machines. */
function dataNote(data, command) {
  if (!data) return "";
  return ` The run trains on ${data}${command.includes(" --data ") ? ": give the path of your copy with --data" : ""}.`;
}

function admissionNote(admission, command) {
  if (admission === "allow-list") return " The run is private: its founder has to admit you by your peer id first.";
  if (admission !== "invite" || command.includes(" --invitation ")) return "";
  return " The run is private: ask a member for an invitation, and add it with --invitation.";
}

export class Panels {
  constructor(store) {
    this._store = store;
    byId("join-copy").addEventListener("click", () => this._copy());
  }

  draw() {
    if (this._store.head === null) return;
    this._drawConsensus();
    this._drawAccused();
    this._drawFaults();
    this._drawRefused();
    this._drawJoin();
  }

  /** The ages of faults grow with the clock. */
  tick() {
    if (this._store.head !== null) this._drawFaults();
  }

  _name(id) {
    const peer = this._store.peers.get(id);
    return peer ? format.peerName(peer) : id.slice(-8);
  }

  _drawConsensus() {
    const { digest, agree, differ } = this._store.head.consensus;
    const verdict = byId("verdict");
    setAttribute(verdict, "data-verdict", digest === null ? "none" : differ.length ? "differ" : "agree");
    let text = "No round has been committed yet.";
    if (digest !== null && differ.length) text = `${format.plural(differ.length, "peer")} ${differ.length === 1 ? "differs" : "differ"}`;
    else if (digest !== null) text = agree === 1 ? "Only one peer: nothing to compare" : `All ${format.whole(agree)} digests agree`;
    setText(verdict, text);
    setText(byId("verdict-note"), digest === null ? "" : `${format.plural(agree, "peer")} at the swarm's round: ${digest.slice(0, 16)}…`);
    fillList(byId("differ"), differ, () => make("li"), (item, id) => setText(item, this._name(id)));
  }

  /** What only few say, and no proof shows, is worded as their claim. */
  _drawAccused() {
    const { excluded, without_duty: idle } = this._store.head;
    const name = (one) => one.name || one.peer_id.slice(-8);
    const by = (one) => `${format.whole(one.by)} of ${format.whole(one.of)}`;
    const lines = excluded.map((one) => {
      const text = one.verified
        ? `Excluded: ${name(one)} lied in round ${one.round}, part ${one.part}: ${one.why}. Named by ${by(one)}; proof verified.`
        : 2 * one.by > one.of
          ? `Excluded: ${name(one)}, named by ${by(one)}. No proof verified.`
          : `Claimed by ${by(one)}: ${name(one)} is excluded. No proof verified.`;
      return { text, title: `${one.peer_id}, first seen ${format.dateTime(one.since)}${one.proof ? `, ${one.proof}` : ""}` };
    });
    for (const one of idle) {
      const kinds = one.kinds.length ? ` (${one.kinds.join(", ")})` : "";
      lines.push({ text: `Without duty: ${name(one)} since round ${format.whole(one.since)}, say ${by(one)}${kinds}.`, title: one.peer_id });
    }
    setHidden(byId("accused-box"), lines.length === 0);
    fillList(byId("accused"), lines, () => make("li"), (item, { text, title }) => {
      setText(item, text);
      setAttribute(item, "title", title);
    });
  }

  _drawFaults() {
    const faults = this._store.head.faults.slice(-FAULTS_SHOWN).reverse();
    setHidden(byId("faults-empty"), faults.length > 0);
    setHidden(byId("faults-scroll"), faults.length === 0);
    const now = this._store.now();
    const create = () => make("li", {}, make("span", { class: "kind" }), make("span", { class: "who" }), make("time", { class: "muted" }));
    fillList(byId("faults"), faults, create, ({ children: [kind, who, when] }, fault) => {
      setText(kind, fault.kind.replaceAll("_", " "));
      setText(who, `reported by ${this._name(fault.peer_id)}`);
      setText(when, `${format.age(now - fault.time)} ago`);
      setAttribute(when, "title", format.dateTime(fault.time));
    });
  }

  _drawRefused() {
    const kinds = Object.entries(this._store.head.refused).filter(([, number]) => number > 0);
    const list = kinds.map(([kind, number]) => `${kind.replaceAll("_", " ")} ${format.whole(number)}`).join(", ");
    setText(byId("refused"), list ? `Records refused: ${list}` : "No records refused.");
  }

  _drawJoin() {
    const { run, join_command: command } = this._store.head;
    setHidden(byId("join-box"), command === null);
    setText(byId("join-command"), command ?? "");
    setText(
      byId("join-note"),
      command === null
        ? "No peer can be joined right now."
        : `On any Linux machine with spes_swarm; a GPU helps but is not required.${dataNote(run.data, command)}${admissionNote(run.admission, command)}`,
    );
  }

  async _copy() {
    const code = byId("join-command");
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Browsers allow clipboard access only on https and localhost; the old way works elsewhere.
      getSelection().selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    const button = byId("join-copy");
    setText(button, copied ? "Copied" : "Selected: press Ctrl-C");
    setText(byId("join-copied"), copied ? "Command copied to the clipboard." : "Command selected.");
    setTimeout(() => {
      setText(button, "Copy");
      setText(byId("join-copied"), "");
    }, COPIED_MS);
  }
}
