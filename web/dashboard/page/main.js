// The page: reads the history, then follows the live stream. It reconnects when the server comes back.

import { Api, Refused } from "./api.js";
import { sections } from "./cards.js";
import { byId, make } from "./dom.js";
import { clock, moment } from "./format.js";
import { Series } from "./series.js";
import { presentTiers } from "./sources.js";
import { Tiles } from "./tiles.js";

const RANGES = [["10 min", 600], ["2 h", 7200], ["24 h", 86400], ["14 d", 1209600]];
const THEMES = ["auto", "light", "dark"];
const MIN_WAIT_S = 1;
const MAX_WAIT_S = 15;
const MIN_SPAN_S = 60; // shown at least, so that a server that has just started has a readable time axis

const api = new Api();
const page = {
  about: null,
  series: null,
  tiles: null,
  sections: [],
  builtFor: "", // tiers that the sections were made for
  facts: null,
  own: null,
  rangeS: RANGES[0][1],
  zoom: null,
  isPaused: false,
  connection: null,
};

function tell(state, text) {
  const status = byId("status");
  if (status.textContent === text) return;
  status.dataset.state = state;
  status.textContent = text;
}

function view() {
  const { series, zoom, rangeS } = page;
  if (zoom !== null) return zoom;
  // A range of which the server knows only the end is shown without its blank part.
  const from = Math.max(series.end - rangeS, Math.min(series.since, series.end - MIN_SPAN_S));
  return { from, to: series.end };
}

function allCharts() {
  return page.sections.flatMap((section) => section.cards.flatMap((card) => card.charts));
}

// Makes the sections, and makes them again when a tier has come or gone.
function build() {
  const tiers = presentTiers(page.series, page.facts);
  const builtFor = JSON.stringify(tiers);
  if (builtFor === page.builtFor) return;
  page.builtFor = builtFor;
  page.sections = sections(page.series, tiers, page.about);
  for (const chart of allCharts()) chart.onZoom(setZoom);
  byId("cards").replaceChildren(...page.sections.map((section) => section.element));
  byId("jump").replaceChildren(...page.sections.map(({ id, title }) => make("li", {}, make("a", { href: `#${id}` }, title))));
}

// Draws everything from the current data.
function draw() {
  const { series, facts, own } = page;
  if (series === null || facts === null || series.length === 0) return;
  build();
  const shown = view();
  const first = Math.max(0, Math.floor((shown.from - series.start) / series.stepS));
  const last = Math.min(series.length, Math.ceil((shown.to - series.start) / series.stepS));
  const state = { series, facts, own, view: shown, first, last, starts: series.restarts };
  page.tiles.update(state);
  page.sections.forEach((section, number) => {
    const isHidden = !section.update(state);
    if (section.element.hidden !== isHidden) section.element.hidden = isHidden;
    byId("jump").children[number].hidden = isHidden;
  });
  byId("unzoom").hidden = page.zoom === null;
}

function setZoom(zoom) {
  page.zoom = zoom;
  draw();
}

async function loadHistory(signal) {
  const history = await api.json(`history?range=${page.rangeS}`, signal);
  page.series.load(history);
  draw();
}

function begin(about) {
  byId("server-name").textContent = about.name;
  const own = about.own_only ? " · your own requests and documents" : "";
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const since = `up since ${moment(about.started_at)}`;
  byId("server-about").textContent = `${about.kind === "serve" ? "server" : "sidecar"} ${about.version} on ${about.host} · ${since} · times in ${zone}${own}`;
  document.title = about.name ? `${about.name} · kvtier` : `kvtier ${about.kind}`;
  page.about = about;
  page.series = new Series(about.columns);
  page.facts = null;
  page.own = null;
  page.tiles = new Tiles(byId("tiles"), about.kind);
  page.builtFor = ""; // the sections are made once there are facts to show
}

// Follows one stream to its end.
async function follow(signal) {
  for await (const [name, content] of api.events(signal)) {
    if (name === "hello") {
      begin(content);
      await loadHistory(signal);
    } else if (name === "silent") {
      tell("bad", `no answer: ${content.why}`);
    } else if (name === "own") {
      page.own = content;
    } else if (name === "tick") {
      page.facts = content.facts;
      page.series.add(content);
      if (!page.isPaused) tell("live", "live");
    }
    if (!page.isPaused) draw();
    document.documentElement.dataset.at = content.at ?? document.documentElement.dataset.at ?? "";
  }
}

const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// Follows the stream while the page is visible.
async function watch() {
  let waitS = MIN_WAIT_S;
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    page.connection = new AbortController();
    try {
      await follow(page.connection.signal);
      waitS = MIN_WAIT_S;
      tell("wait", "the server has stopped; reconnecting");
    } catch (error) {
      if (page.connection.signal.aborted) continue;
      if (error instanceof Refused && error.status === 401) {
        await askKey(error.message);
        continue;
      }
      tell("bad", error instanceof Refused ? error.message : "no connection; reconnecting");
      waitS = error.retryS || Math.min(MAX_WAIT_S, waitS * 2);
    }
    await sleep(waitS);
  }
}

async function askKey(why) {
  tell("wait", "a key is needed");
  byId("key-why").textContent = api.hasKey ? why : "This server shows its data only to users with a key.";
  const dialog = byId("ask-key");
  dialog.showModal();
  await new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      api.setKey(byId("key").value.trim());
      byId("key").value = "";
      dialog.close();
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

function say(text) {
  byId("note").textContent = text;
  byId("note").hidden = text === "";
}

async function guarded(doing) {
  try {
    await doing();
    say("");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  for (const chart of allCharts()) chart.redraw();
}

function controls() {
  for (const [text, rangeS] of RANGES) {
    const input = make("input", { type: "radio", name: "range", value: rangeS, id: `range-${rangeS}`, checked: rangeS === page.rangeS });
    input.addEventListener("change", () => {
      page.rangeS = rangeS;
      page.zoom = null;
      if (page.series !== null) guarded(() => loadHistory());
    });
    byId("ranges").append(make("span", {}, input, make("label", { for: `range-${rangeS}` }, text)));
  }
  byId("unzoom").addEventListener("click", () => setZoom(null));
  byId("pause").addEventListener("click", () => {
    page.isPaused = !page.isPaused;
    byId("pause").setAttribute("aria-pressed", String(page.isPaused));
    if (page.isPaused) tell("wait", `paused at ${clock(Date.now() / 1000)}`);
    else draw();
  });
  byId("csv").addEventListener("click", () => guarded(() => api.download("csv", page.rangeS)));
  byId("json").addEventListener("click", () => guarded(() => api.download("json", page.rangeS)));
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "auto";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    try {
      localStorage.setItem("kvtier-theme", next);
    } catch {
      // Without storage the theme lasts until the page is closed.
    }
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme ?? "auto"));
  document.addEventListener("visibilitychange", () => document.hidden && page.connection?.abort());
  addEventListener("pagehide", () => page.connection?.abort());
}

controls();
setTheme(document.documentElement.dataset.theme ?? "auto");
watch();
