"""A collector of OpenTelemetry's: it takes what exporters send over HTTP, and understands it."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "": none
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    kind: int
    is_failed: bool
    service: str
    links: tuple[tuple[str, str], ...]  # trace and span


@dataclass
class OtlpReceiver:
    """What has come so far; `wait_for` waits for more."""

    url: str
    status: int = 200  # what it answers
    num_messages: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, number: int, trace_id: str | None = None, timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """So many spans, of that trace."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans if trace_id in (None, span.trace_id)]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= number, timeout_s), f"only {found()}"
            return found()

    def wait_until(
        self, name: str, are_all: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 60.0
    ) -> list[ReceivedSpan]:
        """The spans of that name, once they are all."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans if span.name == name]

        with self.changed:
            assert self.changed.wait_for(lambda: are_all(found()), timeout_s), f"only {found()} of {self.spans}"
            return found()


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            with receiver.changed:
                receiver.num_messages += 1
                if receiver.status == 200:
                    receiver.spans += _spans_in(body)
                receiver.changed.notify_all()
                status = receiver.status
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _spans_in(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
            span.kind,
            span.status.code == span.status.STATUS_CODE_ERROR,
            next(each.value.string_value for each in of.resource.attributes if each.key == "service.name"),
            tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]
