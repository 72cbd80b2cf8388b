"""HttpThread: an ASGI app served by a thread of its own."""

import asyncio
import logging
import socket
import threading
from types import TracebackType
from typing import Protocol, Self

from starlette.types import ASGIApp

from kvtier.web.asgi_server import AsgiServer
from kvtier.web.gate import Gate

log = logging.getLogger(__name__)

_LEAVING_S = 1  # time for the last bytes of answers
_END_S = 10.0  # longest wait for the end of the thread


class Beside(Protocol):
    """A part of the app, such as the dashboard, with a background task and streamed answers. `end` ends both."""

    async def run(self) -> None:
        """Do the work of this part of the app, such as the dashboard's sampling, until `end` is called."""

    def end(self) -> None:
        """End the streamed answers, and make `run` return soon."""


class HttpThread:
    """A thread with an event loop that serves *app* from its creation until `close`.

    A failure of the server is logged, and the sidecar continues without it.
    """

    def __init__(self, app: ASGIApp, gate: Gate, bound: socket.socket, beside: Beside) -> None:
        """Start the thread, which takes over the listening socket *bound*. *beside* runs as long as the server does."""
        self._bound = bound
        self._beside = beside
        self.port: int = bound.getsockname()[1]
        # uvicorn waits until all answers have ended, so it must first end the answers of *beside*.
        self._server = AsgiServer(app, gate, _LEAVING_S, on_shutdown=beside.end)
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)
        self._thread.start()

    @property
    def file(self) -> int:
        """Descriptor of the listening socket."""
        return self._bound.fileno()

    def close(self) -> None:
        """Stop answering, and end the thread. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._bound.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # top of the thread; engines are served in any case
            log.exception("http: the server has failed")

    async def _serve(self) -> None:
        beside = asyncio.create_task(self._beside.run())
        try:
            await self._server.serve([self._bound])
        finally:
            self._beside.end()
            await beside


def bound_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raise OSError with advice if that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f'http: cannot listen on {host}:{port} ({error.strerror}); choose another port in [http], or "none"'
        ) from error
