"""HttpServer: the HTTP server of one model, which already answers requests while the model is being loaded."""

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
    """Return *app*, wrapped so that web pages from `server.cors_origins` may send requests to it (CORS).

    The wrapper answers a browser's preflight requests itself, so they need no API key. Cookies are not allowed, because
    API keys are only sent in headers.
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
    """An HTTP server of one model on a bound socket. `build_server` creates it, and `run` serves until `stop`."""

    def __init__(
        self,
        bound: socket.socket,
        entrance: Entrance,
        loading: LoadingApp,
        load: "Callable[[], Coroutine[None, None, ServingApp]]",
    ) -> None:
        """Create a server. *loading* answers requests until *load* has returned the app with the model."""
        self.entrance = entrance
        self._bound = bound
        self._load = load
        self._switch = Switch(loading)
        self._stop = asyncio.Event()
        app = Access(with_cors(KeyCheck(self._switch, entrance), entrance.settings), entrance)
        self._uvicorn = AsgiServer(app, entrance.gate, _LEAVING_S)

    @property
    def app(self) -> App:
        """The app that answers requests at the moment: first the loading app, then the serving app."""
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
        """Load the model, and serve until `stop` is called. Errors of loading or of the engine are raised.

        Returns:
            Whether the model was served. False if `stop` was called while the model was being loaded; a thread may
            then still be loading it.
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
        """Wait until *doing* ends or `stop` is called. If *doing* fails, raise its error.

        If `stop` is called first, cancel *doing* and return True.
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
