// A chart with a legend of text buttons, and the same numbers as a table for accessibility.

import { make } from "./dom.js";
import { NONE, clock, day, moment, secondsTick } from "./format.js";

const HEIGHT = 170;
const X_SIZE = 30; // height of the x axis
const TABLE_ROWS = 12;
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => [2 ** power, 1.5 * 2 ** power]).flat();
const SECOND_STEPS = [
  ...[-6, -5, -4, -3, -2, -1].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)),
  ...[1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800],
];
const LOG_SECONDS = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000];
const RESTART = "restart";
const FONT = "12px system-ui, sans-serif";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function timeText(at, spanS) {
  if (spanS > 2 * 86400) return day(at);
  return clock(at, spanS <= 1200);
}

export class Chart {
  #plot = null;
  #drawn = [];
  #hidden = new Set();
  #onZoom;
  #series = null;
  #view = null;
  #restarts = [];

  // *xTexts* are the x labels of a chart that is not over time. Its legend shows the values at index *restAt*.
  // *lines* are { key, label, colour, dash, of(series) → numbers by step }.
  constructor({ title, lines, format, isStacked = false, least = null, most = null, log = false, isBytes = false, isSeconds = false, mark = null, xTexts = null, restAt = null, empty }) {
    Object.assign(this, { title, lines, format, isStacked, least, most, log, isBytes, isSeconds, mark, xTexts, restAt, empty: empty ?? "no data in this time range" });
    this.box = make("div", { class: "plot", "aria-hidden": "true" });
    this.isEmpty = true;
    this.values = new Map();
    this.legend = make("ul", { class: "legend", "aria-label": `${title}: lines` });
    for (const line of lines) this.legend.append(this.#legendItem(line));
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}: numbers` });
    this.details = make("details", {}, make("summary", {}, "Numbers"), this.table);
    this.details.addEventListener("toggle", () => this.#fillTable());
    this.element = make("div", { class: "chart" }, this.legend, this.box, this.details);
    new ResizeObserver(() => this.#resize()).observe(this.box);
  }

  onZoom(callback) {
    this.#onZoom = callback;
  }

  // Draws the part of *series* between *view.from* and *view.to*, with a mark at each time of *restarts*.
  update(series, view, restarts) {
    this.#series = series;
    this.#view = view;
    this.#restarts = restarts;
    this.#drawn = this.lines.map((line) => line.of(series));
    this.isEmpty = this.#drawn.every((values) => values.every((value) => value === null || (this.isStacked && value === 0)));
    this.#tellNewest();
    if (this.isEmpty) return; // its card is not shown
    if (this.#plot === null) this.#make();
    this.#plot.setData([series.times, ...this.#shown()], false);
    this.#plot.setScale("x", { min: view.from, max: view.to });
    if (this.details.open && Math.floor(view.to) % 5 === 0) this.#fillTable();
  }

  // Draws everything again, because colours have changed.
  redraw() {
    this.#plot?.destroy();
    this.#plot = null;
    for (const line of this.lines) this.values.get(line.key).swatch.style.background = colour(line.colour);
    if (this.#series !== null) this.update(this.#series, this.#view, this.#restarts);
  }

  #legendItem(line) {
    const swatch = make("span", { class: line.dash ? "swatch dashed" : "swatch" });
    swatch.style.background = colour(line.colour);
    const value = make("span", { class: "value", data: { line: line.key } }, NONE);
    const button = make("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, swatch, make("span", {}, line.label), value);
    button.addEventListener("click", () => {
      const hides = !this.#hidden.delete(line.key) && this.#hidden.add(line.key);
      button.setAttribute("aria-pressed", String(!hides));
      if (this.#series !== null) this.update(this.#series, this.#view, this.#restarts);
    });
    this.values.set(line.key, { value, swatch });
    return make("li", {}, button);
  }

  #tellNewest(pointed = null) {
    const index = pointed ?? this.restAt;
    this.lines.forEach((line, number) => {
      const values = this.#drawn[number];
      let value = null;
      if (index !== null) value = values[index];
      else for (let back = values.length - 1; back >= Math.max(0, values.length - 3) && value === null; back -= 1) value = values[back];
      this.values.get(line.key).value.textContent = this.format(value);
    });
  }

  #shown() {
    if (!this.isStacked) return this.#drawn.map((values, number) => (this.#hides(number) ? values.map(() => null) : values));
    const below = new Array(this.#series.length).fill(0);
    return this.#drawn.map((values, number) =>
      values.map((value, index) => {
        if (value === null) return null;
        if (!this.#hides(number)) below[index] += value;
        return below[index];
      }),
    );
  }

  #hides(number) {
    return this.#hidden.has(this.lines[number].key);
  }

  #make() {
    const lines = this.lines.map((line) => ({
      label: line.label,
      stroke: colour(line.colour),
      fill: this.isStacked ? `${colour(line.colour)}c8` : undefined,
      width: this.isStacked ? 0 : 1.75, // the outline of an empty layer would lie on the layer below
      dash: line.dash,
      points: { show: this.xTexts !== null, size: 7 },
      spanGaps: false,
    }));
    const text = colour("soft");
    const axis = { stroke: text, font: FONT, grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 } };
    const options = {
      width: Math.max(80, this.box.clientWidth),
      height: HEIGHT,
      padding: [10, 26, 0, null],
      legend: { show: false },
      cursor: { sync: this.xTexts === null ? { key: "time" } : undefined, drag: { x: this.xTexts === null, y: false, setScale: false }, y: false },
      select: { show: true },
      scales: {
        x: { time: this.xTexts === null, auto: false },
        y: { range: (plot, low, high) => this.#range(low, high), distr: this.log ? 3 : 1 },
      },
      axes: [
        this.#xAxis(axis),
        { ...axis, size: (plot, texts) => 14 + 6.7 * Math.max(4, ...(texts ?? []).map((text) => text.length)), ...this.#ySteps(), values: (plot, splits) => splits.map((value) => (value === null ? "" : this.#tick(value))) },
      ],
      series: [{}, ...lines],
      bands: this.isStacked ? this.lines.slice(1).map((_, number) => ({ series: [number + 2, number + 1] })) : [],
      hooks: {
        setCursor: [(plot) => this.#tellNewest(plot.cursor.idx ?? null)],
        setSelect: [(plot) => this.#selected(plot)],
        draw: [(plot) => this.#drawMark(plot), (plot) => this.#drawRestarts(plot)],
      },
    };
    this.#plot = new uPlot(options, [this.#series.times, ...this.#shown()], this.box);
  }

  #ySteps() {
    if (this.log) return { space: 24, splits: (plot, axis, low, high) => LOG_SECONDS.filter((each) => each >= low && each <= high), filter: (plot, splits) => splits };
    if (this.isBytes) return { space: 36, incrs: BYTE_STEPS };
    return this.isSeconds ? { space: 36, incrs: SECOND_STEPS } : { space: 36 };
  }

  #tick(value) {
    return this.isSeconds ? secondsTick(value) : this.format(value);
  }

  #xAxis(axis) {
    if (this.xTexts !== null) return { ...axis, size: X_SIZE, splits: () => this.xTexts.map((_, index) => index), values: () => this.xTexts };
    return { ...axis, size: X_SIZE, space: 70, values: (plot, splits) => splits.map((at) => timeText(at, plot.scales.x.max - plot.scales.x.min)) };
  }

  #range(low, high) {
    if (this.log) return [Math.max(0.5, Math.min(low ?? 1, this.mark?.at ?? 1) / 2), Math.max(high ?? 1, this.mark?.at ?? 1) * 2];
    const top = this.most ?? (high === null || high <= 0 ? 1 : high * 1.08);
    return [this.least ?? 0, top];
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    this.#onZoom?.({ from: plot.posToVal(left, "x"), to: plot.posToVal(left + width, "x") });
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  #drawMark(plot) {
    if (this.mark === null) return;
    const { ctx, bbox } = plot;
    const y = plot.valToPos(this.mark.at, "y", true);
    ctx.save();
    ctx.strokeStyle = colour("soft");
    ctx.fillStyle = colour("soft");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.fillText(this.mark.label, bbox.left + bbox.width - 4, y + 13 * devicePixelRatio);
    ctx.restore();
  }

  #drawRestarts(plot) {
    const { ctx, bbox } = plot;
    const shown = this.#restarts.filter((at) => at >= plot.scales.x.min && at <= plot.scales.x.max);
    if (shown.length === 0) return;
    ctx.save();
    ctx.strokeStyle = colour("soft");
    ctx.setLineDash([2, 3]);
    ctx.textAlign = "left";
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const at of shown) {
      const x = plot.valToPos(at, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const { width } = ctx.measureText(RESTART);
      const left = x < bbox.left + bbox.width / 2 ? x + 3 * devicePixelRatio : x - width - 3 * devicePixelRatio;
      ctx.fillStyle = colour("card");
      ctx.fillRect(left, bbox.top, width, 14 * devicePixelRatio);
      ctx.fillStyle = colour("soft");
      ctx.fillText(RESTART, left, bbox.top + 11 * devicePixelRatio);
    }
    ctx.restore();
  }

  #resize() {
    if (this.#plot !== null && this.box.clientWidth > 0) this.#plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  #fillTable() {
    if (!this.details.open || this.#series === null) return;
    const head = make("tr", {}, make("th", { scope: "col" }, this.xTexts === null ? "time" : "size"), ...this.lines.map((line) => make("th", { scope: "col", class: "number" }, line.label)));
    const times = this.#series.times;
    const within = times.map((_, index) => index).filter((index) => times[index] >= this.#view.from && times[index] <= this.#view.to);
    const step = Math.max(1, Math.ceil(within.length / TABLE_ROWS));
    const rows = within.reverse().filter((_, number) => number % step === 0);
    const body = rows.map((index) =>
      make("tr", {}, make("th", { scope: "row" }, this.xTexts === null ? moment(times[index]) : this.xTexts[index]), ...this.#drawn.map((values) => make("td", { class: "number" }, this.format(values[index])))),
    );
    this.table.replaceChildren(
      make("table", {}, make("caption", { class: "unseen" }, this.xTexts === null ? `${this.title}, newest first` : this.title), make("thead", {}, head), make("tbody", {}, ...body)),
    );
  }
}
