// The cards of the page. Which cards are shown depends on the data that the server sends.

import { Chart } from "./chart.js";
import { make } from "./dom.js";
import { NONE, bytes, clock, count, moment, percent, perSecond, seconds, short, words, years } from "./format.js";
import { Table } from "./table.js";

export const SOURCES = ["device", "host", "disk", "remote", "recomputed"];
const LANE_COLOURS = ["device", "host", "disk", "recomputed", "remote", "remote"];
const LANE_DASHES = [undefined, [6, 3], undefined, [6, 3], undefined, [6, 3]];
const LANE_LABELS = {
  device_to_host: "device → host",
  host_to_device: "host → device",
  host_to_disk: "host → disk",
  disk_to_host: "disk → host",
  host_to_remote: "host → remote",
  remote_to_host: "remote → host",
  store: "store (host → disk)",
  load: "load (disk → host)",
  put: "put (host → remote)",
  get: "get (remote → host)",
  digest: "digests of new chunks",
  verify: "verification before reads",
};
const number = (label) => ({ label, isNumber: true });
const label = (source) => (source === "recomputed" ? "computed" : source);

const RATE_S = 5; // averaging time of rates
const RATIO_S = 30; // averaging time of hit ratios, which are undefined in seconds without a prompt

function hitRatios(series, tiers) {
  const sources = SOURCES.map((source) => [tiers.includes(source), series.smooth(`tokens.${source}`, RATIO_S)]);
  return series.times.map((_, index) => {
    let all = 0;
    let hits = 0;
    for (const [isHit, values] of sources) {
      if (values[index] === null) return null;
      all += values[index];
      if (isHit) hits += values[index];
    }
    return all > 1e-6 ? hits / all : null;
  });
}

