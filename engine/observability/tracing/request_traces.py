"""RequestTraces: which of an engine's requests are traced, and what is told of them and of their blocks."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.engine.config import TracingConfig
from kvtier.engine.observability.tracing.spill_traces import SpillTraces
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Caller
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.naming.block_hash import BlockName


@dataclass(slots=True)
class _Running:
    """A traced request. *names* grow as it goes on; blocks of the first *num_told* are known to be its own."""

    span: TraceContext
    parent_id: str | None
    names: Sequence[BlockName]
    num_told: int = 0


class RequestTraces:
    """A request is chosen when it comes, as its blocks may be copied down before it ends. Of those that are not traced
    nothing is kept. Owned by the engine's thread."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes over the *tracer*. *clock* is that of the tiers."""
        self._tracer = tracer
        self._spills = SpillTraces(tracer, clock)
        self._running: dict[Hashable, _Running] = {}

    @classmethod
    def of(cls, config: TracingConfig, service: str) -> "RequestTraces | None":
        """Return the configured ones, None without an endpoint. Raises `MissingExtra` without the extra otel."""
        tracer = Tracer.of(config, service)
        return None if tracer is None else cls(tracer)

    @property
    def spills(self) -> SpillLog:
        """The log of copies down, to be given to the tiers."""
        return self._spills.log

    def begin(self, request: Hashable, caller: Caller, names: Sequence[BlockName]) -> None:
        """Decide whether a request is traced that has just come. *names* of its blocks may grow until it ends."""
        span, parent_id = self._tracer.begin(caller.traceparent, caller.request_id)
        if span.is_sampled:
            self._running[request] = _Running(span, parent_id, names)

    def end(self, request: Hashable, record: RequestRecord) -> None:
        """Send the spans of a request that has ended, if it is traced."""
        running = self._running.pop(request, None)
        if running is not None:
            self._tell(running)
            self._tracer.end_request(record, running.span, running.parent_id)

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """The spans of the requests that are traced and have some of these blocks, also of those that have ended, and
        the places of theirs."""
        for running in self._running.values():
            self._tell(running)
        return self._spills.find(names)

    def go_on(self) -> None:
        """Send the spans of what has been copied down since the last call."""
        for running in self._running.values():
            self._tell(running)
        self._spills.go_on()

    def close(self) -> None:
        """Send what waits, and end."""
        self.go_on()
        self._tracer.close()

    def _tell(self, running: _Running) -> None:
        """Take in the blocks that the request has come to have."""
        if running.num_told < len(running.names):
            self._spills.add(running.span, running.names[running.num_told :])
            running.num_told = len(running.names)
