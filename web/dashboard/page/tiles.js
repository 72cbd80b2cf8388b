// The row of large numbers at the top.

import { SOURCES } from "./cards.js";
import { make } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";

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

export class Tiles {
  constructor(element, series) {
    this.isServe = series.has("requests.running");
    this.hits = new Tile("Cache hit ratio");
    this.tokens = new Tile("Prompt tokens");
    this.third = new Tile(this.isServe ? "First token" : "Engines");
    this.fourth = new Tile(this.isServe ? "Requests" : "Chunks found");
    this.health = new Tile("Health");
    element.replaceChildren(...[this.hits, this.tokens, this.third, this.fourth, this.health].map((tile) => tile.element));
  }

  update({ series, facts, first, last }) {
    const tokens = (source) => series.sum(`tokens.${source}`, first, last);
    const all = SOURCES.reduce((sum, source) => sum + tokens(source), 0);
    const found = all - tokens("recomputed");
    this.hits.say(percent(all > 0 ? found / all : null), all > 0 ? `${short(found)} of ${short(all)} tokens in this time range` : "no prompts in this time range");
    const totals = SOURCES.map((source) => series.now(`tokens.${source}`) ?? 0);
    const rate = SOURCES.reduce((sum, source) => sum + (series.newest(`tokens.${source}`) ?? 0), 0);
    this.tokens.say(`${short(rate)}/s`, `${count(totals.reduce((sum, each) => sum + each, 0))} since the start`);
    if (this.isServe) this.#serve(series);
    else this.#sidecar(series);
    this.#health(facts);
  }

  #serve(series) {
    this.third.say(seconds(series.newest("ttft.p50")), `p90 ${seconds(series.newest("ttft.p90"))}`);
    this.fourth.say(count(series.now("requests.running")), `running, ${count(series.now("requests.waiting"))} waiting, ${count(series.now("requests.promoting"))} loading`);
  }

  #sidecar(series) {
    const asked = series.now("chunks.asked");
    this.third.say(count(series.now("clients")), `${bytes(series.now("pinned.bytes"))} pinned`);
    this.fourth.say(percent(asked ? series.now("chunks.promised") / asked : null), `of ${short(asked ?? 0)} looked up, ${short(series.now("chunks.lost") ?? 0)} lost`);
  }

  #health(facts) {
    const of = (state) => facts.conditions.filter((each) => each.state === state);
    const [bad, watch] = [of("bad"), of("watch")];
    if (facts.why_not_ready) this.health.say("Not ready", facts.why_not_ready, "bad");
    else if (facts.is_draining) this.health.say("Draining", "running requests finish, new ones are refused", "watch");
    else if (bad.length > 0) this.health.say(`${bad.length} bad`, `${bad[0].thing}: ${bad[0].text}`, "bad");
    else if (watch.length > 0) this.health.say(watch.length === 1 ? "1 warning" : `${watch.length} warnings`, `${watch[0].thing}: ${watch[0].text}`, "watch");
    else this.health.say("OK", "tiers, disk and copies", "good");
  }
}