function card(id, title, wide, ...children) {
  const heading = make("h2", { id: `${id}-title` }, title);
  return make("section", { class: wide ? "card wide" : "card", id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

const note = (text) => make("p", { class: "small" }, text);

// Each card has an element. Its update({ series, view, facts, own }) returns whether the card is shown.
class ChartCard {
  constructor(id, title, wide, chart, about = null) {
    this.charts = [chart];
    this.element = card(id, title, wide, about === null ? null : note(about), chart.element);
    this.id = id;
  }

  update(state) {
    for (const chart of this.charts) chart.update(state.series, state.view);
    return true;
  }
}

class TableCard {
  charts = [];

  constructor(id, title, wide, table, rows, { about = null, isShown = () => true } = {}) {
    this.table = table;
    this.rows = rows;
    this.isShown = isShown;
    this.element = card(id, title, wide, about === null ? null : note(about), table.element);
    this.id = id;
  }

  update(state) {
    const shown = this.isShown(state);
    if (shown) this.table.fill(this.rows(state));
    return shown;
  }
}

export function cards(series) {
  const tiers = ["device", "host", "disk"].filter((tier) => series.has(`tier.${tier}.bytes`));
  const sourceTiers = series.has("tier.remote.blocks") ? [...tiers, "remote"] : tiers;
  const lanes = series.columns.filter((column) => /^lane\..*\.bytes$/.test(column)).map((column) => column.split(".")[1]);
  const isServe = series.has("requests.running");
  return [
    sources(sourceTiers),
    reasons(series),
    ratios(sourceTiers),
    new ChartCard("fill", "How full the tiers are", false, new Chart({
      title: "How full the tiers are",
      format: percent,
      least: 0,
      most: 1,
      lines: tiers.map((tier) => ({ key: `fill.${tier}`, label: tier, colour: tier, of: (all) => share(all, `tier.${tier}.bytes`, `tier.${tier}.capacity`) })),
    })),
    ages(tiers),
    tierTable(tiers),
    new WhatIfCard(tiers),
    lanesChart(lanes),
    laneTable(lanes),
    ...(isServe ? [firstTokens(), requests()] : [engines(), endpoints(), layouts(), pins()]),
    slowest(),
    documents(),
    tenants(),
    health(),
    disk(),
    remote(),
  ];
}

function share(series, part, whole) {
  const all = series.of(whole);
  return series.of(part).map((value, index) => (value === null || !all[index] ? null : value / all[index]));
}

function sources(tiers) {
  return new ChartCard("sources", "Where prompts' tokens came from", true, new Chart({
    title: "Where prompts' tokens came from, per second",
    format: perSecond(short),
    isStacked: true,
    empty: "No prompts in this time range",
    lines: [...tiers, "recomputed"].map((source) => ({ key: `tokens.${source}`, label: label(source), colour: source, of: (series) => series.smooth(`tokens.${source}`, RATE_S) })),
  }));
}

function ratios(tiers) {
  const lines = tiers.map((tier) => ({
    key: `ratio.${tier}`,
    label: tier,
    colour: tier,
    of: (series) => hitRatios(series, [tier]),
  }));
  lines.push({ key: "ratio.all", label: "all tiers", colour: "ink", dash: [5, 4], of: (series) => hitRatios(series, tiers) });
  return new ChartCard("ratios", "Hit ratio by tier", false, new Chart({ title: "Hit ratio by tier", format: percent, least: 0, most: 1, lines, empty: "No prompts in this time range" }));
}

function ages(tiers) {
  return new ChartCard("ages", "Age of evicted blocks", false, new Chart({
    title: "Median age of evicted blocks",
    format: seconds,
    log: true,
    mark: { at: 600, label: "ten minutes" },
    empty: "No evictions in this time range",
    lines: tiers.map((tier) => ({ key: `age.${tier}`, label: tier, colour: tier, of: (series) => series.of(`tier.${tier}.age`) })),
  }));
}

function reasons(series) {
  const names = series.columns.filter((column) => column.startsWith("reason."));
  const rows = ({ series: now, first, last }) => {
    const inRange = names.map((column) => [column, now.sum(column, first, last), now.now(column)]);
    const most = Math.max(1, ...inRange.map(([, sum]) => sum));
    return inRange
      .filter(([, sum, total]) => sum > 0 || total > 0)
      .sort((one, other) => other[1] - one[1] || other[2] - one[2])
      .map(([column, sum, total]) => [
        { text: words(column.slice("reason.".length)) },
        { parts: [["recomputed", sum], ["rest", most - sum]] },
        short(sum),
        { text: count(total), data: { value: column } },
      ]);
  };
  const table = new Table("Why tokens were computed", ["reason", "", number("in this time range"), number("since the start")], "No tokens computed yet");
  return new TableCard("reasons", "Why tokens were computed", false, table, rows);
}

const SIZES = [["0.5", "half"], ["1", "current"], ["2", "twice"], ["4", "four times"]];
const ANY_GAIN = 0.01;

// Estimated hit ratios over a tier's size instead of over time.
class WhatIfCard {
  constructor(tiers) {
    this.id = "what-if";
    this.tiers = tiers;
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
    this.table = new Table("If a tier were smaller or larger", ["tier", ...SIZES.map(([, text]) => number(text)), "advice"]);
    const about = "Share of prompt tokens that would be found in a tier or a faster one, estimated from a sample of recent requests.";
    const both = make("div", { class: "beside" }, this.chart.element, this.table.element);
    this.element = card(this.id, "If a tier were smaller or larger", true, note(about), both);
  }

  update({ series }) {
    const at = (tier, size) => series.now(`what_if.${tier}.${size}`);
    const known = this.tiers.filter((tier) => at(tier, "1") !== null);
    if (known.length === 0) return false;
    const sizes = { times: SIZES.map((_, index) => index), length: SIZES.length, of: (tier) => SIZES.map(([size]) => at(tier, size)) };
    this.chart.update(sizes, { from: -0.2, to: SIZES.length - 0.8 });
    this.table.fill(known.map((tier) => [
      { text: tier, swatch: tier },
      ...SIZES.map(([size]) => ({ text: percent(at(tier, size)), data: { value: `what_if.${tier}.${size}` } })),
      advice(at(tier, "0.5"), at(tier, "1"), at(tier, "2")),
    ]));
    return true;
  }
}

function advice(half, now, twice) {
  if (twice - now >= ANY_GAIN) return `twice the size would give ${percent(twice)} instead of ${percent(now)}`;
  if (now - half < ANY_GAIN) return "half the size is enough";
  return "the size is right";
}

function tierTable(tiers) {
  const table = new Table("Tiers", ["tier", number("used"), number("of"), number("full"), number("leased"), number("dirty"), number("evicted"), number("lost spills"), number("corrupt"), number("age"), "eviction causes"]);
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
          cell("leased", count),
          cell("dirty", count),
          cell("evicted", count),
          cell("dropped", count),
          cell("corrupt", count),
          seconds(now("age")),
          facts.evicted.filter((each) => each.tier === tier).map((each) => `${words(each.cause)} ${count(each.blocks)}`).join(", ") || NONE,
        ];
      });
  const about = "Leased: in use. Dirty: without a copy in a lower tier. Lost spills: evicted before a copy was made. Age: median age of evicted blocks. Evicted, lost and corrupt blocks are counted since the start.";
  return new TableCard("tiers", "Tiers", true, table, rows, { about });
}

