"""Tracer: decides which requests are traced, and sends their spans."""

import hashlib
import random
import secrets
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.engine.config import TracingConfig
from kvtier.engine.observability.tracing.request_spans import spans_of
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.trace_context import Attribute, Span, TraceContext
from kvtier.engine.scheduling.request_record import RequestRecord


class Tracer:
    """A sampler of requests for OpenTelemetry traces, which also sends the spans of the chosen requests.

    A request with a `traceparent` header is traced if the header has the flag "sampled". Of the other requests, the
    fraction *sample* is traced, each in a trace of its own.
    """

    def __init__(self, sender: SpanSender, sample: float, dice: Callable[[], float] = random.random) -> None:
        """Take ownership of the *sender*. *dice* returns a random number from 0 to 1."""
        self._sender = sender
        self._sample = sample
        self._dice = dice
        self._secret = secrets.token_bytes(32)

    @classmethod
    def of(cls, config: TracingConfig, service: str) -> "Tracer | None":
        """Return the configured tracer; None if no endpoint is configured.

        Raises:
            MissingExtra: If the packages of `kvtier[otel]` are not installed.
        """
        return None if config.endpoint is None else cls(SpanSender(config.endpoint, service), config.sample)

    def begin(self, header: str | None, request_id: str = "") -> tuple[TraceContext, str | None]:
        """Return the context of a new span for a request, and the id of the parent span.

        The parent is the span in *header*, the request's `traceparent`. Without a valid *header*, the parent id is
        None, and the new span is computed from *request_id*. So a second call for the same request returns the same
        span. If *request_id* is empty or the fraction *sample* is 0, the new span is random.
        """
        parent = TraceContext.of(header)
        if parent is None:
            return self._of_request(request_id), None
        return parent.child(), parent.span_id

    def end(self, span: Span) -> None:
        """Send a finished span, if its trace is sampled."""
        if span.context.is_sampled:
            self._sender.send(lambda: [span])

    def on_record(self, record: RequestRecord) -> None:
        """Send the spans of a finished request, if it is traced. Can be registered as a listener of `RecentRecords`."""
        self.end_request(record, *self.begin(record.traceparent, record.request_id))

    def end_request(self, record: RequestRecord, span: TraceContext, parent_id: str | None) -> None:
        """Send the spans of a finished request, if it is traced. `begin` returned its *span* and *parent_id*."""
        if span.is_sampled:
            self._sender.send(partial(spans_of, record, span, parent_id))

    def on_part(
        self, name: str, request_id: str, start: float, end: float, attributes: Mapping[str, Attribute]
    ) -> None:
        """Send the span of one part of a request that came without a `traceparent` header, if the request is traced.

        The span becomes a child of the request's root span, whose id is computed from *request_id*.
        """
        root = self._of_request(request_id)
        if root.is_sampled:
            self._sender.send(lambda: [Span(name, root.child(), root.span_id, start, end, attributes)])

    def close(self) -> None:
        """Send the remaining spans, and stop the sender."""
        self._sender.close()

    def _of_request(self, request_id: str) -> TraceContext:
        """Return the root span of a request without `traceparent`, computed from *request_id* unless that is empty."""
        if not self._sample or not request_id:
            return TraceContext.root(self._is_chosen())
        digest = hashlib.blake2b(request_id.encode(), key=self._secret, digest_size=32).digest()
        is_sampled = int.from_bytes(digest[24:]) < self._sample * 2**64
        return TraceContext(digest[:16].hex(), digest[16:24].hex(), is_sampled)

    def _is_chosen(self) -> bool:
        return self._sample > 0 and self._dice() < self._sample
