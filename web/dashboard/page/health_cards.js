// The cards about the health of the stores.

import { TableCard } from "./card.js";
import { bytes, count, percent, seconds, years } from "./format.js";
import { Table, number } from "./table.js";

export function healthCards() {
  return [health(), disk(), remote(), pinned()];
}

function health() {
  const table = new Table("Health", ["state", "component", "details"], "there is no store to watch, and no block is corrupt");
  const rows = ({ facts }) => facts.conditions.map((each) => [{ text: "", state: each.state }, each.thing, each.text]);
  return new TableCard("health", "Health", table, rows);
}

const facts = (caption) => new Table(caption, ["figure", number("value")]);

function disk() {
  const rows = ({ facts: { disk: found } }) => {
    const shown = [
      ["size of the store's files", bytes(found.file_bytes)],
      ["known blocks", found.is_indexed ? count(found.known_blocks) : `${count(found.known_blocks)}, still indexing`],
      ["written since the store was created", bytes(found.written_bytes)],
    ];
    if (found.budget_left_bytes !== null) shown.push(["write budget left today", bytes(found.budget_left_bytes)]);
    if (found.life !== null) {
      shown.push(["used endurance of the drive", percent(found.life.used)]);
      shown.push(["remaining life at this rate", found.life.years_left === null ? "nothing is written" : years(found.life.years_left)]);
    }
    return shown;
  };
  return new TableCard("disk", "Disk", facts("Disk"), rows, { applies: (state) => Boolean(state.facts.disk) });
}

function remote() {
  const rows = ({ facts: { remote: found } }) => [
    ["store", { text: found.where, data: { kind: "id" } }],
    ["known blocks", count(found.known_blocks)],
    ["blocks stored since the start", count(found.stored_blocks)],
    ["blocks to be stored", count(found.wanted_blocks)],
    ["read", bytes(found.read_bytes)],
    ["written", bytes(found.written_bytes)],
    ["requests", count(found.requests)],
    ["lookup time", seconds(found.ask_s)],
    ["prefix lookups", count(found.asked)],
    ["lookups answered too late", count(found.late)],
  ];
  return new TableCard("remote", "Remote tier", facts("Remote tier"), rows, { applies: (state) => Boolean(state.facts.remote) });
}

function pinned() {
  const rows = ({ facts: { pins, segment_bytes: segment }, series }) => {
    const shown = [["pinned in host memory", bytes(series.now("pinned.bytes"))]];
    if (pins) shown.push(["pins", count(pins.num)], ["limit on pinned bytes", bytes(pins.max_bytes)]);
    if (series.has("backed.bytes")) shown.push(["host memory in use", `${bytes(series.now("backed.bytes"))} of ${bytes(segment)}`]);
    return shown;
  };
  return new TableCard("pinned", "Pinned memory", facts("Pinned memory"), rows, { applies: ({ facts: { pins }, series }) => Boolean(pins) || (series.now("pinned.bytes") ?? 0) > 0 });
}