function lanesChart(lanes) {
  return new ChartCard("lanes", "Copies between tiers", false, new Chart({
    title: "Bytes copied between tiers, per second",
    isBytes: true,
    format: perSecond(bytes),
    lines: lanes.map((lane, index) => ({
      key: `lane.${lane}`,
      label: LANE_LABELS[lane] ?? words(lane),
      colour: LANE_COLOURS[index % LANE_COLOURS.length],
      dash: LANE_DASHES[index % LANE_DASHES.length],
      of: (series) => series.smooth(`lane.${lane}.bytes`, RATE_S),
    })),
  }));
}

function laneTable(lanes) {
  const table = new Table("Lanes", ["lane", number("now"), number("busy"), number("queued"), number("bytes queued"), number("copied"), number("failed")]);
  const rows = ({ series }) =>
    lanes.map((lane) => {
      const now = (name) => series.now(`lane.${lane}.${name}`);
      return [
        LANE_LABELS[lane] ?? words(lane),
        perSecond(bytes)(series.newest(`lane.${lane}.bytes`)),
        percent(series.newest(`lane.${lane}.seconds`)),
        count(now("pending")),
        bytes(now("pending_bytes")),
        { text: bytes(now("bytes")), data: { value: `lane.${lane}.bytes`, exact: String(now("bytes")) } },
        count(now("failed")),
      ];
    });
  return new TableCard("lane-table", "Lanes", false, table, rows, { about: "Busy: total running time of copies. It may exceed 100 %, because several copies can run at once in a lane." });
}

function firstTokens() {
  return new ChartCard("ttft", "Time to first token", false, new Chart({
    title: "Time to first token of the last minute's requests",
    format: seconds,
    empty: "No request had its first token in this time range",
    lines: [
      { key: "ttft.p50", label: "p50", colour: "host", of: (series) => series.of("ttft.p50") },
      { key: "ttft.p90", label: "p90", colour: "recomputed", dash: [6, 3], of: (series) => series.of("ttft.p90") },
    ],
  }));
}

function requests() {
  const states = [["running", "device"], ["promoting", "disk"], ["waiting", "recomputed"]];
  return new ChartCard("requests", "Requests", false, new Chart({
    title: "Requests by state",
    format: short,
    isStacked: true,
    empty: "No request ran in this time range",
    lines: states.map(([state, colour]) => ({ key: `requests.${state}`, label: state, colour, of: (series) => series.of(`requests.${state}`) })),
  }));
}

