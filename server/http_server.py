"""HttpServer: answers requests on a port, already while the model is loading, until `stop` is called."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvtier.engine.config import ServerConfig
from kvtier.server.access import Access, KeyCheck
from kvtier.server.app import App, Switch
from kvtier.server.entrance import Entrance
from kvtier.server.loading_app import LoadingApp
from kvtier.web.api_keys import ApiKeys
from kvtier.web.asgi_server import AsgiServer

if TYPE_CHECKING:
    from kvtier.server.serving_app import ServingApp  # imported while the server is already answering

_LEAVING_S = 5  # how long a shutdown waits until the last bytes of answers are sent


def with_cors(app: ASGIApp, settings: ServerConfig) -> ASGIApp:
    """Return *app* with CORS for pages of `server.cors_origins`; a browser's preflight request needs no key.

    CORS credentials such as cookies are not allowed, because API keys are only sent in headers.
    """
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],
    )


class HttpServer:
    """A server of one model on a bound socket. `build_server` creates it; `run` runs it on an event loop."""

    def __init__(
        self,
        bound: socket.socket,
        entrance: Entrance,
        loading: LoadingApp,
        load: "Callable[[], Coroutine[None, None, ServingApp]]",
    ) -> None:
        """Create a server; *loading* answers requests until *load* has returned the serving app."""
        self.entrance = entrance
        self._bound = bound
        self._load = load
        self._switch = Switch(loading)
        self._stop = asyncio.Event()
        app = Access(with_cors(KeyCheck(self._switch, entrance), entrance.settings), entrance)
        self._uvicorn = AsgiServer(app, entrance.gate, _LEAVING_S)

    @property
    def app(self) -> App:
        """App that answers requests now."""
        return self._switch.app

    def stop(self) -> None:
        """Start the shutdown: drain running requests, flush the cache, and end. Call this on the event loop.

        A server whose model is still loading ends at once.
        """
        self._stop.set()

    def replace_keys(self, keys: ApiKeys) -> None:
        """Accept only requests with these *keys* from now on. Call this on the event loop."""
        self.entrance.keys = keys
        self._switch.app.share_among(self.entrance.num_tenants)

    async def run(self) -> bool:
        """Load the model, and serve until `stop`. Raise the error of loading, or the error that ended the engine.

        Returns:
            True after serving. False if `stop` was called before the model was loaded; a thread may still be loading
            it.
        """
        answering = asyncio.create_task(self._uvicorn.serve([self._bound]))
        try:
            loading = asyncio.create_task(self._load())
            if await self._wait_or_stop(loading):
                return False
            await self._serve(loading.result())
            return True
        finally:
            self._switch.app.end()
            self._uvicorn.should_exit = True
            await answering
            self.entrance.close()

    async def _serve(self, app: "ServingApp") -> None:
        app.share_among(self.entrance.num_tenants)  # the keys may have been replaced since loading began
        self._switch.app = app
        try:
            await self._wait_or_stop(asyncio.create_task(app.wait_end()))
        finally:
            await app.close()

    async def _wait_or_stop(self, doing: "asyncio.Task[Any]") -> bool:
        """Wait for *doing* or `stop`, and raise the error of *doing*.

        Return True, and cancel *doing*, if `stop` came first.
        """
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return not doing.done()
        finally:
            doing.cancel()
            stopping.cancel()
