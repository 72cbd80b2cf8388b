// The sections of the page. Which sections and cards there are depends on the data that the server sends.

import { Section } from "./card.js";
import { healthCards } from "./health_cards.js";
import { requestCharts, requestTables, slowest } from "./request_cards.js";
import { engineCards } from "./sidecar_cards.js";
import { presentLanes } from "./sources.js";
import { copyCards, tierCards } from "./tier_cards.js";
import { tokenCards } from "./token_cards.js";

export function sections(series, tiers, about) {
  const tokens = new Section("section-tokens", "Prompt tokens", tokenCards(series, tiers));
  const store = [
    new Section("section-tiers", "Tiers", tierCards(series, tiers)),
    new Section("section-copies", "Copies", copyCards(presentLanes(series, tiers))),
    new Section("section-health", "Health", healthCards()),
  ];
  if (about.kind === "serve") return [tokens, new Section("section-requests", "Requests", [...requestCharts(), ...requestTables(tiers)]), ...store];
  return [new Section("section-engines", "Engines", engineCards(about.attach)), tokens, new Section("section-lookups", "Lookups", [slowest(tiers)]), ...store];
}