function slowest() {
  const table = new Table(
    "Slowest requests",
    ["request", "arrived", "tenant", number("first token"), number("queue"), number("loading"), "tokens by source", number("prompt"), ...SOURCES.map((source) => number(label(source))), "why computed"],
    "No request has finished yet",
  );
  const rows = ({ own }) =>
    own.slowest.map((record) => {
      const reasons = Object.entries(record.reasons).filter(([, tokens]) => tokens > 0).sort((one, other) => other[1] - one[1]);
      return [
        { text: record.id, title: record.id, data: { kind: "id" } },
        clock(record.arrived_at),
        record.tenant ?? NONE,
        seconds(record.ttft_s ?? record.total_s),
        seconds(record.queue_s),
        seconds(record.load_s),
        { parts: SOURCES.map((source) => [source, record.tokens[source]]) },
        count(SOURCES.reduce((sum, source) => sum + record.tokens[source], 0)),
        ...SOURCES.map((source) => count(record.tokens[source])),
        reasons.map(([reason, tokens]) => `${words(reason)} ${count(tokens)}`).join(", ") || NONE,
      ];
    });
  return new TableCard("slowest", "Slowest requests of the last hour", true, table, rows, { isShown: ({ own }) => own?.slowest !== undefined });
}

function documents() {
  const places = [...SOURCES.slice(0, 3), "nowhere"];
  const table = new Table("Documents", ["document", "status", "tokens by tier", number("tokens"), number("time to load"), number("time to compute"), "pinned until"], "No documents");
  const rows = ({ own }) =>
    own.documents.map((each) => [
      { text: each.id, title: each.id, data: { kind: "id" } },
      each.error === null ? each.status : `${each.status}: ${each.error}`,
      { parts: places.map((place) => [place === "nowhere" ? "rest" : place, each.tokens[place] ?? 0]) },
      count(each.num_tokens),
      seconds(each.load_s),
      seconds(each.compute_s),
      each.pin === null ? NONE : moment(each.pin.expires_at),
    ]);
  return new TableCard("documents", "Documents", true, table, rows, { isShown: ({ own }) => own?.documents !== undefined });
}

function tenants() {
  const table = new Table("Tenants", ["tenant", "tokens by source", number("tokens"), ...SOURCES.map((source) => number(label(source))), number("bytes in host memory"), number("bytes on disk")]);
  const rows = ({ facts }) =>
    facts.tenants.map((tenant) => {
      const tokens = tenant.tokens;
      return [
        tenant.name,
        tokens === null ? NONE : { parts: SOURCES.map((source) => [source, tokens[source]]) },
        count(tokens === null ? null : SOURCES.reduce((sum, source) => sum + tokens[source], 0)),
        ...SOURCES.map((source) => count(tokens?.[source])),
        bytes(tenant.bytes.host),
        bytes(tenant.bytes.disk),
      ];
    });
  return new TableCard("tenants", "Tenants", true, table, rows, { isShown: ({ facts }) => (facts.tenants ?? []).length > 0 });
}

function engines() {
  const table = new Table("Attached engines", ["engine", number("attached for"), "model", number("leased chunks")], "No engine is attached");
  const rows = ({ facts }) => facts.clients.map((client) => [client.name, seconds(client.attached_s), client.layout?.model ?? NONE, count(client.leased_chunks)]);
  return new TableCard("engines", "Attached engines", true, table, rows);
}

function endpoints() {
  const table = new Table("Endpoints", ["endpoint", number("looked up"), number("found"), number("loaded"), number("stored"), number("lost"), number("refused"), "reasons"]);
  const rows = ({ facts }) =>
    facts.endpoints.map((endpoint) => [
      endpoint.kind,
      ...["asked", "promised", "loaded", "stored", "lost", "refused"].map((name) => ({ text: count(endpoint[name]), data: { value: `endpoint.${endpoint.kind}.${name}` } })),
      [...Object.entries(endpoint.why_lost), ...Object.entries(endpoint.why_refused)].filter(([, times]) => times > 0).map(([why, times]) => `${words(why)} ${count(times)}`).join(", ") || NONE,
    ]);
  return new TableCard("endpoints", "Chunks by endpoint", true, table, rows);
}

