"""The uvicorn server, with the settings that all HTTP servers of kvtier share."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvtier.web.gate import Gate
from kvtier.web.http_connection import HttpConnection


class AsgiServer(uvicorn.Server):
    """A uvicorn server with limits on connections (`Gate`). It installs no signal handlers, so its caller must."""

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        leaving_s: int,
        on_shutdown: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        """Create a server that is not running yet.

        Args:
            app: ASGI application that answers the requests.
            gate: Limits on connections and headers.
            leaving_s: Number of seconds to wait, at shutdown, for responses that are still being sent.
            on_shutdown: Called at shutdown, before the server waits for responses.
            settings: Further arguments of `uvicorn.Config`.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(HttpConnection, gate=gate),  # type: ignore[arg-type]  # callable like the class
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=leaving_s,
                **settings,
            )
        )
        self._on_shutdown = on_shutdown

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. Uvicorn would install signal handlers here."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call *on_shutdown*, and wait for responses that are still being sent."""
        self._on_shutdown()
        await super().shutdown(sockets)
