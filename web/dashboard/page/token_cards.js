// The cards about prompt tokens: which tier they came from, and why some were computed.

import { ChartCard, TableCard } from "./card.js";
import { Chart } from "./chart.js";
import { count, percent, perSecond, short, words } from "./format.js";
import { SOURCES, label } from "./sources.js";
import { Table, number } from "./table.js";

export const RATE_S = 5; // averaging time of rates
const RATIO_S = 30; // averaging time of hit ratios, which are undefined in seconds without a prompt

export const reasonLink = (reason) => `dashboard/reasons#${reason}`;

export function tokenCards(series, tiers) {
  return [sources(tiers), ratios(tiers), reasons(series)];
}

function sources(tiers) {
  return new ChartCard("sources", new Chart({
    title: "Prompt tokens by source",
    format: perSecond(short),
    isStacked: true,
    empty: "no prompts in this time range",
    lines: [...tiers, "recomputed"].map((source) => ({ key: `tokens.${source}`, label: label(source), colour: source, of: (series) => series.smooth(`tokens.${source}`, RATE_S) })),
  }));
}

function ratios(tiers) {
  const lines = tiers.map((tier) => ({ key: `ratio.${tier}`, label: tier, colour: tier, of: (series) => hitRatios(series, [tier]) }));
  lines.push({ key: "ratio.all", label: "all tiers", colour: "ink", dash: [5, 4], of: (series) => hitRatios(series, tiers) });
  return new ChartCard("ratios", new Chart({ title: "Hit ratio by tier", format: percent, least: 0, most: 1, lines, empty: "no prompts in this time range" }));
}

function hitRatios(series, tiers) {
  const sources = SOURCES.map((source) => [tiers.includes(source), series.smooth(`tokens.${source}`, RATIO_S)]);
  return series.times.map((_, index) => {
    let all = 0;
    let hits = 0;
    for (const [isHit, values] of sources) {
      if (values[index] === null) return null;
      all += values[index];
      if (isHit) hits += values[index];
    }
    return all > 1e-6 ? hits / all : null;
  });
}

function reasons(series) {
  const names = series.columns.filter((column) => column.startsWith("reason."));
  const rows = ({ series: now, first, last }) => {
    const inRange = names.map((column) => [column, now.sum(column, first, last), now.now(column)]);
    const most = Math.max(1, ...inRange.map(([, sum]) => sum));
    return inRange
      .filter(([, sum, total]) => sum > 0 || total > 0)
      .sort((one, other) => other[1] - one[1] || other[2] - one[2])
      .map(([column, sum, total]) => {
        const reason = column.slice("reason.".length);
        return [
          { links: [[words(reason), reasonLink(reason)]] },
          { parts: [["recomputed", sum], ["rest", most - sum]] },
          short(sum),
          { text: count(total), data: { value: column } },
        ];
      });
  };
  const table = new Table("Why tokens were computed", ["reason", "", number("in range"), number("since start")], "no tokens computed yet");
  return new TableCard("reasons", "Why tokens were computed", table, rows, { about: "Each reason links to what it means and what to do." });
}
