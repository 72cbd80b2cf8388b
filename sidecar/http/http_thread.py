"""HttpThread: an ASGI app served by a thread of its own."""

import asyncio
import logging
import socket
import threading
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import uvicorn
from starlette.types import ASGIApp

from kvtier.web.gate import Gate
from kvtier.web.http_connection import HttpConnection

log = logging.getLogger(__name__)

_LEAVING_S = 1  # for the last bytes of answers
_END_S = 10.0  # of the thread, which has nothing to wait for by then


class Beside(Protocol):
    """What runs on the server's event loop, and has answers that go on until it ends."""

    async def run(self) -> None:
        """Run until `end`."""

    def end(self) -> None:
        """End those answers, and `run` soon."""


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which ends what is *beside* it first: it waits for answers to end by themselves."""

    def __init__(self, settings: uvicorn.Config, beside: Beside) -> None:
        super().__init__(settings)
        self._beside = beside

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, and wait for them."""
        self._beside.end()
        await super().shutdown(sockets)


class HttpThread:
    """Serves *app* from the moment it is made until `close`. The thread owns an event loop and nothing else; what it
    fails of is in the log, and the sidecar goes on without it."""

    def __init__(self, app: ASGIApp, gate: Gate, bound: socket.socket, beside: Beside) -> None:
        """*bound* listens, and is this thread's from now on. *beside* runs as long as the server does."""
        self._bound = bound
        self._beside = beside
        self.port: int = bound.getsockname()[1]
        settings = uvicorn.Config(
            app,
            http=partial(HttpConnection, gate=gate),  # type: ignore[arg-type]  # it makes one
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LEAVING_S,
        )
        self._server = _Uvicorn(settings, beside)
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)
        self._thread.start()

    @property
    def file(self) -> int:
        """The descriptor of the socket that listens."""
        return self._bound.fileno()

    def close(self) -> None:
        """Answer no more, and end the thread. Idempotent."""
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
        except Exception:  # a thread's top: engines are served all the same
            log.exception("http: the server has ended")

    async def _serve(self) -> None:
        beside = asyncio.create_task(self._beside.run())
        try:
            await self._server.serve([self._bound])
        finally:
            self._beside.end()
            await beside


def bound_at(host: str, port: int) -> socket.socket:
    """A socket that listens there. OSError, with what to do, if nothing can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f'http: cannot listen on {host}:{port} ({error.strerror}); choose another port in [http], or "none"'
        ) from error
