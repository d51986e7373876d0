// Routing health: figures over all layers, a bar for the load of each expert, and the experts that are dead.

import { byId, fillList, make, setAttribute, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

// Up to how many bars have room for a number: on any screen, and on a wide one.
const FEW = 16;
const SOME = 64;
const NAMED = 12; // dead experts in the sentence
const LEAST_SCALE = 2; // the top of the bars, in fair shares, unless a load is higher
const LOW = 0.1; // of the fair share

export class Routing {
  constructor(store) {
    this._store = store;
  }

  draw() {
    const { head, experts } = this._store;
    if (head === null) return;
    const known = head.load_entropy !== null;
    setHidden(byId("routing-empty"), known);
    setHidden(byId("routing-known"), !known);
    setText(byId("load-entropy"), format.percent(head.load_entropy));
    setText(byId("router-entropy"), format.percent(head.router_entropy));
    setText(byId("held-share"), format.percent(head.held_share));
    setText(byId("least-load"), format.share(head.least_load));
    setText(byId("similarity"), head.expert_similarity === null ? "–" : head.expert_similarity.toFixed(2));
    const most = head.expert_similarity_max;
    setText(byId("similarity-note"), most === null ? "not evaluated" : `mean cosine; largest ${most.toFixed(2)}`);
    this._drawDead(head, experts);
    this._drawLoads(experts);
  }

  _drawDead(head, experts) {
    const pairs = experts.flatMap(({ expert, dead_layers }) => dead_layers.map((layer) => [layer, expert]));
    pairs.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const number = Math.max(pairs.length, head.dead_experts ?? 0);
    const unknown = pairs.length === 0 && head.dead_experts === null;
    setAttribute(byId("dead"), "data-verdict", unknown ? "none" : number ? "dead" : "agree");
    if (number === 0) {
      setText(byId("dead"), unknown ? "Too few tokens to tell whether an expert is dead" : "No dead experts");
      setText(byId("dead-names"), "");
      return;
    }
    setText(byId("dead"), format.plural(number, "dead expert"));
    const names = pairs.slice(0, NAMED).map(([layer, expert]) => `expert ${expert} of layer ${layer}`);
    const more = number - names.length;
    const text = names.length === 0 ? "Peers disagree about which." : `${names.join(", ")}${more > 0 ? ` and ${format.whole(more)} more` : ""}`;
    setText(byId("dead-names"), text);
  }

  _drawLoads(experts) {
    const shown = experts.filter((entry) => entry.load !== null);
    setHidden(byId("loads-figure"), shown.length === 0);
    setHidden(byId("loads-none"), shown.length > 0);
    const top = Math.max(LEAST_SCALE, ...shown.map((entry) => entry.load));
    const chart = byId("loads");
    chart.style.setProperty("--fair", `${100 / top}%`);
    setAttribute(chart, "data-bars", shown.length <= FEW ? "few" : shown.length <= SOME ? "some" : "many");
    const create = () => make("li", {}, make("i", { "aria-hidden": "true" }), make("b", { "aria-hidden": "true" }), make("span", { class: "visually-hidden" }));
    fillList(chart, shown, create, (item, { expert, load, dead_layers }) => {
      const [bar, number, words] = item.children;
      const dead = dead_layers.length ? `, dead in ${format.plural(dead_layers.length, "layer")}` : "";
      const text = `Expert ${expert}: ${format.share(load)} its fair share${dead}`;
      setAttribute(item, "title", text);
      setAttribute(item, "data-load", dead ? "dead" : load < LOW ? "low" : "fair");
      bar.style.setProperty("height", `${(100 * load) / top}%`);
      setText(number, String(expert));
      setText(words, text);
    });
  }
}
