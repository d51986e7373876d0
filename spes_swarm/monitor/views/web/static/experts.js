// The expert map: a tile for each expert, large if there are few, a coloured dot if there are a thousand.

import { byId, fillList, make, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";

const NAMES_SHOWN = 6;
// Up to how many experts each tile size is used.
const SIZES = [[16, "large"], [64, "medium"], [256, "small"], [Infinity, "tiny"]];
const LEGENDS = {
  holders: [["none", "no holder"], ["reserved", "reserved"], ["one", "one peer"], ["two", "two"], ["more", "three or more"]],
  age: [["fresh", "last round"], ["recent", "up to 5 rounds"], ["old", "up to 20"], ["ancient", "older"], ["never", "never"]],
};

export class ExpertMap extends EventTarget {
  constructor(store) {
    super();
    this._store = store;
    this._map = byId("map");
    this._tiles = [];
    this._shade = "holders";
    this._chosen = null;
    this._looked = null; // the expert under pointer or focus
    for (const input of document.querySelectorAll("input[name=shade]")) {
      input.addEventListener("change", () => {
        this._shade = input.value;
        this._drawLegend();
        this._drawAll();
      });
    }
    this._map.addEventListener("click", (event) => this._withTile(event, (expert) => this._toggle(expert)));
    this._map.addEventListener("pointerover", (event) => this._withTile(event, (expert) => this._look(expert)));
    this._map.addEventListener("pointerleave", () => this._look(null));
    this._map.addEventListener("focusin", (event) => this._withTile(event, (expert) => this._look(expert)));
    this._map.addEventListener("focusout", () => this._look(null));
    this._map.addEventListener("keydown", (event) => this._withTile(event, (expert) => this._key(event, expert)));
    this._drawLegend();
  }

  /** Recreates the tiles if their number has changed, and draws all. */
  rebuild() {
    const { experts } = this._store;
    if (this._tiles.length !== experts.length) {
      const size = SIZES.find(([most]) => experts.length <= most)[1];
      setAttribute(this._map, "data-size", size);
      this._map.style.setProperty("--columns", Math.min(4, experts.length));
      this._tiles = experts.map((entry, index) => this._makeTile(entry.expert, index, size));
      this._map.replaceChildren(...this._tiles.map((tile) => tile.element));
      this._chosen = null;
    }
    this._drawAll();
  }

  /** Draws the experts with these numbers. */
  update(numbers) {
    for (const number of numbers) this._drawTile(number);
    this._drawSummary();
    this.drawDetail();
  }

  /** Marks an expert (or none) as chosen, and emits a `choose` event. */
  choose(expert) {
    for (const number of [this._chosen, expert]) {
      if (number !== null) setAttribute(this._tiles[number].element, "aria-selected", number === expert);
    }
    this._chosen = expert;
    this.drawDetail();
    this.dispatchEvent(new CustomEvent("choose", { detail: expert }));
  }

  /** The line under the map. */
  drawDetail() {
    const { experts, peers } = this._store;
    const expert = this._looked ?? this._chosen;
    const entry = expert === null ? undefined : experts[expert];
    if (entry === undefined) {
      setText(byId("map-detail"), experts.length ? "Select an expert to show only its holders among the peers." : "");
      return;
    }
    const names = entry.holders.map((id) => (peers.has(id) ? format.peerName(peers.get(id)) : id.slice(-8)));
    const more = names.length > NAMES_SHOWN ? ` and ${names.length - NAMES_SHOWN} more` : "";
    const held = names.length ? `held by ${names.slice(0, NAMES_SHOWN).join(", ")}${more}` : "no holder";
    const reserved = entry.reserved.length ? ` · reserved for ${format.plural(entry.reserved.length, "peer")} that left` : "";
    setText(byId("map-detail"), `Expert ${expert}: ${held}${reserved} · ${_ageText(entry.age_rounds)}`);
  }

  _makeTile(expert, index, size) {
    const element = make("div", { class: "tile", role: "option", "data-expert": expert, "aria-selected": "false", tabindex: index ? "-1" : "0" });
    const tile = { element, holders: null, age: null };
    if (size === "large" || size === "medium") element.append(make("b", {}, String(expert)));
    if (size === "large") {
      tile.holders = make("span");
      tile.age = make("span");
      element.append(tile.holders, tile.age);
    }
    return tile;
  }

  _drawAll() {
    for (const entry of this._store.experts) this._drawTile(entry.expert);
    this._drawSummary();
    this.drawDetail();
  }

  _drawTile(number) {
    const tile = this._tiles[number];
    const entry = this._store.experts[number];
    if (!tile || !entry) return;
    const holders = entry.holders.length;
    const shade = this._shade === "age"
      ? _ageShade(entry.age_rounds)
      : holders === 0 ? (entry.reserved.length ? "reserved" : "none") : ["one", "two", "more"][Math.min(holders, 3) - 1];
    setAttribute(tile.element, "data-shade", shade);
    const held = holders ? format.plural(holders, "holder") : "no holder";
    setAttribute(tile.element, "aria-label", `Expert ${number}: ${held}, ${_ageText(entry.age_rounds)}`);
    if (tile.holders) {
      setText(tile.holders, held);
      setText(tile.age, _ageText(entry.age_rounds, true));
    }
  }

  _drawSummary() {
    const { experts, head } = this._store;
    if (!experts.length || head === null) return;
    const held = experts.filter((entry) => entry.holders.length > 0);
    const single = held.filter((entry) => entry.holders.length === 1).length;
    const ages = experts.map((entry) => entry.age_rounds).filter((age) => age !== null);
    const parts = [`${format.whole(held.length)} of ${format.whole(experts.length)} held`];
    if (single) parts.push(`${format.whole(single)} by one peer only`);
    const oldest = ages.length ? Math.max(...ages) : null;
    if (oldest !== null) parts.push(oldest === 0 ? "all up to date" : `oldest: ${_ageText(oldest)}`);
    setText(byId("experts-summary"), parts.join(" · "));
  }

  _drawLegend() {
    const create = () => make("li", {}, make("i", { class: "tile", "aria-hidden": "true" }), make("span"));
    fillList(byId("map-legend"), LEGENDS[this._shade], create, (item, [shade, text]) => {
      setAttribute(item.firstChild, "data-shade", shade);
      setText(item.lastChild, text);
    });
  }

  _withTile(event, act) {
    const element = event.target.closest?.("[data-expert]");
    if (element) act(Number(element.dataset.expert));
  }

  _look(expert) {
    this._looked = expert;
    this.drawDetail();
  }

  _toggle(expert) {
    this.choose(expert === this._chosen ? null : expert);
  }

  /** Arrow keys move through the map in its current layout. */
  _key(event, expert) {
    const last = this._tiles.length - 1;
    const top = this._tiles[0].element.offsetTop;
    let columns = this._tiles.findIndex((tile) => tile.element.offsetTop > top);
    if (columns < 0) columns = this._tiles.length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    let target = expert;
    if (event.key in steps) target = expert + steps[event.key];
    else if (event.key === "Home") target = 0;
    else if (event.key === "End") target = last;
    else if (event.key === "Enter" || event.key === " ") this._toggle(expert);
    else if (event.key === "Escape" && this._chosen !== null) this.choose(null);
    else return;
    event.preventDefault();
    if (target === expert || target < 0 || target > last) return;
    setAttribute(this._tiles[expert].element, "tabindex", "-1");
    setAttribute(this._tiles[target].element, "tabindex", "0");
    this._tiles[target].element.focus();
  }
}

function _ageShade(age) {
  if (age === null) return "never";
  return age <= 1 ? "fresh" : age <= 5 ? "recent" : age <= 20 ? "old" : "ancient";
}

function _ageText(age, short = false) {
  if (age === null) return short ? "no round yet" : "never in a round";
  if (age === 0) return short ? "up to date" : "in the last round";
  return `${format.plural(age, "round")} ${short ? "old" : "ago"}`;
}