function layouts() {
  const table = new Table("Layouts", ["model", "layout", number("memory"), number("chunks"), number("leased"), number("not on disk")], "No engine has registered a layout");
  const rows = ({ facts }) =>
    facts.layouts.map((each) => [
      each.model,
      { text: each.digest.slice(0, 8), title: each.digest },
      bytes(each.held_bytes),
      count(each.chunks),
      count(each.leased),
      count(each.unsaved),
    ]);
  return new TableCard("layouts", "KV layouts", true, table, rows);
}

function pins() {
  const table = new Table("Pins", ["pin", number("pinned for"), "model", number("chunks")]);
  const rows = ({ facts }) => facts.pins.held.map((each) => [{ text: each.name, data: { kind: "id" } }, seconds(each.held_s), each.model ?? NONE, count(each.chunks)]);
  return new TableCard("pins", "Pins", true, table, rows, { isShown: ({ facts }) => facts.pins.held.length > 0 });
}

function health() {
  const table = new Table("Health", ["state", "component", "details"], "There is no disk to monitor, and nothing is damaged");
  const rows = ({ facts }) => facts.conditions.map((each) => [{ text: "", state: each.state }, each.thing, each.text]);
  return new TableCard("health", "Health", false, table, rows);
}

function remote() {
  const table = new Table("Remote tier", ["metric", number("value")]);
  const rows = ({ facts }) => [
    ["store", { text: facts.remote.where, data: { kind: "id" } }],
    ["known blocks", count(facts.remote.known_blocks)],
    ["blocks stored since the start", count(facts.remote.stored_blocks)],
    ["blocks to be stored", count(facts.remote.wanted_blocks)],
    ["bytes read", bytes(facts.remote.read_bytes)],
    ["bytes written", bytes(facts.remote.written_bytes)],
    ["requests", count(facts.remote.requests)],
    ["lookup time", seconds(facts.remote.ask_s)],
    ["prefix lookups", count(facts.remote.asked)],
    ["lookups answered too late", count(facts.remote.late)],
  ];
  return new TableCard("remote", "Remote tier", false, table, rows, { isShown: ({ facts }) => Boolean(facts.remote) });
}

function disk() {
  const table = new Table("Disk and pins", ["metric", number("value")]);
  const rows = ({ facts, series }) => {
    const found = [];
    if (facts.disk) {
      found.push(["size of the store's files", bytes(facts.disk.file_bytes)]);
      found.push(["known blocks", facts.disk.is_indexed ? count(facts.disk.known_blocks) : `${count(facts.disk.known_blocks)}, still indexing`]);
      found.push(["bytes written since the store was created", bytes(facts.disk.written_bytes)]);
      if (facts.disk.budget_left_bytes !== null) found.push(["remaining write budget", bytes(facts.disk.budget_left_bytes)]);
      if (facts.disk.life !== null) {
        found.push(["used endurance of the drive", percent(facts.disk.life.used)]);
        found.push(["remaining life at this rate", facts.disk.life.years_left === null ? "nothing is written" : years(facts.disk.life.years_left)]);
      }
    }
    found.push(["pinned in host memory", bytes(series.now("pinned.bytes"))]);
    if (facts.pins) found.push(["pins", count(facts.pins.num)], ["limit on pinned bytes", bytes(facts.pins.max_bytes)]);
    if (series.has("backed.bytes")) found.push(["backed host memory", `${bytes(series.now("backed.bytes"))} of ${bytes(facts.segment_bytes)}`]);
    return found;
  };
  return new TableCard("disk", "Disk and pins", false, table, rows);
}
