"""`FailingObjects`: the two requests of S3 that a client needs most, over HTTP, of which chosen ones fail."""

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FailingObjects(ThreadingHTTPServer):
    """GET, also of ranges, and PUT; *fails* says by method and path which are answered 503. Signatures are not read."""

    daemon_threads = False  # so that `server_close` waits for them

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self.num_refused = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: socket.socket, client_address: Any) -> None:  # type: ignore[override]
        self._connections.append(request)
        super().process_request(request, client_address)

    def disconnect(self) -> None:
        """End connections that clients keep."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def failing_objects() -> Iterator[FailingObjects]:
    with FailingObjects() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.disconnect()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FailingObjects

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refused():
            return
        self.server.objects[self.path] = data
        self._answer(200, b"", data)

    def do_GET(self) -> None:
        if self._refused():
            return
        whole = self.server.objects.get(self.path)
        if whole is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else max(len(whole) - int(last), 0)
        end = min(int(last) + 1, len(whole)) if first else len(whole)
        if start >= end:
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        self._answer(206, whole[start:end], whole, f"bytes {start}-{end - 1}/{len(whole)}")

    def log_message(self, format: str, *args: object) -> None:
        """Tests say nothing."""

    def _refused(self) -> bool:
        if not self.server.fails(self.command, self.path):
            return False
        self.server.num_refused += 1
        self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        return True

    def _answer(self, status: int, body: bytes, whole: bytes | None = None, span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if whole is not None:
            self.send_header("ETag", f'"{hashlib.md5(whole).hexdigest()}"')
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        self.wfile.write(body)
