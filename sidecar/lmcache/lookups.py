"""Lookups: counts of looked-up tokens by the tier that had them, and a record of each lookup."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.tracing.trace_context import Attribute
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.lmcache.explained_prompt import namespace_fields
from kvtier.sidecar.lmcache.promises import Promise
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.reuse.what_if import WhatIf
from kvtier.tiers.up.promotion import Misses

RETRIEVE = "kvtier.retrieve"  # the span of a worker's copy of chunks out of host memory


class Lookups:
    """Counts and records of lookups. Each lookup is counted once, when its result is known.

    Tokens that the engine has on its device are counted too, but only clients of lmcache 0.5.7 report them. For older
    clients, the tokens before the looked-up part of the prompt are counted as on the device. Owned by the endpoint's
    thread.
    """

    def __init__(
        self,
        chunk_tokens: int,
        records: RecentRecords,
        what_if: WhatIf,
        explainer: Explainer,
        clock: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        """Create the counts, all of them 0.

        This object passes only loads and stores to *tracer*. To trace lookups, make *tracer* a listener of *records*.
        """
        self._explainer = explainer
        self._tracer = tracer
        self.tokens = TokenBalance()
        self._chunk_tokens = chunk_tokens
        self._records = records
        self._what_if = what_if
        self._clock = clock

    def on_settled(self, promise: Promise, num_tokens: int, num_computed: int, chain: BlockChain | None) -> None:
        """Count and record a lookup whose result is known now.

        The prompt has *num_tokens* tokens, and the engine itself has the first *num_computed* of them. *chain* has the
        prompt's tokens, or is None if they are no longer known.
        """
        balance = balance_of(promise, self._chunk_tokens, num_tokens, num_computed)
        self._what_if.on_prompt(names_of(promise), self._chunk_tokens, _chunk_bytes(promise.tiers), balance)
        seconds = self._clock() - promise.begun_at
        self.tokens = self.tokens.plus(balance)
        record = RequestRecord(
            promise.request_id,
            None,
            promise.tiers.layout.model,
            time.time() - seconds,
            balance,
            lookup_s=seconds,
            load_s=seconds,
        )
        trail = trail_of(promise, self._chunk_tokens, num_computed, self._clock())
        self._records.add(record, trail)
        if chain is not None and len(chain.token_ids) >= num_tokens:
            namespace = self._explainer.namespace_of(namespace_fields(promise.tiers.layout))
            self._explainer.on_ended(record, trail, chain, promise.tiers.ghosts, namespace)

    def on_loaded(self, promise: Promise, rank: int, num_chunks: int, seconds: float) -> None:
        """Record, for tracing, that a worker has loaded *num_chunks* chunks of a hit in *seconds*."""
        if self._tracer is not None:
            now, num_tokens = time.time(), num_chunks * self._chunk_tokens
            attributes: dict[str, Attribute] = {
                "kvtier.rank": rank,
                "kvtier.tokens": num_tokens,
                "kvtier.model": promise.tiers.layout.model,
            }
            self._tracer.on_part(RETRIEVE, promise.request_id, now - seconds, now, attributes)

    def on_stored(self, tiers: LayoutTiers, request_id: str, names: Sequence[BlockName]) -> None:
        """Record that an engine stores these chunks, which are neither in host memory nor on disk.

        These may include chunks of the engine's output, which were never looked up.
        """
        self._what_if.on_generated(names, _chunk_bytes(tiers))
        if self._tracer is not None:
            span, _ = self._tracer.begin(None, request_id)
            tiers.add_traced(span.header, names)


def _chunk_bytes(tiers: LayoutTiers) -> int:
    return sum(memory.slot_bytes for memory in tiers.memories)


def names_of(promise: Promise) -> Sequence[BlockName]:
    """Return the names of all chunks of a lookup (*promise*), from the beginning of the prompt on."""
    return [*promise.before, *promise.blocks.names] if promise.before else promise.blocks.names


def trail_of(promise: Promise, chunk_tokens: int, num_computed: int, now: float) -> Trail:
    """Return the trail of a lookup (*promise*) after it has ended: each chunk's tier, or why the chunk was missed.

    Chunks within the first *num_computed* tokens, which the engine itself has, count as hits on the device.
    """
    start = len(promise.before)
    num_own = min(num_computed // chunk_tokens, start + len(promise.blocks.names))
    depths = bytes([Tier.DEVICE.depth]) * num_own + promise.depths[num_own - start :]
    misses = tuple(((start + end) * chunk_tokens, reason) for end, reason in promise.misses.reasons)
    return Trail(chunk_tokens, names_of(promise), depths, 0, misses, now)


def balance_of(promise: Promise, chunk_tokens: int, num_tokens: int, num_computed: int = 0) -> TokenBalance:
    """Return how many of a prompt's tokens come from each tier, and how many are computed.

    *promise* is the result of the prompt's lookup. The first *num_computed* tokens count as the engine's own, even if
    they end within a chunk that the engine loads. Tokens after the last full chunk are always computed.
    """
    start = len(promise.before) * chunk_tokens
    on_device = min(num_computed, num_tokens)
    ends = start + np.arange(1, promise.num_chunks + 1) * chunk_tokens
    loaded = np.clip(ends - on_device, 0, chunk_tokens)  # tokens of each chunk that come from the sidecar
    depths = np.frombuffer(promise.depths, np.uint8)
    by_tier = {tier: int(loaded[depths == tier.depth].sum()) for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)}

    end_of_hit = on_device + sum(by_tier.values())
    end_of_chunks = start + len(promise.blocks.names) * chunk_tokens
    reasons = {Reason.LAST_BLOCK: num_tokens - max(end_of_hit, end_of_chunks)}
    misses = Misses(tuple((start + end * chunk_tokens, reason) for end, reason in promise.misses.reasons))
    for reason, number in misses.after(end_of_hit).items():
        reasons[reason] = reasons.get(reason, 0) + number
    return TokenBalance(
        device=on_device,
        host=by_tier[Tier.HOST],
        disk=by_tier[Tier.DISK],
        remote=by_tier[Tier.REMOTE],
        recomputed=num_tokens - end_of_hit,
        reasons={reason: number for reason, number in reasons.items() if number},
    )
