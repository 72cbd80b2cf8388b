// A table of facts that is redrawn only when its contents have changed.

import { make } from "./dom.js";

export class Table {
  #said = "";

  // *columns* are { label, isNumber } or strings.
  constructor(caption, columns, empty = "Nothing yet") {
    this.columns = columns.map((column) => (typeof column === "string" ? { label: column } : column));
    this.body = make("tbody");
    this.none = make("p", { class: "empty" }, empty);
    const head = this.columns.map((column) => make("th", { scope: "col", class: column.isNumber ? "number" : null }, column.label));
    this.table = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...head)), this.body);
    this.scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.element = make("div", {}, this.scroll, this.none);
  }

  // *rows* are lists of cells, header first. A cell is a string or { text, data, title, parts, swatch, state }.
  fill(rows) {
    const said = JSON.stringify(rows);
    if (said === this.#said) return;
    this.#said = said;
    this.none.hidden = rows.length > 0;
    this.scroll.hidden = rows.length === 0;
    this.body.replaceChildren(...rows.map((cells) => make("tr", {}, ...cells.map((cell, number) => this.#cell(cell, number)))));
  }

  #cell(cell, number) {
    const { text = "", title = null, data = {}, parts = null, swatch = null, state = null } = typeof cell === "string" ? { text: cell } : cell;
    const attributes = { title, data, class: this.columns[number].isNumber ? "number" : null };
    const children = [];
    if (swatch !== null) children.push(make("span", { class: `swatch ${swatch}` }));
    if (state !== null) children.push(make("span", { class: `state ${state}` }, state));
    children.push(parts === null ? text : balance(parts));
    if (number === 0) return make("th", { scope: "row", ...attributes }, ...children);
    return make("td", attributes, ...children);
  }
}

// A bar of *parts*, each [class, size]. It is hidden from screen readers, because other columns have its numbers.
export function balance(parts) {
  const all = parts.reduce((sum, [, size]) => sum + size, 0);
  const bar = make("span", { class: "balance", "aria-hidden": "true" });
  for (const [name, size] of parts) {
    if (size <= 0) continue;
    const part = make("span", { class: name });
    part.style.width = `${(100 * size) / all}%`;
    bar.append(part);
  }
  return bar;
}
