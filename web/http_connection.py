"""HttpConnection: one connection, within the limits that hold before its client has shown a key."""

import asyncio
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvtier.web.gate import Gate

LINGER_S = 1.0  # so long, and so many bytes, a client may go on sending after its answer, so that it reads the answer …
LINGER_BYTES = 1 << 18  # … instead of learning that its connection was reset
UNREAD_S = 60.0  # after which a client that does not read the end of its answer has lost it


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits on headers and time, which uvicorn does not have. Owned by the event loop.

    A request whose answer is complete before its body has come ends the connection: nothing of it is waited for.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        gate: Gate,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._gate = gate
        self._host: str | None = None  # set while the gate counts the connection
        self._is_over = False  # bytes that still come are dropped
        self._num_header_bytes = 0  # of the request's line and headers, parsed so far
        self._num_silent_bytes = 0  # that the parser took since it last called a method here
        self._num_dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Let the new connection in, or turn it away with a 503."""
        super().connection_made(transport)
        _send_at_once(transport)
        host = self.client[0] if self.client else ""
        if self._gate.enter(host):
            self._host = host
            self._wait_for_headers()
        else:
            self._end(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: the gate counts it no longer."""
        self._stop_timer()
        if self._host is not None:
            self._gate.leave(self._host)
            self._host = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse *data*, unless the connection is over or the headers are too large."""
        if self._is_over:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        self._num_silent_bytes += len(data)
        super().data_received(data)
        if self._num_silent_bytes > self._gate.limits.max_header_bytes and not self._is_over:
            self._refuse(431, "header_bytes")  # of headers, of a trailer, or of a chunk's extension

    def on_message_begin(self) -> None:
        """The parser has met a request's first byte: its headers have to come in time."""
        super().on_message_begin()
        self._num_header_bytes = 0
        if self._timer is None:
            self._wait_for_headers()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's line."""
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Give the request to the application, unless its headers are too large."""
        if self._is_over:
            return
        self._stop_timer()
        self._num_silent_bytes = 0
        if self._num_header_bytes > self._gate.limits.max_header_bytes:
            self._refuse(431, "header_bytes")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hand on a part of the body, unless the connection is over."""
        self._num_silent_bytes = 0
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Hand on that the request is complete, unless the connection is over."""
        self._num_silent_bytes = 0
        if not self._is_over:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, or end if this one's body is still to come."""
        is_last = not self.pipeline  # else its body has come, and the cycle is a later one's
        super().on_response_complete()
        if is_last and self.cycle.more_body and not self.transport.is_closing() and not self._is_over:
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        """End the connection: no further request came in time."""
        super().timeout_keep_alive_handler()
        self._timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def _wait_for_headers(self) -> None:
        self._timer = self.loop.call_later(self._gate.limits.header_timeout_s, self._on_headers_late)

    def _on_headers_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(408, "header_time")
        else:  # the answer to the request before is still being sent, which this one has to wait for
            self._wait_for_headers()

    def _refuse(self, status: int, why: str) -> None:
        self._gate.on_refused(why)
        self._end(status)

    def _end(self, status: int) -> None:
        """Answer with *status* without the application; if it is answering already, cut the connection instead."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self._linger()
        else:
            self._is_over = True
            self.transport.abort()

    def _linger(self) -> None:
        self._is_over = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _send_at_once(transport: asyncio.Transport) -> None:
    """Have an answer's parts sent as they are written: the first words would wait for the client to acknowledge the
    headers. asyncio sees to that only if the socket that listens was made for TCP by name."""
    accepted = transport.get_extra_info("socket")
    if accepted is not None and accepted.family != socket.AF_UNIX:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
