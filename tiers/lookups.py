"""Lookups: queries about which part of a prompt is cached, and where."""

from collections.abc import Sequence

import numpy as np

from kvtier.tiers.computed_prefixes import ComputedPrefixes
from kvtier.tiers.lower.lower_tiers import NOTHING_TO_ASK, AllOf, Inquiry
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import (
    AttentionGroup,
    alignment,
    longest_hit,
    longest_single,
    name_block_size,
)
from kvtier.tiers.naming.retention import Retention
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.prompt_search import PromptSearch
from kvtier.tiers.residency import GroupTiers, Located, Residency
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.promotion import Hit, Misses, PartialHit

NOTHING = np.empty(0, np.int32)
NOT_LOOKED_FOR = Located(NOTHING, NOTHING, 0)


class Lookups:
    """Queries about prompts, over all tiers at once. They lease nothing and have no side effects.

    Owned by the cache's thread.
    """

    def __init__(
        self,
        attentions: Sequence[AttentionGroup],
        residency: Residency,
        retention: Retention,
        planner: LoadPlanner | None,
        computed: ComputedPrefixes | None,
    ) -> None:
        """Create lookups in *residency*, which knows where each block is.

        *planner* decides whether querying a slow tier is worth its time (None: always). *computed* is the record of
        computed prefixes. It is None if a group keeps all blocks, or if all blocks get a name.
        """
        self._attentions = tuple(attentions)
        self._residency = residency
        self._groups = residency.groups
        self._retention = retention
        self._planner = planner
        self._computed = computed
        self._block_size = name_block_size(attentions)
        self._alignment = alignment(attentions)

    def lookup(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the longest cached prefix of the prompt over all tiers. Leases nothing and has no side effects.

        *chain* holds the names of the prompt's blocks, and *num_tokens* is the prompt's length. The last token must
        always be computed, so the hit has at most *num_tokens* - 1 tokens.
        """
        limit = self._limit(chain, num_tokens)
        search = PromptSearch(self._residency, chain)
        num_found = longest_hit(limit, self._attentions, search.first_hole)
        device_slots, below = [], []
        for group in self._groups:
            needed = group.needed(num_found)
            start, found = search.located.get(group.id, (0, NOT_LOOKED_FOR))
            if needed.start < start or start + len(found.device_slots) < needed.stop:
                start, found = needed.start, self._residency.locate(group, chain.names_of(group.block_size, needed))
            device_slots.append(found.device_slots[needed.start - start : needed.stop - start])
            below.append(found.below[needed.start - start : needed.stop - start])
        misses = self._misses(chain, num_found, limit, search)
        in_part = self._residency.partial_group
        partial = None if in_part is None else self._partial_hit(in_part, chain, num_found, num_tokens)
        return Hit(chain, limit, num_found, misses, partial, device_slots, below, self._residency.num_changes)

    def no_hit(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the empty hit of a request that must not read the cache."""
        limit = self._limit(chain, num_tokens)
        return Hit(chain, limit, 0, Misses(((limit, Reason.SKIPPED),)))

    def inquire(self, chain: BlockChain, num_tokens: int) -> Inquiry:
        """Query slow tiers (for example the remote store) for the part of the prompt that no faster tier holds.

        Tiers are not queried if computing that part would be faster than the query. Once the inquiry is done, `lookup`
        includes its result.
        """
        if not self._residency.lower.hints.can_ask:
            return NOTHING_TO_ASK
        limit, inquiries = self._limit(chain, num_tokens), list[Inquiry]()
        search = PromptSearch(self._residency, chain)
        num_found = longest_hit(limit, self._attentions, search.first_hole)
        if num_found == limit or not self._is_worth_asking(num_found, num_tokens):
            return NOTHING_TO_ASK
        for group in self._groups:
            end = limit // group.block_size
            if group.attention.forgets:  # no hit that is longer than the one without slow tiers reads earlier blocks
                start = group.attention.first_needed(num_found + self._alignment)
            else:
                start = search.num_held(group.id, end)
            if start < end:
                names = chain.names_of(group.block_size, range(start, end))
                inquiries.append(self._residency.lower.hints.inquire(group.id, names))
        return AllOf(inquiries)

    def junction(self, hit: Hit) -> int | None:
        """Return the length of the prompt's junction (see `longest_single`); None if it has no junction.

        A junction is a prefix that is longer than the hit and was computed before. A request cannot resume after it,
        because groups with limited attention (sliding windows, recurrent states) have not kept their blocks at its end.
        Now that the prefix is requested again, these blocks are worth keeping.
        """
        if self._retention.interval_tokens is None:
            return None  # all blocks are kept anyway
        search = PromptSearch(self._residency, hit.chain)
        num_tokens = longest_single(hit.limit, self._attentions, search.first_hole)
        num_tokens = max(num_tokens, self._num_computed(hit.chain, hit.limit))
        return num_tokens if num_tokens > hit.num_tokens else None

    def where(self, chain: BlockChain) -> list[Tier | None]:
        """Return for each of the chain's names the tier that has the block; None if it is missing in any group.

        If the blocks of the groups are in different tiers, the result is the coldest of these. Recurrent states, which
        are kept at few places, count only if the model has no keys and values.
        """
        result: list[Tier | None] = []
        groups = [group for group in self._groups if not group.attention.keeps_states] or self._groups
        for place in range(len(chain.names)):
            found = []
            for group in groups:
                block_id = place * self._block_size // group.block_size
                names = chain.names_of(group.block_size, range(block_id, block_id + 1))
                found.append(self._residency.tier_of(group, names[0]) if names else None)
            tiers = [tier for tier in found if tier is not None]
            result.append(max(tiers, key=lambda tier: tier.depth) if len(tiers) == len(found) else None)
        return result

    def bytes_in(self, chain: BlockChain) -> dict[Tier, int]:
        """Return the bytes of the chain's blocks, in all groups, by the warmest tier that holds each block."""
        found = dict.fromkeys(Tier, 0)
        for group in self._groups:
            names = chain.names_of(group.block_size, range(len(chain.names) * self._block_size // group.block_size))
            for tier, num_blocks in self._residency.count_by_tier(group, names).items():
                found[tier] += num_blocks * group.memory.block_bytes
        return found

    def _misses(self, chain: BlockChain, num_found: int, limit: int, search: PromptSearch) -> Misses:
        """Return why the tokens after the first *num_found* cannot be loaded, up to token *limit*."""
        reasons = list[tuple[int, Reason]]()
        num_lasting = max(search.num_lasting // self._alignment * self._alignment, self._num_computed(chain, limit))
        if self._retention.interval_tokens is not None and num_found < num_lasting:
            ends = [end for end in self._retention.likely_ends(num_lasting) if end > num_found]
            why = self._why_missing(chain, *ends)
            reasons.append((num_lasting, Reason.NOT_KEPT if why is Reason.NEVER_SEEN else why))
            num_found = num_lasting
        if num_found < limit:
            ends = [(num_found // group.block_size + 1) * group.block_size for group in self._attentions]
            reasons.append((limit, self._why_missing(chain, *sorted(set(ends)))))
        return Misses(tuple(reasons), num_lasting)

    def _num_computed(self, chain: BlockChain, limit: int) -> int:
        """Return how many of the prompt's first *limit* tokens were computed before, if no group's blocks show that."""
        if self._computed is None:
            return 0
        num_tokens = self._computed.longest(chain.names[: limit // self._block_size]) * self._block_size
        return num_tokens // self._alignment * self._alignment

    def _why_missing(self, chain: BlockChain, *ends: int) -> Reason:
        """Return why the blocks that end at the tokens *ends* are missing; see `Residency.miss_reason`."""
        return self._residency.miss_reason(chain.names[end // self._block_size - 1] for end in ends)

    def _is_worth_asking(self, num_found: int, num_tokens: int) -> bool:
        """Return whether computing the rest of a prompt would take longer than querying the remote tier."""
        if self._planner is None or not self._planner.prefill.is_known:
            return True
        compute_s = self._planner.compute_seconds(num_found, num_tokens - num_found)
        return compute_s > self._residency.lower.status.read_speed(Tier.REMOTE).latency_s

    def _limit(self, chain: BlockChain, num_tokens: int) -> int:
        limit = min(max(0, num_tokens - 1), len(chain.names) * self._block_size)
        return limit // self._alignment * self._alignment

    def _partial_hit(self, group: GroupTiers, chain: BlockChain, num_found: int, num_tokens: int) -> PartialHit | None:
        """Return the block that shares the most leading tokens with the prompt's block after the hit.

        Only blocks that all groups have on the device are considered. Returns None if no block shares any token.
        """
        wanted = chain.token_ids[num_found : min(num_found + self._block_size, num_tokens - 1)]
        if group.partial_matches is None or not len(wanted):
            return None
        key = chain.continued_key(num_found // self._block_size)
        for slot, num_shared in group.partial_matches.sharing(key, wanted, group.pool):
            name = group.pool.name(slot)
            if name is not None and all(each.pool.find(name) is not None for each in self._groups):
                return PartialHit(name, num_shared, group.partial_matches.is_used_up(slot, num_shared))
        return None
