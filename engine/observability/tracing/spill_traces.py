"""SpillTraces: spans of spills, each of which copies a batch of blocks to a lower tier."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvtier.engine.observability.tracing.trace_context import Attribute, Span, TraceContext
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.tiers.lower.spill_log import Drop, Spill, SpillLog
from kvtier.tiers.naming.block_hash import BlockName

MAX_BLOCKS = 1 << 16  # names to keep: a million tokens in blocks of 16; spills of older requests have no spans
MAX_OWNERS = 8  # requests to remember for each block, the newest
MAX_LINKS = 32  # requests to which the span of a batch links


class TracedBlocks:
    """An index from block names to the newest traced requests that have the block. Owned by one thread."""

    def __init__(self) -> None:
        self._owners: dict[BlockName, tuple[TraceContext, ...]] = {}  # oldest first
        self._added: deque[tuple[TraceContext, Sequence[BlockName]]] = deque()  # oldest first
        self._num_added = 0  # number of names in `_added`

    def add(self, request: TraceContext, names: Sequence[BlockName]) -> None:
        """Record further blocks of a request, which is identified by its span. *names* must not change afterwards."""
        new: dict[BlockName, tuple[TraceContext, ...]] = dict.fromkeys(names, (request,))
        for name in new.keys() & self._owners.keys():
            new[name] = (*self._owners[name][1 - MAX_OWNERS :], request)
        self._owners.update(new)
        self._added.append((request, names))
        self._num_added += len(names)
        while self._num_added > MAX_BLOCKS and len(self._added) > 1:
            self._forget_oldest()

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """Return at most `MAX_LINKS` requests that have some of these blocks.

        The keys are the requests' spans. The values are the indices of each request's blocks in *names*.
        """
        found: dict[TraceContext, list[int]] = {}
        if self._owners.keys().isdisjoint(names):  # usually true if few requests are sampled; 2 us for 128 names
            return found
        for place, name in enumerate(names):
            for request in dict.fromkeys(self._owners.get(name, ())):  # a request may have added the block twice
                if request in found or len(found) < MAX_LINKS:
                    found.setdefault(request, []).append(place)
        return found

    def _forget_oldest(self) -> None:
        request, names = self._added.popleft()
        self._num_added -= len(names)
        for name in names:
            others = tuple(owner for owner in self._owners.get(name, ()) if owner is not request)
            if others:
                self._owners[name] = others
            else:
                self._owners.pop(name, None)


class SpillTraces:
    """Spans of spills, each of which copies a batch of blocks to a lower tier. Owned by the tiers' thread.

    A spill may come after its requests have ended, and may contain blocks of several requests. So its span is the root
    of a separate trace, with links to the traced requests whose blocks it contains. If there are none, no span is sent.
    Blocks of the batch that have no copy afterwards are counted in the span as dropped.
    """

    def __init__(
        self,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
        attributes: Mapping[str, Attribute] = MappingProxyType({}),
    ) -> None:
        """Create an empty log. *clock* must be the clock of the tiers; *attributes* are added to every span."""
        self.log = SpillLog(clock)  # the tiers write to it
        self._tracer = tracer
        self._clock = clock
        self._attributes = attributes
        self._blocks = TracedBlocks()

    def add(self, request: TraceContext, names: Sequence[BlockName]) -> None:
        """Record blocks of a traced request. *names* must not change afterwards."""
        self._blocks.add(request, names)

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """Return the traced requests that have some of these blocks, see `TracedBlocks.find`."""
        return self._blocks.find(names)

    def go_on(self) -> None:
        """Send the spans of spills that ended since the last call."""
        spills = self.log.take()
        if not spills:
            return
        epoch = time.time() - self._clock()
        for spill in spills:
            if found := self.find(spill.names):
                self._tracer.end(span_of(spill, epoch, list(found), self._attributes))


def span_of(spill: Spill, epoch: float, requests: Sequence[TraceContext], attributes: Mapping[str, Attribute]) -> Span:
    """Return the span of a spill, with links to the spans of *requests*.

    *epoch* is the Unix time at which the tiers' clock was 0.
    """
    source, target = spill.route.split("_to_")
    return Span(
        f"kvtier.spill.{target}",
        TraceContext.root(is_sampled=True),
        None,
        epoch + spill.began_at,
        epoch + spill.ended_at,
        {
            **attributes,
            "kvtier.tier.from": source,
            "kvtier.tier.to": target,
            "kvtier.blocks": len(spill.names),
            "kvtier.bytes": spill.num_bytes,
            "kvtier.copy_seconds": spill.copy_s,
            "kvtier.dropped": sum(spill.dropped.values()),
            **{f"kvtier.dropped.{why.value}": number for why, number in spill.dropped.items()},
        },
        is_failed=Drop.FAILED in spill.dropped,
        links=requests,
    )
