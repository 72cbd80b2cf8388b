"""uvicorn's server with the settings that all our HTTP servers share."""

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
    """Serves an app over connections that a gate limits. Signals are left to the process that runs it."""

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
            app: App that answers.
            gate: Limits on connections and headers.
            leaving_s: Time for the last bytes of answers at the end.
            on_shutdown: Called at the end, before running answers are waited for.
            settings: Further arguments of `uvicorn.Config`.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(HttpConnection, gate=gate),  # type: ignore[arg-type]  # it makes a protocol, as a class would
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
        """Install no signal handlers."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, and wait for them."""
        self._on_shutdown()
        await super().shutdown(sockets)
