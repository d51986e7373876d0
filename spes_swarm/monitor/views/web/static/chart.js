// One chart: uPlot with the page's colours, its own readout, and keyboard control.

import { make, setHidden, setText } from "./dom.js";

const { uPlot } = globalThis;
const POINTS_UP_TO = 60; // with at most this many rounds, each point is marked

/** The current colour of a CSS variable; canvases do not support variables. */
function colour(name) {
  const probe = make("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function faded(rgb, alpha) {
  return `rgba(${rgb.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${alpha})`;
}

/** An axis label without trailing zeros. */
function tickText(text) {
  return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

export class Chart {
  /**
   * `spec`: {title, height, series: [{label, field, colour, format, fill, gaps}], fromZero, note}.
   * `view` is shared by all charts: {axis, limits(), zoomTo(from, to), zoomBy(factor, centre), reset(), text(x)}.
   */
  constructor(spec, view) {
    this._spec = spec;
    this._view = view;
    this._plot = null;
    this._data = [[], ...spec.series.map(() => [])];
    this._readings = spec.series.map((series) => {
      const value = make("output", {}, "–");
      const mark = make("i", { class: "swatch", "aria-hidden": "true" });
      mark.style.setProperty("--swatch", `var(${series.colour})`);
      return { value, item: make("span", { class: "reading" }, mark, `${series.label} `, value) };
    });
    this._where = make("span", { class: "where muted" });
    this._spoken = make("p", { class: "visually-hidden", "aria-live": "polite" });
    this._canvas = make("div", { class: "canvas" });
    this._empty = make("p", { class: "empty", hidden: true }, spec.empty ?? "No rounds yet.");
    const title = make("h3", {}, spec.title);
    const caption = make("figcaption", {}, title, ...this._readings.map((reading) => reading.item), this._where);
    const help = `${spec.title}: chart. Arrow keys move, plus and minus zoom, zero resets.`;
    this._frame = make("div", { class: "frame", tabindex: "0", role: "group", "aria-label": help }, this._canvas, this._empty);
    this.element = make("figure", { class: `card chart ${spec.className ?? ""}` }, caption, this._frame, this._spoken);
    this._frame.addEventListener("keydown", (event) => this._key(event));
    this._frame.addEventListener("blur", () => this._plot?.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this._resize()).observe(this._canvas);
  }

  /** Sets the data: x and one column for each series. */
  setData(data) {
    this._data = data;
    setHidden(this._empty, data[0].length > 0);
    if (this._plot === null) this._build();
    else {
      this._plot.setData(data, false);
      this.follow();
    }
    this._read();
  }

  /** Shows the visible part of the view. */
  follow() {
    if (this._plot === null) return;
    const { min, max } = this._view.limits();
    this._plot.setScale("x", { min, max });
  }

  /** Rebuilds the plot after the colours or the meaning of x have changed. */
  rebuild() {
    this._plot?.destroy();
    this._plot = null;
    this._build();
  }

  _build() {
    const width = this._canvas.clientWidth;
    const height = this._canvas.clientHeight;
    if (width < 10 || height < 10) return; // not laid out yet; the observer calls again
    const text = colour("--muted");
    const grid = { stroke: colour("--grid"), width: 1 };
    const axis = { stroke: text, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const format = this._spec.series[0].format;
    const options = {
      width,
      height,
      padding: [10, 20, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: this._view.axis === "time", range: () => this._range() },
        y: { range: (_, min, max) => this._verticalRange(min, max) },
      },
      axes: [
        { ...axis, size: 26, gap: 4, space: 64, ...this._horizontalLabels() },
        { ...axis, gap: 4, space: this._spec.tight ? 20 : 40, size: width < 300 ? 48 : 58, ...(this._spec.incrs && { incrs: this._spec.incrs }), values: (_, ticks) => ticks.map((tick) => tickText(format(tick))) },
      ],
      series: [{}, ...this._spec.series.map((series) => this._line(series))],
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false, dist: 6 },
        sync: { key: "rounds", setSeries: false, scales: ["x", null] },
        points: { size: 8, width: 2 },
        bind: { dblclick: () => () => this._view.reset() },
      },
      hooks: {
        setCursor: [() => this._read()],
        setSelect: [(plot) => this._selected(plot)],
      },
    };
    this._plot = new uPlot(options, this._data, this._canvas);
    this._touch(this._plot.over);
    this.follow();
  }

  _line(series) {
    const stroke = colour(series.colour);
    return {
      label: series.label,
      stroke,
      width: 2,
      spanGaps: series.gaps === "span",
      points: { show: (plot) => plot.data[0].length <= POINTS_UP_TO, size: 5, fill: stroke },
      fill: series.fill && ((plot) => {
        const gradient = plot.ctx.createLinearGradient(0, plot.bbox.top, 0, plot.bbox.top + plot.bbox.height);
        gradient.addColorStop(0, faded(stroke, 0.28));
        gradient.addColorStop(1, faded(stroke, 0.02));
        return gradient;
      }),
    };
  }

  _horizontalLabels() {
    if (this._view.axis === "time") return {};
    const incrs = [1, 2, 5].flatMap((n) => Array.from({ length: 15 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);
    return { incrs, values: (_, ticks) => ticks.map((tick) => this._view.short(tick)) };
  }

  _range() {
    const { min, max } = this._view.limits();
    return [min, max];
  }

  _verticalRange(min, max) {
    if (min == null || max == null) return [0, 1];
    if (this._spec.fromZero) return [0, max > 0 ? max * 1.12 : 1];
    const pad = Math.max((max - min) * 0.08, Math.abs(max) * 0.004, 1e-6);
    return [Math.max(0, min - pad), max + pad];
  }

  _resize() {
    if (this._plot === null) {
      if (this._data[0].length) this._build();
      return;
    }
    const { clientWidth: width, clientHeight: height } = this._canvas;
    if (width > 10 && (width !== this._plot.width || height !== this._plot.height)) this._plot.setSize({ width, height });
  }

  /** Shows the values under the cursor, or the newest. */
  _read() {
    const under = this._plot?.cursor.idx;
    const hovering = under != null && this._plot.cursor.left >= 0;
    const xs = this._data[0];
    this._spec.series.forEach((series, i) => {
      const column = this._data[i + 1];
      let index = hovering ? under : column.length - 1;
      if (!hovering) while (index > 0 && column[index] == null) index--;
      setText(this._readings[i].value, series.format(column[index] ?? null));
    });
    setText(this._where, hovering ? this._view.text(xs[under]) : "");
  }

  _selected(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this._view.zoomTo(from, to);
  }

  /** A finger shows values as a mouse does; vertical scrolling is left to the browser. */
  _touch(over) {
    const show = (event) => {
      if (event.pointerType !== "touch") return;
      const box = over.getBoundingClientRect();
      this._plot.setCursor({ left: event.clientX - box.left, top: box.height / 2 });
    };
    over.addEventListener("pointerdown", show);
    over.addEventListener("pointermove", show);
  }

  _key(event) {
    const plot = this._plot;
    if (plot === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = this._data[0];
    const { min, max } = this._view.limits();
    const last = xs.length - 1;
    let index = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    const centre = index == null ? (min + max) / 2 : xs[index];
    const page = Math.max(1, Math.round(last / 10));
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page };
    if (event.key in steps) index = index == null ? last : index + steps[event.key];
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = last;
    else if (event.key === "+" || event.key === "=") this._view.zoomBy(0.5, centre);
    else if (event.key === "-") this._view.zoomBy(2, centre);
    else if (event.key === "0" || event.key === "Escape") this._view.reset();
    else return;
    event.preventDefault();
    if (index == null || last < 0) return;
    index = Math.min(last, Math.max(0, index));
    if (xs[index] < min || xs[index] > max) this._view.pan(xs[index]);
    plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: plot.over.clientHeight / 2 });
    const values = this._readings.map((reading, i) => `${this._spec.series[i].label} ${reading.value.textContent}`);
    setText(this._spoken, `${this._view.text(xs[index])}: ${values.join(", ")}`);
  }
}
