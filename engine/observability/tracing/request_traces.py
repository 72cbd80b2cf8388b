"""RequestTraces: decides which requests of an engine are traced, and sends spans of them and of spilled blocks."""

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
    """A traced request that has not ended."""

    span: TraceContext
    parent_id: str | None
    names: Sequence[BlockName]  # of its blocks; the list grows
    num_told: int = 0  # how many of these names were passed to `SpillTraces`


class RequestTraces:
    """The traced requests of an engine, and the spills of their blocks. Owned by the engine's thread.

    A spill copies blocks to a lower tier. Whether a request is traced is decided when it arrives, because its blocks
    may be spilled before it ends. Nothing is kept about requests that are not traced.
    """

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        """Take ownership of the *tracer*. *clock* must be the clock of the tiers."""
        self._tracer = tracer
        self._spills = SpillTraces(tracer, clock)
        self._running: dict[Hashable, _Running] = {}

    @classmethod
    def of(cls, config: TracingConfig, service: str) -> "RequestTraces | None":
        """Return the configured traces; None if no endpoint is configured.

        Raises:
            MissingExtra: If the packages of `kvtier[otel]` are not installed.
        """
        tracer = Tracer.of(config, service)
        return None if tracer is None else cls(tracer)

    @property
    def spills(self) -> SpillLog:
        """Log to which the tiers write their spills."""
        return self._spills.log

    def begin(self, request: Hashable, caller: Caller, names: Sequence[BlockName]) -> None:
        """Decide whether a new request is traced.

        *names* are the names of its blocks. The caller may append to the list until the request ends.
        """
        span, parent_id = self._tracer.begin(caller.traceparent, caller.request_id)
        if span.is_sampled:
            self._running[request] = _Running(span, parent_id, names)

    def end(self, request: Hashable, record: RequestRecord) -> None:
        """Send the spans of a finished request, if it is traced."""
        running = self._running.pop(request, None)
        if running is not None:
            self._tell(running)
            self._tracer.end_request(record, running.span, running.parent_id)

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """Return the traced requests, running or finished, that have some of these blocks.

        The keys are the requests' spans. The values are the indices of each request's blocks in *names*.
        """
        for running in self._running.values():
            self._tell(running)
        return self._spills.find(names)

    def go_on(self) -> None:
        """Send the spans of spills that ended since the last call."""
        for running in self._running.values():
            self._tell(running)
        self._spills.go_on()

    def close(self) -> None:
        """Send the remaining spans and close the tracer."""
        self.go_on()
        self._tracer.close()

    def _tell(self, running: _Running) -> None:
        """Pass the names of the request's new blocks to `SpillTraces`."""
        if running.num_told < len(running.names):
            self._spills.add(running.span, running.names[running.num_told :])
            running.num_told = len(running.names)
