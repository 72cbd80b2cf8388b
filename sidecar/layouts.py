"""Layouts: the tiers of all layouts, which share one segment and one store."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.tracing.spill_traces import SpillTraces
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.sidecar.extents import Extents
from kvtier.sidecar.layout import Layout, LayoutRefused
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.lease_ledger import LeaseLedger, new_ledger
from kvtier.sidecar.quarantine import Quarantine
from kvtier.sidecar.shared_store import SharedStore
from kvtier.sidecar.shares import Shares
from kvtier.store.blob_store import Records
from kvtier.store.record import NAMESPACE_BYTES
from kvtier.tiers.lower.disk_purge import DiskPurge
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_purge import LocalPurge
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.purge import Purge, PurgeOrder
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.purge import CachePurge
from kvtier.tiers.reuse.what_if import WhatIf
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import TransferEngine

MAX_LAYOUTS = 64  # each costs about ten bytes for each slot that the segment could have
NO_NAMESPACE = bytes(NAMESPACE_BYTES)  # a namespace that no layout has
EXTENT_BYTES = 64 << 20
READ_TIMEOUT_S = 10.0


class Layouts:
    """The tiers of all layouts. A layout's tiers are created when an engine first needs them, and then kept.

    Owned by the sidecar's thread.
    """

    def __init__(
        self,
        segment: Segment,
        transfers: TransferEngine,
        store: Records | None = None,
        opening: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        extent_bytes: int = EXTENT_BYTES,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        written_bytes_per_day: int | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        make_remote: Callable[[bytes], RemoteTier | None] = lambda namespace: None,
        ledger: LeaseLedger | None = None,
        records: RecentRecords | None = None,
        seen: Path | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Create an empty collection of layouts.

        *opening* returns 0 while the store is closed, and otherwise a number that grows each time it is opened.
        *quotas* limits the bytes of host memory that a tenant may use in each layout. *make_remote* returns the remote
        tier for a layout's digest, or None.

        *ledger* records the clients' leases for the next process. *seen* is a file in which past lookups are saved for
        the next process. *records* receives the lookups of engines. *tracer* receives the loads of engines and the
        writes to disk.
        """
        self.segment = segment
        self.ledger = ledger or new_ledger(extent_bytes, segment.num_bytes // extent_bytes)
        left_out = self.ledger.left_out
        self.extents = Extents(segment, extent_bytes, clock, left_out)
        self.shares = Shares(lambda: max(0, segment.backed_bytes - len(left_out) * extent_bytes), self.ledger)
        self.quarantine = Quarantine(clock)  # leases of ended sessions whose processes may still copy
        self.tracer = tracer
        self.records = records or RecentRecords()  # recent lookups of engines
        self.what_if = WhatIf(clock)  # fed by endpoints that receive each prompt
        self.explainer: Explainer | None = None  # None unless an endpoint receives each prompt
        self._seen = seen
        self._transfers = transfers
        self._store = None if store is None else SharedStore(store)
        self._opening = opening
        self._clock = clock
        self._quotas = quotas
        self._written_bytes_per_day = written_bytes_per_day
        self._read_timeout_s = read_timeout_s
        self._make_remote = make_remote
        self._layouts: dict[Layout, LayoutTiers] = {}

    def __iter__(self) -> Iterator[LayoutTiers]:
        return iter(list(self._layouts.values()))

    def open(self, layout: Layout, events: EventLog | None = None) -> LayoutTiers:
        """Return the tiers of the layout, which the first call creates. Raise `LayoutRefused` if that is not possible.

        *events* records the blocks that enter and leave host memory and disk. It is used only if this call creates the
        tiers.
        """
        known = self._layouts.get(layout)
        if known is not None:
            return known
        if len(self._layouts) == MAX_LAYOUTS:
            raise LayoutRefused(f"there are {MAX_LAYOUTS} layouts already; restart the sidecar to remove them")
        memories = layout.memories(self.segment, self.extents.extent_bytes)
        view = None if self._store is None else self._store.view(layout.digest)
        disk = None
        if view is not None:
            disk = DiskTier(view, layout.digest, self._clock, self._written_bytes_per_day, self._opening)
        traces = None
        if self.tracer is not None:
            traces = SpillTraces(self.tracer, self._clock, {"kvtier.model": layout.model})
        tiers = LocalTiers(
            layout.groups,
            memories,
            self._transfers,
            disk,
            self._clock,
            remote=self._make_remote(layout.digest),
            quotas=self._quotas,
            events=events,
            spills=None if traces is None else traces.log,
        )
        made = LayoutTiers(layout, tiers, memories, self.extents, view, self._read_timeout_s, self._clock, traces)
        self._layouts[layout] = made
        return made

    def begin_explaining(self, chunk_tokens: int, note: str) -> Explainer:
        """Return a new explainer of lookups, for an endpoint that receives prompts with each lookup.

        Prompts have chunks of *chunk_tokens* tokens. Each explanation contains the sentence *note*.
        """
        self.explainer = Explainer(chunk_tokens, {}, self._clock, path=self._seen, notes=[note])
        return self.explainer

    def close(self) -> None:
        """End the leases of clients that have already ended, export the last tracing spans, and save past lookups.

        Later explanations use the saved lookups.
        """
        self.quarantine.close()
        for layout_tiers in self:
            layout_tiers.trace_spills()
        if self.explainer is not None:
            self.explainer.close()

    def poll(self) -> None:
        """Advance reads and writes in flight, start copies to disk, and end leases of clients that can copy no more.

        Give empty parts of host memory to layouts that wait for one.
        """
        self.quarantine.poll()
        for layout_tiers in self:
            layout_tiers.poll()
        self.extents.poll()

    @property
    def num_unsaved(self) -> int:
        """Number of chunks that must still be written to disk, because they are only in host memory."""
        return sum(tiers.num_unsaved for tiers in self)

    @property
    def is_saving_possible(self) -> bool:
        """True if there is a disk and writes to it do not fail now."""
        return all(
            tiers.tiers.status.spill_progress().has_target and tiers.tiers.status.spill_progress().is_possible
            for tiers in self
        )

    def clear(self) -> None:
        """Evict every chunk of every layout."""
        for layout_tiers in self:
            layout_tiers.clear()

    def purge(self, order: PurgeOrder) -> CachePurge:
        """Return a purge that carries out *order*, an operator's request to evict blocks; see `TieredCache.purge`.

        A limit on the amount to evict from host memory is divided among the layouts in proportion to their host memory.
        The disk is purged as a whole, because all layouts share it.
        """
        meant = [
            tiers for tiers in self if order.namespace is None or tiers.layout.digest.hex().startswith(order.namespace)
        ]
        held_bytes = sum(tiers.held_bytes for tiers in meant)
        below: list[Purge] = []
        for tiers in meant if Tier.HOST in order.tiers else ():
            part = tiers.held_bytes / held_bytes if held_bytes else 0.0
            below.append(tiers.tiers.purge(replace(order.part(part), tiers=frozenset({Tier.HOST}))))
        if self._store is not None and Tier.DISK in order.tiers:
            disk = DiskTier(self._store.whole(), NO_NAMESPACE, self._clock, opening=self._opening)
            disk.follow_opening()
            # The layouts learn from their views of the store which of their chunks are gone.
            below.append(LocalPurge([], [], DiskPurge(disk, self._transfers, lambda keys: None, order)))
        return CachePurge(order, [], [], below, self._clock)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for layout_tiers in self:
            layout_tiers.check()
        self.what_if.check()
