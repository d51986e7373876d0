// The charts of a run with their axes, and the same values as a table.

import { Chart } from "./chart.js";
import { byId, fillList, make, setText } from "./dom.js";
import * as format from "./format.js";

const TABLE_ROWS = 20;
const CHARTS = [
  {
    title: "Loss",
    className: "big",
    empty: "No rounds yet. The first point appears once the swarm has committed a round.",
    series: [
      { label: "training", field: "train_loss", colour: "--curve-train", format: format.loss, fill: true, gaps: "span" },
      { label: "evaluation", field: "eval_loss", colour: "--curve-eval", format: format.loss, gaps: "span" },
    ],
  },
  {
    title: "Tokens per second",
    fromZero: true,
    tight: true,
    series: [{ label: "all peers", field: "tokens_per_second", colour: "--curve-rate", format: format.count, fill: true }],
  },
  {
    title: "Sync time",
    fromZero: true,
    tight: true,
    series: [{ label: "median over peers", field: "round_seconds", colour: "--curve-sync", format: format.duration, fill: true }],
  },
  {
    title: "Sent in a round",
    incrs: Array.from({ length: 50 }, (_, power) => 2 ** power), // so that labels are whole KiB, MiB, ...
    fromZero: true,
    tight: true,
    series: [{ label: "all peers", field: "bytes", colour: "--curve-bytes", format: format.bytes, fill: true }],
  },
];

/** The visible part of the run, shared by all charts. */
class View {
  constructor(changed) {
    this.axis = "round";
    this.last = 0; // rounds; 0: all
    this.zoom = null; // [from, to] in units of the axis
    this.xs = [];
    this._changed = changed;
  }

  _whole() {
    const { xs } = this;
    if (xs.length === 0) return { min: 0, max: this.axis === "round" ? 10 : 1 };
    const min = xs[this.last ? Math.max(0, xs.length - this.last) : 0];
    const max = xs[xs.length - 1];
    if (max > min) return { min, max };
    const around = this.axis === "round" ? 1 : this.axis === "time" ? 30 : Math.max(1, max * 0.1);
    return { min: min - around, max: max + around };
  }

  limits() {
    return this.zoom === null ? this._whole() : { min: this.zoom[0], max: this.zoom[1] };
  }

  zoomTo(from, to) {
    const all = this._whole();
    const smallest = Math.min((all.max - all.min) / 2, this.axis === "round" ? 2 : (all.max - all.min) / 500);
    if (to - from < smallest) {
      const centre = (from + to) / 2;
      [from, to] = [centre - smallest / 2, centre + smallest / 2];
    }
    this.zoom = to - from >= all.max - all.min ? null : [Math.max(all.min, from), Math.min(all.max, to)];
    this._changed();
  }

  zoomBy(factor, centre) {
    const { min, max } = this.limits();
    this.zoomTo(centre - (centre - min) * factor, centre + (max - centre) * factor);
  }

  /** Moves the visible part so that it contains `x`. */
  pan(x) {
    const { min, max } = this.limits();
    const shift = x < min ? x - min : x - max;
    this.zoom = [min + shift, max + shift];
    this._changed();
  }

  reset() {
    this.zoom = null;
    this._changed();
  }

  short(x) {
    if (this.axis === "round") return Number.isInteger(x) ? format.whole(x) : "";
    return format.count(x);
  }

  text(x) {
    if (this.axis === "round") return `round ${format.whole(x)}`;
    return this.axis === "time" ? format.dateTime(x) : `${format.count(x)} tokens`;
  }
}

export class Curves {
  constructor(store) {
    this._store = store;
    this._view = new View(() => this._viewChanged());
    this._charts = CHARTS.map((spec) => new Chart(spec, this._view));
    byId("charts").append(...this._charts.map((chart) => chart.element));
    for (const input of document.querySelectorAll("input[name=axis]")) {
      input.addEventListener("change", () => this._setAxis(input.value));
    }
    for (const input of document.querySelectorAll("input[name=span]")) {
      input.addEventListener("change", () => {
        this._view.last = Number(input.value);
        this._view.reset();
      });
    }
    byId("zoom-reset").addEventListener("click", () => this._view.reset());
    document.addEventListener("themechange", () => this._charts.forEach((chart) => chart.rebuild()));
    this.update();
  }

  /** Draws the history. */
  update() {
    const { points } = this._store;
    const xs = points.map((point) => point[this._view.axis]);
    this._view.xs = xs;
    for (const [i, chart] of this._charts.entries()) {
      chart.setData([xs, ...CHARTS[i].series.map(({ field }) => points.map((point) => point[field]))]);
    }
    this._drawTable(points.slice(-TABLE_ROWS).reverse());
  }

  _setAxis(axis) {
    this._view.axis = axis;
    this._view.zoom = null;
    byId("zoom-reset").disabled = true;
    this.update();
    for (const chart of this._charts) chart.rebuild();
  }

  _viewChanged() {
    byId("zoom-reset").disabled = this._view.zoom === null;
    for (const chart of this._charts) chart.follow();
  }

  _drawTable(points) {
    const row = () => make("tr", {}, make("th", { scope: "row" }), ...Array.from({ length: 8 }, () => make("td")));
    fillList(byId("rounds"), points, row, (element, point) => {
      const texts = [
        format.whole(point.round),
        format.clockTime(point.time),
        format.loss(point.train_loss),
        format.lossWithError(point.eval_loss, point.eval_loss_stderr),
        format.count(point.tokens_per_second),
        format.whole(point.peers),
        format.whole(point.experts_covered),
        format.duration(point.round_seconds),
        format.bytes(point.bytes),
      ];
      texts.forEach((text, i) => setText(element.children[i], text));
    });
  }
}
