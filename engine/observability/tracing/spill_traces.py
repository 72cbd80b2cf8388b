"""SpillTraces: the spans of blocks that are copied down, or are lost before."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvtier.engine.observability.tracing.span import Attribute, Span
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.observability.tracing.traced_blocks import TracedBlocks
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.tiers.lower.spill_log import Drop, Spill, SpillLog
from kvtier.tiers.naming.block_hash import BlockName


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
