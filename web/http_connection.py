"""An HTTP connection with limits that apply before the client's API key is known."""

import asyncio
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvtier.web.gate import Gate

# If a response is complete before the request's body has arrived, more of the body is received and dropped, up to these
# limits. Otherwise the connection would be reset before the client has read the response.
LINGER_S = 1.0
LINGER_BYTES = 1 << 18
UNREAD_S = 60.0  # abort the connection of a client that has not read the rest of its response after this time


class HttpConnection(HttpToolsProtocol):
    """An extension of uvicorn's protocol with limits on headers and time. Owned by the event loop.

    If a response is complete before the request's body has arrived, the connection ends. The rest of the body is
    dropped.
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
        self._is_over = False  # if True, drop all bytes received
        self._num_header_bytes = 0  # bytes of the request line and headers parsed so far
        self._num_silent_bytes = 0  # bytes that the parser has consumed since its last callback
        self._num_dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Accept the new connection, or refuse it with status 503."""
        super().connection_made(transport)
        _send_at_once(transport)
        host = self.client[0] if self.client else ""
        if self._gate.enter(host):
            self._host = host
            self._wait_for_headers()
        else:
            self._end(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection as open, because it has ended."""
        self._stop_timer()
        if self._host is not None:
            self._gate.leave(self._host)
            self._host = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse *data*, unless the connection has ended. End the connection if the headers are too large."""
        if self._is_over:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        self._num_silent_bytes += len(data)
        super().data_received(data)
        if self._num_silent_bytes > self._gate.limits.max_header_bytes and not self._is_over:
            self._refuse(431, "header_bytes")  # the bytes belong to headers, a trailer or a chunk extension

    def on_message_begin(self) -> None:
        """Start the timer for the headers at a request's first byte."""
        super().on_message_begin()
        self._num_header_bytes = 0
        if self._timer is None:
            self._wait_for_headers()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL, or of a part of it, towards the limit on headers."""
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header towards the limit."""
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless its headers are too large."""
        if self._is_over:
            return
        self._stop_timer()
        self._num_silent_bytes = 0
        if self._num_header_bytes > self._gate.limits.max_header_bytes:
            self._refuse(431, "header_bytes")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to the application, unless the connection has ended."""
        self._num_silent_bytes = 0
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Tell the application that the request is complete, unless the connection has ended."""
        self._num_silent_bytes = 0
        if not self._is_over:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the next request, or end the connection if this request's body is incomplete."""
        is_last = not self.pipeline  # otherwise the body is complete, and `cycle` belongs to a later request
        super().on_response_complete()
        if is_last and self.cycle.more_body and not self.transport.is_closing() and not self._is_over:
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        """End the connection, because no further request arrived in time."""
        super().timeout_keep_alive_handler()
        self._timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def _wait_for_headers(self) -> None:
        self._timer = self.loop.call_later(self._gate.limits.header_timeout_s, self._on_headers_late)

    def _on_headers_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(408, "header_time")
        else:  # this request has to wait, because the response to the previous one is still being sent
            self._wait_for_headers()

    def _refuse(self, status: int, why: str) -> None:
        self._gate.on_refused(why)
        self._end(status)

    def _end(self, status: int) -> None:
        """Send an empty response with *status* and end the connection. Abort it if a response is in progress."""
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
    """Disable Nagle's algorithm, so that the first tokens need not wait until the client acknowledges the headers.

    Not all listening sockets make asyncio do this.
    """
    accepted = transport.get_extra_info("socket")
    if accepted is not None and accepted.family != socket.AF_UNIX:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
