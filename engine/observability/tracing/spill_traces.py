"""SpillTraces: the spans of blocks that are copied down, or are lost before."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvtier.engine.observability.tracing.span import Attribute, Span
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.tiers.lower.spill_log import Drop, Spill, SpillLog
from kvtier.tiers.naming.block_hash import BlockName

MAX_BLOCKS = 1 << 16  # names, a million tokens in blocks of 16: of requests before them no copy is told of
MAX_OWNERS = 8  # requests of one block, the newest
MAX_LINKS = 32  # requests of one batch


class TracedBlocks:
    """Blocks of the newest requests that are traced, by name. A block that several prompts begin with is all of theirs.
    Owned by one thread."""

    def __init__(self) -> None:
        self._owners: dict[BlockName, tuple[TraceContext, ...]] = {}  # oldest first
        self._added: deque[tuple[TraceContext, Sequence[BlockName]]] = deque()  # oldest first
        self._num_added = 0  # names in these

    def add(self, request: TraceContext, names: Sequence[BlockName]) -> None:
        """Take in that the request with this span has these blocks too; *names* must not change."""
        new: dict[BlockName, tuple[TraceContext, ...]] = dict.fromkeys(names, (request,))
        for name in new.keys() & self._owners.keys():
            new[name] = (*self._owners[name][1 - MAX_OWNERS :], request)
        self._owners.update(new)
        self._added.append((request, names))
        self._num_added += len(names)
        while self._num_added > MAX_BLOCKS and len(self._added) > 1:
            self._forget_oldest()

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """The spans of the requests that have some of these blocks, `MAX_LINKS` at most, and the places of theirs."""
        found: dict[TraceContext, list[int]] = {}
        if self._owners.keys().isdisjoint(names):  # nearly always, where few are sampled: it takes 2 us for 128 names
            return found
        for place, name in enumerate(names):
            for request in dict.fromkeys(self._owners.get(name, ())):  # one that was added twice counts once
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
    """A batch of copies down is made for no request, and later: its span is the first of a trace of its own, and is
    linked to the requests whose blocks are in it. It has one if any of these is traced. Owned by the tiers' thread."""

    def __init__(
        self,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
        attributes: Mapping[str, Attribute] = MappingProxyType({}),
    ) -> None:
        """*clock* is that of the tiers; *attributes* are those of every span."""
        self.log = SpillLog(clock)  # to be given to the tiers
        self._tracer = tracer
        self._clock = clock
        self._attributes = attributes
        self._blocks = TracedBlocks()

    def add(self, request: TraceContext, names: Sequence[BlockName]) -> None:
        """Take in that a request that is traced has these blocks; *names* must not change."""
        self._blocks.add(request, names)

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """The spans of the requests that are traced and have some of these blocks, and the places of theirs."""
        return self._blocks.find(names)

    def go_on(self) -> None:
        """Send the spans of what has been copied down since the last call."""
        spills = self.log.take()
        if not spills:
            return
        epoch = time.time() - self._clock()
        for spill in spills:
            if found := self.find(spill.names):
                self._tracer.end(span_of(spill, epoch, list(found), self._attributes))


def span_of(spill: Spill, epoch: float, requests: Sequence[TraceContext], attributes: Mapping[str, Attribute]) -> Span:
    """The span of a batch, linked to the spans of these requests. *epoch*: the tiers' clock was 0 then, in seconds
    since the Unix epoch."""
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
