// The history of one time range in the browser: for each column a list with a number for each time step.

import { PROCESS_START } from "./sources.js";

export class Series {
  constructor(columns) {
    this.columns = columns;
    this.stepS = 1;
    this.start = 0;
    this.length = 0;
    this.firstKnown = 0; // index of the first step with any value
    this.values = new Map();
    this.latest = new Map(); // current values: totals since the start, and levels
    this.#begin();
  }

  #pending;

  #begin() {
    this.#pending = { stamp: -1, sums: this.columns.map(() => 0), counts: this.columns.map(() => 0) };
  }

  load(history) {
    this.stepS = history.step_s;
    this.start = history.start;
    this.length = history.rows;
    this.values = new Map(
      this.columns.map((column) => [column, history.columns[column] ?? new Array(history.rows).fill(null)]),
    );
    const known = Object.values(history.columns).map((values) => values.findIndex((value) => value !== null)).filter((index) => index >= 0);
    this.firstKnown = known.length > 0 ? Math.min(...known) : history.rows;
    this.#begin();
  }

  has(column) {
    return this.columns.includes(column);
  }

  of(column) {
    return this.values.get(column) ?? new Array(this.length).fill(null);
  }

  get times() {
    return Array.from({ length: this.length }, (_, index) => this.start + index * this.stepS);
  }

  get end() {
    return this.start + this.length * this.stepS;
  }

  // Time of the first step with any value.
  get since() {
    return this.start + this.firstKnown * this.stepS;
  }

  // Times at which the server was started again. The first start in the history is none.
  get restarts() {
    const starts = this.of(PROCESS_START);
    return this.times.filter((_, index) => index > this.firstKnown && starts[index] > 0);
  }

  now(column) {
    return this.latest.get(column) ?? null;
  }

  // Returns the last known number of the three newest steps.
  newest(column) {
    const values = this.of(column);
    for (let index = values.length - 1; index >= Math.max(0, values.length - 3); index -= 1) {
      if (values[index] !== null) return values[index];
    }
    return null;
  }

  // Returns the integral of a rate over the steps from *first* up to, but not including, *last*.
  sum(column, first = 0, last = this.length) {
    let sum = 0;
    const values = this.of(column);
    for (let index = first; index < last; index += 1) sum += values[index] ?? 0;
    return sum * this.stepS;
  }

  // Returns the moving average over *seconds* up to each step, because single seconds are noisy.
  smooth(column, seconds) {
    const values = this.of(column);
    const width = Math.max(1, Math.round(seconds / this.stepS));
    if (width === 1) return values;
    let sum = 0;
    let known = 0;
    return values.map((value, index) => {
      if (value !== null) {
        sum += value;
        known += 1;
      }
      const gone = index >= width ? values[index - width] : null;
      if (gone !== null) {
        sum -= gone;
        known -= 1;
      }
      return value === null || known === 0 ? null : Math.max(0, sum / known);
    });
  }

  // Adds the row and current values of one tick.
  add(tick) {
    this.columns.forEach((column, number) => this.latest.set(column, tick.now[number]));
    if (this.length === 0) return;
    const stamp = Math.floor(tick.at / this.stepS);
    const newest = Math.floor(this.start / this.stepS) + this.length - 1;
    if (stamp < newest) return; // a clock was set back
    for (let missing = Math.min(stamp - newest, this.length); missing > 0; missing -= 1) {
      // The server sends mean rates for the seconds that it missed, so that sums are right.
      const row = (missing - 1) * this.stepS <= (tick.missed_s ?? 0) && missing > 1 ? tick.missed_row : null;
      this.columns.forEach((column, number) => {
        const values = this.values.get(column);
        values.shift();
        values.push(row?.[number] ?? null);
      });
    }
    this.firstKnown = Math.max(0, Math.min(this.firstKnown, this.length) - (stamp - newest));
    this.start += (stamp - newest) * this.stepS;
    this.#put(stamp, tick.row);
  }

  // Stores the mean of the step's rows so far.
  #put(stamp, row) {
    const pending = this.#pending;
    if (pending.stamp !== stamp) {
      pending.stamp = stamp;
      pending.sums.fill(0);
      pending.counts.fill(0);
    }
    this.columns.forEach((column, number) => {
      if (row[number] === null) return;
      pending.sums[number] += row[number];
      pending.counts[number] += 1;
      const values = this.values.get(column);
      values[values.length - 1] = pending.sums[number] / pending.counts[number];
    });
  }
}
