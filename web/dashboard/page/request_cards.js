// The cards about requests: latencies, throughput, errors, and the tables of requests, documents and tenants.

import { ChartCard, TableCard } from "./card.js";
import { Chart } from "./chart.js";
import { NONE, bytes, clock, count, moment, perSecond, percent, seconds, short, words } from "./format.js";
import { SOURCES, label } from "./sources.js";
import { Table, number } from "./table.js";
import { RATE_S, reasonLink } from "./token_cards.js";

const QUANTILES = [
  { share: "p50", colour: "tone-4" },
  { share: "p90", colour: "tone-3", dash: [7, 3] },
  { share: "p95", colour: "tone-2", dash: [2, 3] },
  { share: "p99", colour: "tone-1" },
];
const ERRORS = [
  { key: "http.4xx", label: "4xx without 429", colour: "tone-3" },
  { key: "http.429", label: "429", colour: "watch" },
  { key: "http.5xx", label: "5xx", colour: "bad" },
];

export function requestCharts() {
  return [
    quantiles("ttft", "Time to first token", "no first token in this time range"),
    quantiles("token_gap", "Inter-token latency", "no output in this time range"),
    generated(),
    states(),
    errors(),
  ];
}

export function requestTables(tiers) {
  return [slowest(tiers), documents(tiers), images(), tenants(tiers)];
}

function quantiles(name, title, empty) {
  return new ChartCard(name, new Chart({
    title: `${title}, last minute`,
    format: seconds,
    isSeconds: true,
    empty,
    lines: QUANTILES.map(({ share, colour, dash }) => ({ key: `${name}.${share}`, label: share, colour, dash, of: (series) => series.of(`${name}.${share}`) })),
  }));
}

function generated() {
  return new ChartCard("generated", new Chart({
    title: "Output tokens per second",
    format: perSecond(short),
    isStacked: true,
    empty: "no output in this time range",
    lines: [{ key: "tokens.generated", label: "output tokens", colour: "tone-2", of: (series) => series.smooth("tokens.generated", RATE_S) }],
  }));
}

function states() {
  const names = [["running", "running", "tone-1"], ["promoting", "loading", "tone-2"], ["waiting", "waiting", "tone-4"]];
  return new ChartCard("requests", new Chart({
    title: "Requests by state",
    format: short,
    isStacked: true,
    empty: "no request ran in this time range",
    lines: names.map(([state, text, colour]) => ({ key: `requests.${state}`, label: text, colour, of: (series) => series.of(`requests.${state}`) })),
  }));
}

function errors() {
  return new ChartCard("errors", new Chart({
    title: "HTTP errors per second",
    format: perSecond(short),
    isStacked: true,
    empty: "none in this time range",
    lines: ERRORS.map((line) => ({ ...line, of: (series) => series.smooth(line.key, RATE_S) })),
  }));
}

// Returns the reasons of computed tokens with their numbers, each a link to its explanation.
function reasonLinks(reasons) {
  return Object.entries(reasons)
    .filter(([, tokens]) => tokens > 0)
    .sort((one, other) => other[1] - one[1])
    .map(([reason, tokens]) => [`${words(reason)} ${count(tokens)}`, reasonLink(reason)]);
}

export function slowest(tiers) {
  const sources = [...tiers, "recomputed"];
  const table = new Table(
    "Slowest requests",
    ["request", "arrived", "tenant", number("first token"), number("queue"), number("loading"), "tokens by source", number("prompt"), ...sources.map((source) => number(label(source))), "why computed"],
    "no request has finished yet",
  );
  const rows = ({ own }) =>
    own.slowest.map((record) => [
      { text: record.id, title: record.id, data: { kind: "id" } },
      clock(record.arrived_at),
      record.tenant ?? NONE,
      seconds(record.ttft_s ?? record.total_s),
      seconds(record.queue_s),
      seconds(record.load_s),
      { parts: SOURCES.map((source) => [source, record.tokens[source]]) },
      count(SOURCES.reduce((sum, source) => sum + record.tokens[source], 0)),
      ...sources.map((source) => count(record.tokens[source])),
      { links: reasonLinks(record.reasons) },
    ]);
  return new TableCard("slowest", "Slowest requests of the last hour", table, rows, { isWide: true, applies: ({ own }) => own?.slowest !== undefined });
}

function documents(tiers) {
  const places = [...tiers, "nowhere"];
  const table = new Table("Documents", ["document", "status", "tokens by tier", number("tokens"), number("time to load"), number("time to compute"), "pinned until"], "none");
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
  return new TableCard("documents", "Documents", table, rows, { isWide: true, applies: ({ own }) => own?.documents !== undefined });
}

function images() {
  const table = new Table("Images", ["figure", number("value")]);
  const rows = ({ facts: { images: found } }) => {
    const uses = found.num_encoded + found.num_from_host + found.num_from_disk;
    return [
      ["encoded", count(found.num_encoded)],
      ["encoder's result found in host memory", count(found.num_from_host)],
      ["encoder's result read from disk or a sidecar", count(found.num_from_disk)],
      ["share found", percent(uses ? (found.num_from_host + found.num_from_disk) / uses : null)],
      ["time in the encoder", seconds(found.encoding_s)],
      ["results in host memory", bytes(found.cached_bytes)],
      ["images that wait or are in use", bytes(found.waiting_bytes)],
    ];
  };
  return new TableCard("images", "Images since the start", table, rows, { applies: ({ facts }) => Boolean(facts.images) });
}

function tenants(tiers) {
  const sources = [...tiers, "recomputed"];
  const table = new Table("Tenants", ["tenant", "tokens by source", number("tokens"), ...sources.map((source) => number(label(source))), number("bytes in host memory"), number("bytes on disk")]);
  const rows = ({ facts }) =>
    facts.tenants.map((tenant) => {
      const tokens = tenant.tokens;
      return [
        tenant.name,
        tokens === null ? NONE : { parts: SOURCES.map((source) => [source, tokens[source]]) },
        count(tokens === null ? null : SOURCES.reduce((sum, source) => sum + tokens[source], 0)),
        ...sources.map((source) => count(tokens?.[source])),
        bytes(tenant.bytes.host),
        bytes(tenant.bytes.disk),
      ];
    });
  return new TableCard("tenants", "Tenants", table, rows, { isWide: true, applies: ({ facts }) => (facts.tenants ?? []).length > 0 });
}
