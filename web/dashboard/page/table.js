// A table of facts that is redrawn only when its contents have changed.

import { make } from "./dom.js";
import { NONE } from "./format.js";

export const number = (label) => ({ label, isNumber: true });

export class Table {
  #said = "";

  // *columns* are { label, isNumber } or strings.
  constructor(caption, columns, empty = "nothing yet") {
    this.columns = columns.map((column) => (typeof column === "string" ? { label: column } : column));
    this.body = make("tbody");
    this.empty = empty; // why there may be no rows
    const head = this.columns.map((column) => make("th", { scope: "col", class: column.isNumber ? "number" : null }, column.label));
    this.table = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...head)), this.body);
    this.scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.hint = make("p", { class: "hint", hidden: true, "aria-hidden": "true" }, "More columns: scroll sideways →");
    this.element = make("div", {}, this.hint, this.scroll);
    const observer = new ResizeObserver(() => this.#tellHint());
    observer.observe(this.scroll);
    observer.observe(this.table);
  }

  // Shows the hint if the table is wider than its card.
  #tellHint() {
    this.hint.hidden = this.scroll.scrollWidth <= this.scroll.clientWidth + 1;
  }

  // *rows* are lists of cells, header first. A cell is a string or { text, data, title, parts, links, swatch, state }.
  // *links* are [text, address].
  fill(rows) {
    const said = JSON.stringify(rows);
    if (said === this.#said) return;
    this.#said = said;
    this.body.replaceChildren(...rows.map((cells) => make("tr", {}, ...cells.map((cell, number) => this.#cell(cell, number)))));
  }

  #cell(cell, number) {
    const { text = "", title = null, data = {}, parts = null, links = null, swatch = null, state = null } = typeof cell === "string" ? { text: cell } : cell;
    const attributes = { title, data, class: this.columns[number].isNumber ? "number" : null };
    const children = [];
    if (swatch !== null) children.push(make("span", { class: `swatch ${swatch}` }));
    if (state !== null) children.push(make("span", { class: `state ${state}` }, state));
    if (links !== null) children.push(...linked(links));
    else children.push(parts === null ? text : balance(parts));
    if (number === 0) return make("th", { scope: "row", ...attributes }, ...children);
    return make("td", attributes, ...children);
  }
}

function linked(links) {
  if (links.length === 0) return [NONE];
  return links.flatMap(([text, address], index) => [index > 0 ? ", " : "", make("a", { href: address }, text)]);
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
