// Assembles the page: one stream updates one store, which the parts draw.

import { Curves } from "./curves.js";
import { ExpertMap } from "./experts.js";
import { Headline } from "./headline.js";
import { Panels } from "./panels.js";
import { PeerTable } from "./peers.js";
import { Routing } from "./routing.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";

const store = new Store();
const stream = new Stream(store);
const headline = new Headline(store);
const curves = new Curves(store);
const peers = new PeerTable(store);
const experts = new ExpertMap(store);
const panels = new Panels(store);
const routing = new Routing(store);

experts.addEventListener("choose", (event) => peers.filterByExpert(event.detail));
peers.addEventListener("unchoose", () => experts.choose(null));
stream.addEventListener("link", (event) => headline.setLink(event.detail));

store.addEventListener("change", ({ detail }) => {
  headline.draw();
  if (detail.all || detail.peers) peers.update();
  if (detail.all || detail.peers) experts.drawDetail(); // names may have changed
  if (detail.all) experts.rebuild();
  else if (detail.experts.size || detail.history) experts.update(detail.experts);
  if (detail.all || detail.history) curves.update();
  panels.draw();
  routing.draw();
});

setInterval(() => {
  headline.tick();
  peers.tick();
  panels.tick();
}, 1_000);

stream.open();
