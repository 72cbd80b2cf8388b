"""Evidence: a snapshot of the facts about one request's prompt, from which any thread can derive the explanation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtier.engine.observability.explain.explanation import Departure, ExplainedRun, Explanation, Why
from kvtier.engine.observability.explain.known_prompts import OlderPrompts
from kvtier.engine.observability.explain.past_requests import Past
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghost, Ghosts
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason, Tier

NUM_DURING = 4  # requests to name with an eviction
_TIERS = tuple(Tier)
# Reasons that the trail gives for a block that was in no tier; the explanation finds a more exact reason.
_LOST = frozenset({Reason.NEVER_SEEN, *(Reason.evicted_from(tier) for tier in Tier)})


@dataclass(frozen=True)
class Evidence:
    """A snapshot of the facts that explain why one prompt was a hit or a miss.

    It is immutable, so another thread can derive the explanation while the engine's thread continues.
    """

    past: Past
    is_new: bool  # whether the prompt belongs to no request: a client asks what it would hit now
    known: OlderPrompts
    ghosts: Ghosts  # a copy of the record of evicted blocks
    # Pairs (number of first blocks, fields). The tokens of these blocks were seen before, but with other values of the
    # fields, such as another salt.
    ways: Sequence[tuple[int, tuple[str, ...]]]
    is_other_text: bool  # whether an earlier request with the same messages had another first block
    tiers: Sequence[Tier | None]  # the current tier of each block if `is_new`; otherwise empty
    remembered: Sequence[Past]  # all requests that may have run when blocks were evicted
    clock_offset: float  # seconds from the clock of the ghosts to the Unix epoch
    block_steps: Sequence[int]  # for the attention groups, how many block names one of their blocks spans
    notes: tuple[str, ...]  # what the explanation cannot tell

    def explanation(self) -> Explanation:
        """Derive why the prompt was a hit or a miss. This takes milliseconds, and longer for a long prompt."""
        record, trail = self.past.record, self.past.trail
        rows = [*_hit_rows(trail), *self._missed_rows()]
        nearest = self.known.nearest(self.past.prompt, len(trail.depths))
        explanation = Explanation(
            None if self.is_new else record.request_id,
            None if self.is_new else record.arrived_at,
            self.past.prompt.num_tokens,
            trail.block_size,
            tuple(_merged(rows)),
            None if nearest is None else Departure(nearest.num_shared, nearest.departs),
            self.notes,
        )
        explanation.check()
        return explanation

    def _missed_rows(self) -> list[ExplainedRun]:
        """Return the explanation's rows, one per block, for the tokens that were not loaded from the cache."""
        trail, num_tokens, size = self.past.trail, self.past.prompt.num_tokens, self.past.trail.block_size
        ghosts, ways = self._lost(), self._other_ways()
        was_known = self.known.has_all(self.past.prompt).tolist()
        first_missing = self.tiers.index(None) if None in self.tiers else len(self.tiers)
        start = len(trail.depths) * size + trail.num_copied
        within = [ghost for ghost in ghosts[start // size : trail.num_lasting // size] if ghost is not None]
        last_ghost = max(within, key=lambda ghost: ghost.at, default=None)
        rows = []
        while start < num_tokens:
            block = start // size
            reason, until = self._reason_at(start)
            end = min((block + 1) * size, num_tokens, until)
            row = ExplainedRun(start, end, None, Why.SHORT if num_tokens < size else reason)
            if row.why in _LOST and block < len(trail.names):
                if first_missing < block < len(self.tiers) and self.tiers[block] is not None:
                    row = replace(row, why=Why.BEHIND)
                elif (ghost := ghosts[block]) is not None:
                    row = self._evicted_row(row, ghost)
                elif start < trail.num_lasting:  # its keys and values were cached; a state or window behind it was not
                    row = row if last_ghost is None else self._evicted_row(row, last_ghost)
                elif was_known[block]:
                    row = replace(row, why=Why.FORGOTTEN)
                else:
                    why, differs = ways[block]
                    row = replace(row, why=why, differs=differs)
            rows.append(row)
            start = end
        return rows

    def _reason_at(self, token: int) -> tuple[Reason, int]:
        """Return why the token was computed, and up to which token this reason applies."""
        num_tokens = self.past.prompt.num_tokens
        if Reason.ABORTED in self.past.record.tokens.reasons:
            return Reason.ABORTED, num_tokens
        for end, reason in self.past.trail.misses:
            if end > token:
                return reason, end
        return Reason.LAST_BLOCK, num_tokens

    def _evicted_row(self, row: ExplainedRun, ghost: Ghost) -> ExplainedRun:
        at = ghost.at + self.clock_offset
        why = Reason.evicted_from(ghost.tier)
        return replace(row, why=why, cause=ghost.cause, evicted_at=(at, at), during=self._running_at(at))

    def _running_at(self, at: float) -> tuple[str, ...]:
        """Return the ids of the tenant's requests that ran when a block was evicted at time *at*.

        If none ran, return the id of the last request that arrived earlier. Even after that request has ended, its
        blocks may be copied to a lower tier and cause evictions there.
        """
        ids, arrived_at, ended_at = self._own
        has_come = arrived_at <= at
        places = np.flatnonzero(has_come & (at <= ended_at))
        if not len(places) and has_come.any():
            places = np.array([np.where(has_come, arrived_at, -np.inf).argmax()])
        return tuple(dict.fromkeys(ids[place] for place in places.tolist()))[-NUM_DURING:]

    @cached_property
    def _own(self) -> tuple[Sequence[str], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Ids of the tenant's other requests, with their arrival and end times."""
        me = self.past.record
        own = [
            record
            for record in (past.record for past in self.remembered)
            if record.tenant == me.tenant and record is not me and record.request_id
        ]
        arrived_at = np.array([record.arrived_at for record in own])
        return [record.request_id for record in own], arrived_at, arrived_at + [record.total_s or 0.0 for record in own]

    def _other_ways(self) -> Sequence[tuple[Reason | Why, tuple[str, ...]]]:
        """Return for each full block a pair (reason, fields) that explains its miss if no earlier prompt had the block.

        If an earlier prompt had the same tokens or messages, *fields* says what differed, such as the salt. Otherwise,
        it is empty.
        """
        names = self.past.trail.names
        if self.is_other_text:
            return [(Why.OTHER_TEMPLATE, ("template",))] * len(names)
        found: list[tuple[Reason | Why, tuple[str, ...]]] = [(Reason.NEVER_SEEN, ())] * len(names)
        for num_blocks, differs in self.ways:
            found[:num_blocks] = [(Why.OTHER, differs)] * num_blocks
        return found

    def _lost(self) -> list[Ghost | None]:
        """Return for each full block its last eviction, in any attention group, before the request's lookup."""
        names, before = self.past.trail.names, self.past.trail.as_of or math.inf
        found: list[Ghost | None] = [None for _ in names]
        for step in self.block_steps:
            of_group: Sequence[BlockName] = names[step - 1 :: step]
            for place, ghost in enumerate(self.ghosts.find_all(of_group, before) if of_group else ()):
                for block in range(place * step, (place + 1) * step):
                    known = found[block]
                    if ghost is not None and (known is None or known.at < ghost.at):
                        found[block] = ghost
        return found


def _hit_rows(trail: Trail) -> list[ExplainedRun]:
    size = trail.block_size
    rows = [
        ExplainedRun(block * size, (block + 1) * size, _TIERS[depth])
        if depth < len(_TIERS)
        else ExplainedRun(block * size, (block + 1) * size, None, Reason.COST)
        for block, depth in enumerate(trail.depths)
    ]
    if trail.num_copied:
        start = len(trail.depths) * size
        rows.append(ExplainedRun(start, start + trail.num_copied, Tier.DEVICE, is_copied=True))
    return rows


def _merged(rows: Sequence[ExplainedRun]) -> list[ExplainedRun]:
    """Merge consecutive rows with the same content, keeping the first and the last eviction time."""
    merged = []
    for _, group in groupby(rows, lambda row: (row.tier, row.why, row.cause, row.differs, row.is_copied)):
        same = list(group)
        times = [each.evicted_at for each in same if each.evicted_at is not None]
        merged.append(
            replace(
                same[0],
                end=same[-1].end,
                evicted_at=(min(t[0] for t in times), max(t[1] for t in times)) if times else None,
                during=tuple(dict.fromkeys(each for row in same for each in row.during))[:NUM_DURING],
            )
        )
    return merged
