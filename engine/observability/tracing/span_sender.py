"""SpanSender: sends spans to an OpenTelemetry collector from its own thread."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtier.engine.observability.tracing.trace_context import Span, TraceContext
from kvtier.extras import extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

MAX_WAITING = 4096  # requests and batches of copies in the queue; further ones are dropped
MAX_AT_ONCE = 256  # requests and batches of copies per message to the collector
TIMEOUT_S = 10.0  # of one message to the collector
CLOSING_S = 5.0  # how long closing waits for the collector
TRACES = "/v1/traces"

MakeSpans = Callable[[], Sequence[Span]]


class SpanSender:
    """A sender that creates and sends spans in its own thread, so that callers never block.

    Spans are dropped if the queue is full or the collector is unavailable. Needs the packages of
    `kvtier[otel]`.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        """Start the thread. Raise `MissingExtra` if a package is missing.

        Args:
            endpoint: The collector's URL, for OTLP over HTTP. If it has no path, `/v1/traces` is added.
            service: The value of the spans' `service.name`.
        """
        with extra("otel", "tracing", "or remove [tracing]"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource

        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES
        self._endpoint = endpoint
        exporter = OTLPSpanExporter(url, timeout=TIMEOUT_S)
        self._export: Callable[[Sequence[ReadableSpan]], object] = exporter.export
        self._shut_down: Callable[[], object] = exporter.shutdown
        self._is_closed = False
        self._resource = Resource.create({"service.name": service})
        self._waiting: queue.Queue[MakeSpans | None] = queue.Queue(MAX_WAITING)
        self._is_failing = False
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # it logs each failed message
        self._thread = threading.Thread(target=self._run, name="kvtier-spans", daemon=True)
        self._thread.start()

    def send(self, make: MakeSpans) -> None:
        """Queue *make* for the thread, which calls it and sends the spans that it returns. Return at once."""
        with suppress(queue.Full):
            self._waiting.put_nowait(make)

    def close(self) -> None:
        """Send the queued spans, for about `CLOSING_S` seconds at most, and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSING_S)
            self._thread.join(CLOSING_S)
        self._shut_down()  # ends the exporter's wait for an unavailable collector

    def _run(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._waiting.get()]
            while len(waiting) < MAX_AT_ONCE and not self._waiting.empty():
                waiting.append(self._waiting.get())
            is_open = None not in waiting
            makes = [make for make in waiting if make is not None]
            if makes:
                self._send([span for make in makes for span in make()])

    def _send(self, spans: Sequence[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._export([_readable(span, self._resource) for span in spans])
        is_sent = result is SpanExportResult.SUCCESS
        if is_sent == self._is_failing:
            told = "accepts spans again" if is_sent else "does not accept spans; they are dropped until it does"
            log.warning("tracing: the collector at %s %s", self._endpoint, told)
        self._is_failing = not is_sent


def _readable(span: Span, resource: Any) -> "ReadableSpan":
    """Convert the span to the type that OpenTelemetry's exporters read."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def place(context: TraceContext, span_id: str, is_remote: bool) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(context.trace_id, 16), int(span_id, 16), is_remote, flags)

    return ReadableSpan(
        span.name,
        place(span.context, span.context.span_id, is_remote=False),
        None if span.parent_id is None else place(span.context, span.parent_id, is_remote=True),
        resource,
        span.attributes,
        links=[Link(place(each, each.span_id, is_remote=True)) for each in span.links],
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.is_failed else Status(),
        start_time=round(span.start * 1e9),
        end_time=max(round(span.start * 1e9), round(span.end * 1e9)),
    )
