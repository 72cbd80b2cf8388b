// The cards that only a sidecar's page has: its engines, and what they look up and store.

import { TableCard, card } from "./card.js";
import { make } from "./dom.js";
import { NONE, bytes, count, seconds, words } from "./format.js";
import { Table, number } from "./table.js";

const COUNTS = [["asked", "looked up"], ["promised", "found"], ["loaded", "loaded"], ["stored", "stored"], ["lost", "lost"], ["refused", "refused"]];

export function engineCards(attach) {
  return [new AttachCard(attach), engines(), endpoints(), layouts(), pins()];
}

// The commands that attach an engine, shown while no engine is attached.
class AttachCard {
  charts = [];

  constructor(commands) {
    this.title = "Attach an engine";
    const children = commands.flatMap(({ engine, lines }) => [
      make("p", { class: "small" }, `${engine}:`),
      make("pre", {}, make("code", {}, lines.join("\n"))),
    ]);
    this.element = card("attach", this.title, true, make("p", { class: "small" }, "No engine is attached. Start one of these in the engine's environment, on this machine."), ...children);
  }

  update({ facts }) {
    return facts.clients.length === 0;
  }
}

function engines() {
  const table = new Table("Attached engines", ["engine", number("attached for"), "model", number("leased chunks")]);
  const rows = ({ facts }) => facts.clients.map((client) => [client.name, seconds(client.attached_s), client.layout?.model ?? NONE, count(client.leased_chunks)]);
  return new TableCard("engines", "Attached engines", table, rows, { applies: ({ facts }) => facts.clients.length > 0 });
}

function endpoints() {
  const table = new Table("Chunks by endpoint", ["endpoint", ...COUNTS.map(([, text]) => number(text)), "reasons"], "no engine has looked up a chunk yet");
  const rows = ({ facts }) =>
    facts.endpoints.map((endpoint) => [
      endpoint.kind,
      ...COUNTS.map(([name]) => ({ text: count(endpoint[name]), data: { value: `endpoint.${endpoint.kind}.${name}` } })),
      [...Object.entries(endpoint.why_lost), ...Object.entries(endpoint.why_refused)].filter(([, times]) => times > 0).map(([why, times]) => `${words(why)} ${count(times)}`).join(", ") || NONE,
    ]);
  return new TableCard("endpoints", "Chunks by endpoint", table, rows, { isWide: true, about: "A chunk is a block of KV. Lost: found, but not loaded, or not stored. The reasons say why chunks were lost or requests refused." });
}

function layouts() {
  const table = new Table("KV layouts", ["model", "layout", number("memory"), number("chunks"), number("leased"), number("not on disk")], "no engine has registered one");
  const rows = ({ facts }) =>
    facts.layouts.map((each) => [
      each.model,
      { text: each.digest.slice(0, 8), title: each.digest },
      bytes(each.held_bytes),
      count(each.chunks),
      count(each.leased),
      count(each.unsaved),
    ]);
  return new TableCard("layouts", "KV layouts", table, rows);
}

function pins() {
  const table = new Table("Pins", ["pin", number("pinned for"), "model", number("chunks")], "none");
  const rows = ({ facts }) => facts.pins.held.map((each) => [{ text: each.name, data: { kind: "id" } }, seconds(each.held_s), each.model ?? NONE, count(each.chunks)]);
  return new TableCard("pins", "Pins", table, rows);
}
