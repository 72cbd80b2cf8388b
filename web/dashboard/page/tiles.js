// The row of large numbers at the top.

import { make } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";
import { SOURCES } from "./sources.js";

const ERRORS = ["http.4xx", "http.429", "http.5xx"];

class Tile {
  constructor(title) {
    this.value = make("p", { class: "big" });
    this.about = make("p", { class: "small" });
    this.element = make("div", { class: "tile" }, make("h2", {}, title), this.value, this.about);
  }

  say(value, about, state = "") {
    this.value.textContent = value;
    this.about.textContent = about;
    this.element.dataset.state = state;
  }
}

const TITLES = {
  serve: { hits: "Cache hit ratio", tokens: "Prompt tokens", output: "Output tokens", first: "Time to first token", gap: "Inter-token latency", requests: "Requests", errors: "HTTP errors", health: "Health" },
  sidecar: { hits: "Cache hit ratio", tokens: "Prompt tokens", engines: "Engines", chunks: "Chunks found", memory: "Memory", health: "Health" },
};

export class Tiles {
  constructor(element, kind) {
    this.tiles = Object.fromEntries(Object.entries(TITLES[kind]).map(([name, title]) => [name, new Tile(title)]));
    element.replaceChildren(...Object.values(this.tiles).map((tile) => tile.element));
  }

  update(state) {
    this.#hits(state);
    this.#tokens(state);
    if (this.tiles.first) this.#serve(state);
    else this.#sidecar(state);
    this.#health(state.facts);
  }

  #hits({ series, first, last }) {
    const tokens = (source) => series.sum(`tokens.${source}`, first, last);
    const all = SOURCES.reduce((sum, source) => sum + tokens(source), 0);
    const found = all - tokens("recomputed");
    this.tiles.hits.say(percent(all > 0 ? found / all : null), all > 0 ? `${short(found)} of ${short(all)} tokens in this time range` : "no prompts in this time range");
  }

  #tokens({ series }) {
    const totals = SOURCES.map((source) => series.now(`tokens.${source}`) ?? 0);
    const rate = SOURCES.reduce((sum, source) => sum + (series.newest(`tokens.${source}`) ?? 0), 0);
    this.tiles.tokens.say(`${short(rate)}/s`, `${count(totals.reduce((sum, each) => sum + each, 0))} since the start`);
  }

  #serve({ series, first, last }) {
    this.tiles.output.say(`${short(series.newest("tokens.generated") ?? 0)}/s`, `${count(series.now("tokens.generated") ?? 0)} since the start`);
    for (const [tile, name] of [[this.tiles.first, "ttft"], [this.tiles.gap, "token_gap"]]) {
      const at = (share) => seconds(series.newest(`${name}.${share}`));
      tile.say(at("p50"), `p50 · p90 ${at("p90")} · p99 ${at("p99")}`);
    }
    this.tiles.requests.say(count(series.now("requests.running")), `running, ${count(series.now("requests.waiting"))} waiting, ${count(series.now("requests.promoting"))} loading`);
    const inRange = ERRORS.reduce((sum, column) => sum + series.sum(column, first, last), 0);
    const total = (column) => count(series.now(column) ?? 0);
    this.tiles.errors.say(count(inRange), `in this time range · since the start ${total("http.5xx")} 5xx, ${total("http.429")} 429, ${total("http.4xx")} other 4xx`);
  }

  #sidecar({ series }) {
    const asked = series.now("chunks.asked");
    this.tiles.engines.say(count(series.now("clients")), `attached, ${bytes(series.now("pinned.bytes"))} pinned`);
    this.tiles.chunks.say(percent(asked ? series.now("chunks.promised") / asked : null), `of ${short(asked ?? 0)} looked up, ${short(series.now("chunks.lost") ?? 0)} lost`);
    this.tiles.memory.say(bytes(series.now("memory.resident")), `resident, ${bytes(series.now("memory.host_tier"))} of it host tier`);
  }

  #health(facts) {
    const of = (state) => facts.conditions.filter((each) => each.state === state);
    const [bad, watch] = [of("bad"), of("watch")];
    const { health } = this.tiles;
    if (facts.why_not_ready) health.say("Not ready", facts.why_not_ready, "bad");
    else if (facts.is_draining) health.say("Draining", "running requests finish, new ones are refused", "watch");
    else if (bad.length > 0) health.say(`${bad.length} bad`, `${bad[0].thing}: ${bad[0].text}`, "bad");
    else if (watch.length > 0) health.say(watch.length === 1 ? "1 warning" : `${watch.length} warnings`, `${watch[0].thing}: ${watch[0].text}`, "watch");
    else health.say("OK", "tiers, disk and copies", "good");
  }
}
