// The table of peers: sorted and filtered, with only the visible rows in the document.

import { byId, make, setAttribute, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const SPARE_ROWS = 6; // above and below the visible ones, so that scrolling does not flicker
const STATE_ORDER = ["late", "leaving", "joining", "syncing", "waiting", "training", "left"]; // those that need attention come first
const byNumber = (field) => (peer) => peer[field] ?? null;

// `key`: what sorting compares; null comes last in both directions. `down`: the first click sorts descending. `brief`:
// the title beside the value on a phone.
const COLUMNS = [
  { id: "name", title: "Peer", key: (peer) => format.peerName(peer).toLowerCase() },
  { id: "state", title: "State", key: (peer) => STATE_ORDER.indexOf(peer.state) },
  { id: "experts", title: "Experts", key: (peer) => peer.experts.length, down: true, text: (peer) => format.ranges(peer.experts) },
  { id: "round", title: "Round", key: byNumber("round"), down: true, text: (peer) => format.whole(peer.round), number: true },
  { id: "rate", title: "Tokens/s", key: byNumber("tokens_per_second"), down: true, text: (peer) => format.count(peer.tokens_per_second), number: true },
  { id: "loss", title: "Loss", key: byNumber("loss"), text: (peer) => format.loss(peer.loss), number: true },
  { id: "up", title: "Sent", brief: "↑", key: byNumber("bytes_sent"), down: true, text: (peer) => format.bytes(peer.bytes_sent), number: true },
  { id: "down", title: "Received", brief: "↓", key: byNumber("bytes_received"), down: true, text: (peer) => format.bytes(peer.bytes_received), number: true },
  { id: "sync", title: "Sync", key: byNumber("round_seconds"), down: true, text: (peer) => format.duration(peer.round_seconds || null), number: true },
  { id: "age", title: "Age", key: (peer) => -peer.seen, text: (peer, now) => format.age(now - peer.seen), number: true },
];

export class PeerTable extends EventTarget {
  constructor(store) {
    super();
    this._store = store;
    this._sort = { column: COLUMNS[0], descending: false };
    this._expert = null;
    this._words = "";
    this._rows = []; // peers as shown, in order
    this._pool = []; // row elements, reused while scrolling
    this._scroll = byId("peers-scroll");
    this._body = byId("peers-body");
    this._above = make("tr", { "aria-hidden": "true", class: "spacer" });
    this._below = make("tr", { "aria-hidden": "true", class: "spacer" });
    this._body.append(this._above, this._below);
    this._makeHead();
    this._makePhoneSort();
    setAttribute(byId("peers-table"), "aria-colcount", COLUMNS.length);
    byId("peer-filter").addEventListener("input", (event) => {
      this._words = event.target.value.trim().toLowerCase();
      this.update();
    });
    byId("expert-filter").addEventListener("click", () => {
      this.dispatchEvent(new Event("unchoose"));
      byId("peer-filter").focus(); // the chip that had the focus is hidden
    });
    let asked = false;
    this._scroll.addEventListener("scroll", () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        this._drawRows();
      });
    }, { passive: true });
    new ResizeObserver(() => this._drawRows()).observe(this._scroll);
  }

  /** Shows only the holders of an expert; null: all peers. */
  filterByExpert(expert) {
    this._expert = expert;
    const chip = byId("expert-filter");
    setHidden(chip, expert === null);
    if (expert !== null) {
      setText(chip, `Expert ${expert} ✕`);
      setAttribute(chip, "aria-label", `Showing holders of expert ${expert}; show all peers again`);
    }
    this._scroll.scrollTop = 0;
    this.update();
  }

  /** Sorts, filters and draws the peers in the store. */
  update() {
    const all = [...this._store.peers.values()];
    const key = this._sort.column.key;
    const sign = this._sort.descending ? -1 : 1;
    const keyed = all.filter((peer) => this._matches(peer)).map((peer) => [key(peer), peer]);
    keyed.sort(([a, left], [b, right]) => {
      if (a === b) return left.peer_id < right.peer_id ? -1 : 1;
      if (a === null) return 1;
      if (b === null) return -1;
      return (a < b ? -1 : 1) * sign;
    });
    this._rows = keyed.map(([, peer]) => peer);
    const filtered = this._expert !== null || this._words !== "";
    const left = all.filter((peer) => peer.state === "left").length;
    const total = format.plural(all.length - left, "peer") + (left ? ` and ${format.whole(left)} that left` : "");
    const shown = filtered ? `${format.whole(this._rows.length)} of ${total}` : total;
    setText(byId("peers-shown"), all.length || filtered ? shown : "");
    setAttribute(byId("peers-table"), "aria-rowcount", this._rows.length + 1);
    const empty = byId("peers-empty");
    setHidden(empty, this._rows.length > 0);
    setText(empty, all.length ? "No peer matches." : "No peers.");
    this._drawRows();
  }

  /** Ages grow with the clock. */
  tick() {
    if (this._store.head?.status !== "replay") this._drawRows();
  }

  _matches(peer) {
    if (this._expert !== null && !peer.experts.includes(this._expert)) return false;
    if (this._words === "") return true;
    return `${peer.name}\n${peer.peer_id}\n${peer.state}`.toLowerCase().includes(this._words);
  }

  _drawRows() {
    const height = this._rowHeight();
    const first = Math.max(0, Math.floor(this._scroll.scrollTop / height) - SPARE_ROWS);
    const number = Math.ceil(this._scroll.clientHeight / height) + 2 * SPARE_ROWS;
    const rows = this._rows.slice(first, first + Math.max(number, 2 * SPARE_ROWS));
    while (this._pool.length < rows.length) {
      const row = this._makeRow();
      this._pool.push(row);
      this._below.before(row.element);
    }
    while (this._pool.length > rows.length) this._pool.pop().element.remove();
    const now = this._store.now();
    rows.forEach((peer, i) => this._fillRow(this._pool[i], peer, first + i, now));
    this._space(this._above, first * height);
    this._space(this._below, Math.max(0, (this._rows.length - first - rows.length) * height));
  }

  _rowHeight() {
    return parseFloat(getComputedStyle(this._scroll).getPropertyValue("--row")) || 40;
  }

  _space(element, height) {
    const text = `${height}px`;
    if (element.style.height !== text) element.style.height = text;
    setHidden(element, height === 0);
  }

  _makeRow() {
    const cells = {};
    for (const column of COLUMNS) {
      cells[column.id] = make("td", { role: "cell", class: `cell-${column.id}${column.number ? " number" : ""}`, "data-title": column.brief ?? column.title });
    }
    const name = make("span", { class: "peer-name" });
    const id = make("code", { class: "peer-id muted" });
    cells.name.append(name, id);
    const state = make("span", { class: "state" });
    const differs = make("span", { class: "differs", title: "Its reference is not the most common one at its round" }, "differs");
    cells.state.append(state, differs);
    return { element: make("tr", { role: "row" }, ...Object.values(cells)), cells, name, id, state, differs };
  }

  _fillRow(row, peer, index, now) {
    setAttribute(row.element, "aria-rowindex", index + 2);
    setAttribute(row.element, "data-state", peer.state);
    setText(row.name, format.peerName(peer));
    setText(row.id, peer.name ? peer.short_id : "");
    setAttribute(row.cells.name, "title", `${peer.name ? `${peer.name} · ` : ""}${peer.peer_id}${peer.reachable ? "" : " · accepts no connections"}`);
    setText(row.state, peer.state);
    setHidden(row.differs, peer.agrees);
    for (const column of COLUMNS) {
      if (column.text) setText(row.cells[column.id], column.text(peer, now));
    }
    setAttribute(row.cells.experts, "title", row.cells.experts.textContent);
  }

  _makeHead() {
    this._headers = COLUMNS.map((column) => {
      const button = make("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this._sortBy(column));
      return make("th", { role: "columnheader", scope: "col", class: column.number ? "number" : null }, button);
    });
    byId("peers-head").append(...this._headers);
    setAttribute(byId("peers-head"), "aria-rowindex", 1);
    this._markSort();
  }

  _makePhoneSort() {
    const select = byId("sort-field");
    select.append(...COLUMNS.map((column) => make("option", { value: column.id }, column.title)));
    select.addEventListener("change", () => this._sortBy(COLUMNS.find((column) => column.id === select.value)));
    byId("sort-direction").addEventListener("click", () => this._sortBy(this._sort.column));
  }

  _sortBy(column) {
    const same = column === this._sort.column;
    this._sort = { column, descending: same ? !this._sort.descending : (column.down ?? false) };
    this._markSort();
    this._scroll.scrollTop = 0;
    this.update();
  }

  _markSort() {
    const { column, descending } = this._sort;
    COLUMNS.forEach((other, i) => {
      setAttribute(this._headers[i], "aria-sort", other === column ? (descending ? "descending" : "ascending") : null);
    });
    byId("sort-field").value = column.id;
    setText(byId("sort-direction"), descending ? "Descending" : "Ascending");
  }
}
