"""HttpThread: an ASGI app served by a thread of its own."""

import asyncio
import logging
import socket
import threading
from functools import partial
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from kvtier.engine.server.gate import Gate
from kvtier.engine.server.http_connection import HttpConnection

log = logging.getLogger(__name__)

_LEAVING_S = 1  # for the last bytes of answers
_END_S = 10.0  # of the thread, which has nothing to wait for by then


class HttpThread:
    """Serves *app* from the moment it is made until `close`. The thread owns an event loop and nothing else; what it
    fails of is in the log, and the sidecar goes on without it."""

    def __init__(self, app: ASGIApp, gate: Gate, bound: socket.socket) -> None:
        """*bound* listens, and is this thread's from now on."""
        self._bound = bound
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
        self._server = uvicorn.Server(settings)
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
            asyncio.run(self._server.serve([self._bound]))
        except Exception:  # a thread's top: engines are served all the same
            log.exception("http: the server has ended")


def bound_at(host: str, port: int) -> socket.socket:
    """A socket that listens there. OSError, with what to do, if nothing can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f'http: cannot listen on {host}:{port} ({error.strerror}); choose another port in [http], or "none"'
        ) from error
