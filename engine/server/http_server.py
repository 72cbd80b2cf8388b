"""HttpServer: the port is open from the first moment, the model is loaded behind it, and it ends when it is told to."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from kvtier.engine.server.access import Access, KeyCheck
from kvtier.engine.server.api_keys import ApiKeys
from kvtier.engine.server.app import App, Switch
from kvtier.engine.server.entrance import Entrance
from kvtier.engine.server.http_connection import HttpConnection
from kvtier.engine.server.loading_app import LoadingApp

if TYPE_CHECKING:
    from kvtier.engine.server.serving_app import ServingApp  # which is imported while the server answers already

_LEAVING_S = 5  # for the last bytes of answers


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone: they are a matter of the process, `commands/serve.py`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one model on a socket that is bound already. `build_server` makes one; `run` it on an event loop."""

    def __init__(
        self,
        bound: socket.socket,
        entrance: Entrance,
        loading: LoadingApp,
        load: "Callable[[], Coroutine[None, None, ServingApp]]",
    ) -> None:
        """*loading* answers until *load* has given the app that serves."""
        self.entrance = entrance
        self._bound = bound
        self._load = load
        self._switch = Switch(loading)
        self._stop = asyncio.Event()
        settings = uvicorn.Config(
            Access(KeyCheck(self._switch, entrance), entrance),
            http=partial(HttpConnection, gate=entrance.gate),  # type: ignore[arg-type]  # it makes one
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LEAVING_S,
        )
        self._uvicorn = _Uvicorn(settings)

    @property
    def app(self) -> App:
        """What answers requests now."""
        return self._switch.app

    def stop(self) -> None:
        """Drain, flush and end; from the event loop. While it is loading it ends without waiting for that."""
        self._stop.set()

    def replace_keys(self, keys: ApiKeys) -> None:
        """Let in these from now on; from the event loop."""
        self.entrance.keys = keys
        self._switch.app.share_among(self.entrance.num_tenants)

    async def run(self) -> bool:
        """Load and serve until `stop`; False if that came before the model was loaded, which then goes on by itself.

        Errors are those of loading, or what the engine failed of.
        """
        answering = asyncio.create_task(self._uvicorn.serve([self._bound]))
        try:
            loading = asyncio.create_task(self._load())
            if await self._is_stopped_before(loading):
                return False
            await self._serve(loading.result())
            return True
        finally:
            self._switch.app.end()
            self._uvicorn.should_exit = True
            await answering

    async def _serve(self, app: "ServingApp") -> None:
        app.share_among(self.entrance.num_tenants)  # the keys may have been replaced while it was loaded
        self._switch.app = app
        try:
            await self._is_stopped_before(asyncio.create_task(app.wait_end()))
        finally:
            await app.close()

    async def _is_stopped_before(self, doing: "asyncio.Task[Any]") -> bool:
        """Wait for *doing*, whose errors are raised; True if `stop` came first, and it is cancelled."""
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return not doing.done()
        finally:
            doing.cancel()
            stopping.cancel()
