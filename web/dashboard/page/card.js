// Cards and the sections that group them.
//
// A card's update({ series, facts, own, view, first, last, starts }) returns true if the card has something to show,
// false if it does not apply to this server, or a text that says why it is empty. Empty cards take no room: their texts
// stand at the end of their section.

import { make } from "./dom.js";

const note = (text) => (text === null ? null : make("p", { class: "small" }, text));

export function card(id, title, isWide, ...children) {
  const heading = make("h3", { id: `${id}-title` }, title);
  return make("section", { class: isWide ? "card wide" : "card", id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

export class ChartCard {
  constructor(id, chart, { title = chart.title, about = null } = {}) {
    this.title = title;
    this.charts = [chart];
    this.element = card(id, title, false, note(about), chart.element);
  }

  update({ series, view, starts }) {
    const [chart] = this.charts;
    chart.update(series, view, starts);
    return chart.isEmpty ? chart.empty : true;
  }
}

export class TableCard {
  charts = [];

  constructor(id, title, table, rows, { about = null, isWide = false, applies = () => true } = {}) {
    this.title = title;
    this.table = table;
    this.rows = rows;
    this.applies = applies;
    this.element = card(id, title, isWide, note(about), table.element);
  }

  update(state) {
    if (!this.applies(state)) return false;
    const rows = this.rows(state);
    this.table.fill(rows);
    return rows.length > 0 ? true : this.table.empty;
  }
}

export class Section {
  constructor(id, title, cards) {
    this.id = id;
    this.title = title;
    this.cards = cards;
    this.quiet = make("p", { class: "small quiet" });
    const heading = make("h2", { id: `${id}-title` }, title);
    const grid = make("div", { class: "cards" }, ...cards.map((each) => each.element));
    this.element = make("section", { class: "part", id, "aria-labelledby": `${id}-title` }, heading, grid, this.quiet);
  }

  // Returns whether the section has anything to say.
  update(state) {
    const found = this.cards.map((each) => each.update(state));
    this.cards.forEach((each, number) => {
      const isHidden = found[number] !== true;
      if (each.element.hidden !== isHidden) each.element.hidden = isHidden;
    });
    const quiet = this.cards
      .map((each, number) => [each.title, found[number]])
      .filter(([, text]) => typeof text === "string")
      .map(([title, text]) => `${title}: ${text}.`)
      .join(" ");
    if (this.quiet.textContent !== quiet) this.quiet.textContent = quiet;
    this.quiet.hidden = quiet === "";
    return found.some((each) => each !== false);
  }
}
