"""Tracer: which requests are traced, and the spans of those that are."""

import hashlib
import random
import secrets
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.engine.config import TracingConfig
from kvtier.engine.observability.tracing.request_spans import spans_of
from kvtier.engine.observability.tracing.span import Attribute, Span
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.scheduling.request_record import RequestRecord


class Tracer:
    """A request that says which trace it is a part of is traced if that says so; of the others a *sample* is, each the
    first of a trace of its own."""

    def __init__(self, sender: SpanSender, sample: float, dice: Callable[[], float] = random.random) -> None:
        """Takes over the *sender*."""
        self._sender = sender
        self._sample = sample
        self._dice = dice
        self._secret = secrets.token_bytes(32)

    @classmethod
    def of(cls, config: TracingConfig, service: str) -> "Tracer | None":
        """Return the configured tracer, None without an endpoint. Raises `MissingExtra` without the extra otel."""
        return None if config.endpoint is None else cls(SpanSender(config.endpoint, service), config.sample)

    def begin(self, header: str | None, request_id: str = "") -> tuple[TraceContext, str | None]:
        """The span of a request that comes with this `traceparent`, and the id of its parent, if it has one. Without
        one it is the same span again for the same *request_id*, if that is known."""
        parent = TraceContext.of(header)
        if parent is None:
            return self._of_request(request_id), None
        return parent.child(), parent.span_id

    def end(self, span: Span) -> None:
        """Send a span that has ended, if its trace is sampled."""
        if span.context.is_sampled:
            self._sender.send(lambda: [span])

    def on_record(self, record: RequestRecord) -> None:
        """Listens to records: send the spans of one, if it is traced."""
        self.end_request(record, *self.begin(record.traceparent, record.request_id))

    def end_request(self, record: RequestRecord, span: TraceContext, parent_id: str | None) -> None:
        """Send the spans of a request that has ended, if it is traced; *span* is its own, as `begin` gave it."""
        if span.is_sampled:
            self._sender.send(partial(spans_of, record, span, parent_id))

    def on_part(
        self, name: str, request_id: str, start: float, end: float, attributes: Mapping[str, Attribute]
    ) -> None:
        """Send the span of what else is done for a request, whose record came without a trace, if that is traced."""
        root = self._of_request(request_id)
        if root.is_sampled:
            self._sender.send(lambda: [Span(name, root.child(), root.span_id, start, end, attributes)])

    def close(self) -> None:
        """Send what waits, and end."""
        self._sender.close()

    def _of_request(self, request_id: str) -> TraceContext:
        """The first span of the request's trace: the same one for the same id, without anything being kept."""
        if not self._sample or not request_id:
            return TraceContext.root(self._is_chosen())
        digest = hashlib.blake2b(request_id.encode(), key=self._secret, digest_size=32).digest()
        is_sampled = int.from_bytes(digest[24:]) < self._sample * 2**64
        return TraceContext(digest[:16].hex(), digest[16:24].hex(), is_sampled)

    def _is_chosen(self) -> bool:
        return self._sample > 0 and self._dice() < self._sample
