// The cards about the tiers and the copies between them.

import { ChartCard, TableCard, card } from "./card.js";
import { Chart } from "./chart.js";
import { NONE, bytes, count, percent, perSecond, points, seconds, words } from "./format.js";
import { make } from "./dom.js";
import { Table, number } from "./table.js";
import { RATE_S } from "./token_cards.js";

const SIZES = [["0.5", "half"], ["1", "current"], ["2", "twice"], ["4", "four times"]];
const ANY_GAIN = 0.01;
const SHORT_AGE_S = 600;

export function tierCards(series, tiers) {
  const sized = tiers.filter((tier) => tier !== "remote");
  return [fill(sized), ages(sized), memory(series), tierTable(sized), new WhatIfCard(tiers)];
}

export function copyCards(lanes) {
  return [copyChart(lanes), copyTable(lanes)];
}

function fill(tiers) {
  return new ChartCard("fill", new Chart({
    title: "How full the tiers are",
    format: percent,
    least: 0,
    most: 1,
    empty: "no tier reports its size",
    lines: tiers.map((tier) => ({ key: `fill.${tier}`, label: tier, colour: tier, of: (series) => share(series, `tier.${tier}.bytes`, `tier.${tier}.capacity`) })),
  }));
}

function share(series, part, whole) {
  const all = series.of(whole);
  return series.of(part).map((value, index) => (value === null || !all[index] ? null : value / all[index]));
}

function ages(tiers) {
  return new ChartCard("ages", new Chart({
    title: "Median age of evicted blocks",
    format: seconds,
    isSeconds: true,
    log: true,
    mark: { at: SHORT_AGE_S, label: "10 min" },
    empty: "no evictions in this time range",
    lines: tiers.map((tier) => ({ key: `age.${tier}`, label: tier, colour: tier, of: (series) => series.of(`tier.${tier}.age`) })),
  }));
}

function memory(series) {
  const lines = [
    { key: "memory.resident", label: "process (RSS)", colour: "tone-1" },
    { key: "memory.host_tier", label: "of it, host tier", colour: "host" },
    { key: "memory.device", label: "device in use", colour: "device" },
    { key: "memory.device_total", label: "device in all", colour: "device", dash: [6, 3] },
  ];
  return new ChartCard("memory", new Chart({
    title: series.now("memory.device") === null ? "Host memory" : "Host and device memory",
    format: bytes,
    isBytes: true,
    least: 0,
    empty: "the system does not report memory",
    lines: lines.filter(({ key }) => !key.includes("device") || series.now(key) !== null).map((line) => ({ ...line, of: (series) => series.of(line.key) })),
  }));
}

// Estimated hit ratios over a tier's size instead of over time.
class WhatIfCard {
  constructor(tiers) {
    this.tiers = tiers;
    this.title = "If a tier were smaller or larger";
    this.chart = new Chart({
      title: "Hit ratio if a tier were smaller or larger",
      format: percent,
      least: 0,
      most: 1,
      xTexts: SIZES.map(([, text]) => text),
      restAt: SIZES.findIndex(([size]) => size === "1"),
      lines: tiers.map((tier) => ({ key: `what-if.${tier}`, label: tier, colour: tier, of: (sizes) => sizes.of(tier) })),
    });
    this.charts = [this.chart];
    this.table = new Table(this.title, ["tier", ...SIZES.map(([, text]) => number(text)), "advice"]);
    const about = "Share of prompt tokens that would be found in a tier or a faster one, estimated from a sample of recent requests.";
    const both = make("div", { class: "beside" }, this.chart.element, this.table.element);
    this.element = card("what-if", this.title, true, make("p", { class: "small" }, about), both);
  }

  update({ series }) {
    const at = (tier, size) => series.now(`what_if.${tier}.${size}`);
    const known = this.tiers.filter((tier) => at(tier, "1") !== null);
    if (known.length === 0) return "no estimate yet";
    const sizes = { times: SIZES.map((_, index) => index), length: SIZES.length, of: (tier) => SIZES.map(([size]) => at(tier, size)) };
    this.chart.update(sizes, { from: -0.2, to: SIZES.length - 0.8 }, []);
    this.table.fill(known.map((tier) => [
      { text: tier, swatch: tier },
      ...SIZES.map(([size]) => ({ text: percent(at(tier, size)), data: { value: `what_if.${tier}.${size}` } })),
      advice(at(tier, "0.5"), at(tier, "1"), at(tier, "2")),
    ]));
    return true;
  }
}

function advice(half, now, twice) {
  if (twice - now >= ANY_GAIN) return `twice the size: ${percent(twice)} instead of ${percent(now)}, ${points(twice - now)} more`;
  if (now - half < ANY_GAIN) return "half the size is enough";
  return "the size is right";
}

function tierTable(tiers) {
  const table = new Table("Tiers", ["tier", number("used"), number("of"), number("full"), number("states"), number("leased"), number("not copied down"), number("evicted"), number("evicted before copied"), number("corrupt"), number("age"), "eviction causes"], "none");
  const rows = ({ series, facts }) =>
    tiers
      .filter((tier) => series.now(`tier.${tier}.capacity`) !== null)
      .map((tier) => {
        const now = (name) => series.now(`tier.${tier}.${name}`);
        const cell = (name, format) => ({ text: format(now(name)), data: { value: `tier.${tier}.${name}`, exact: String(now(name)) } });
        return [
          { text: tier, swatch: tier },
          cell("bytes", bytes),
          cell("capacity", bytes),
          percent(now("capacity") ? now("bytes") / now("capacity") : null),
          cell("states", (number) => (number ? count(number) : NONE)),
          cell("leased", count),
          cell("dirty", count),
          cell("evicted", count),
          cell("dropped", count),
          cell("corrupt", count),
          seconds(now("age")),
          facts.evicted.filter((each) => each.tier === tier).map((each) => `${words(each.cause)} ${count(each.blocks)}`).join(", ") || NONE,
        ];
      });
  const about = "Blocks. States: recurrent states among them. Leased: in use, cannot be evicted now. Not copied down: without a copy in a lower tier. Age: median time since the last use of evicted blocks. Evicted and corrupt blocks are counted since the start.";
  return new TableCard("tiers", "Tiers now", table, rows, { isWide: true, about });
}

function copyChart(lanes) {
  return new ChartCard("lanes", new Chart({
    title: "Bytes copied between tiers per second",
    isBytes: true,
    format: perSecond(bytes),
    empty: "there is no lower tier",
    lines: lanes.map((lane) => ({ key: `lane.${lane.name}`, label: lane.label, colour: lane.colour, dash: lane.dash, of: (series) => series.smooth(`lane.${lane.name}.bytes`, RATE_S) })),
  }));
}

function copyTable(lanes) {
  const table = new Table("Copy queues", ["route", number("now"), number("busy"), number("queued"), number("bytes queued"), number("copied"), number("failed")], "there is no lower tier");
  const rows = ({ series }) =>
    lanes.map((lane) => {
      const now = (name) => series.now(`lane.${lane.name}.${name}`);
      return [
        lane.label,
        perSecond(bytes)(series.newest(`lane.${lane.name}.bytes`)),
        percent(series.newest(`lane.${lane.name}.seconds`)),
        count(now("pending")),
        bytes(now("pending_bytes")),
        { text: bytes(now("bytes")), data: { value: `lane.${lane.name}.bytes`, exact: String(now("bytes")) } },
        count(now("failed")),
      ];
    });
  return new TableCard("copy-queues", "Copy queues", table, rows, { about: "Busy: running time of all copies of a route together. Several copies can run at once, so it may exceed 100 %." });
}
