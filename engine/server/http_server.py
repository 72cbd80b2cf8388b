"""HttpServer: the port is open from the first moment, the model is loaded behind it, and it ends when it is told to."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from asyncio_extras import call_in_executor

from kvtier.engine.config import Config
from kvtier.engine.server.api_keys import ApiKeys
from kvtier.engine.server.app import build_app
from kvtier.engine.server.http_connection import HttpConnection
from kvtier.engine.server.log_lines import take_in_libraries
from kvtier.engine.server.service import Service
from kvtier.engine.server.tenancy import with_names
from kvtier.engine.thread_work import guarded
from kvtier.tiers.naming.tier import Tier

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtier.engine.async_llm import AsyncLLM
    from kvtier.engine.documents.documents import Documents
    from kvtier.engine.documents.pin_shares import PinShares

log = logging.getLogger(__name__)

_LEAVING_S = 5  # for the last bytes of answers
_TELL_EVERY_S = 2.0


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone: they are a matter of the process, `commands/serve.py`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one model on a socket that is bound already. `run` it on an event loop."""

    llm: "AsyncLLM"  # once it is being loaded
    documents: "Documents"  # once it is loaded

    def __init__(
        self,
        model: "str | Path | PreTrainedModel",
        config: Config,
        bound: socket.socket,
        model_name: str,
        keys: ApiKeys | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        shows_bars: bool = False,
    ) -> None:
        """*shows_bars*: let transformers show on stderr how far it is with the weights."""
        config = with_names(config, keys)
        self.service = Service(config, model_name, keys)
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._shows_bars = shows_bars
        self._bound = bound
        self._stop = asyncio.Event()
        settings = uvicorn.Config(
            build_app(self.service),
            http=partial(HttpConnection, gate=self.service.gate),  # type: ignore[arg-type]  # it makes one
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LEAVING_S,
        )
        self._uvicorn = _Uvicorn(settings)

    def stop(self) -> None:
        """Drain, flush and end; from the event loop. While it is loading it ends without waiting for that."""
        self._stop.set()

    async def run(self) -> bool:
        """Load and serve until `stop`; False if that came before the model was loaded, which then goes on by itself.

        Errors are those of `AsyncLLM.start`, or what the engine failed of.
        """
        answering = asyncio.create_task(self._uvicorn.serve([self._bound]))
        try:
            if await self._until_stop(self._load()):
                return False
            preparing = asyncio.create_task(self._watch_memory())
            try:
                await self._until_stop(self.llm.wait_end())
            finally:
                preparing.cancel()
                await self._drain()
            return True
        finally:
            self.service.is_draining = True
            self._uvicorn.should_exit = True
            await answering

    async def _until_stop(self, work: Coroutine[object, object, None]) -> bool:
        """Wait for *work*, whose errors are raised; True if `stop` came first, and *work* is abandoned."""
        doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return not doing.done()
        finally:
            doing.cancel()
            stopping.cancel()

    async def _load(self) -> None:
        began_at = time.monotonic()
        self._tell_stage("importing torch and transformers")  # seconds, in which clients and signals are answered
        executor = ThreadPoolExecutor(1)
        importing = call_in_executor(guarded(partial(_import_engine, self._shows_bars)), executor=executor)
        executor.shutdown(wait=False)  # once that is done, whoever is cancelled here
        engine = await importing
        self.llm = engine(self._model, self._config, self._tokenizer, self._tell_stage)
        await self.llm.start()
        self._tell_stage("reading documents")
        from kvtier.engine.documents.pin_shares import PinShares
        from kvtier.engine.documents.prompt_pins import PromptPins

        shares = PinShares(self.service.num_tenants)
        pins = PromptPins(shares)
        try:
            self.documents = await _open_documents(self.service, self.llm, shares)
            await self.llm.attend(pins.tick)
        except BaseException:
            await self.llm.close()
            raise
        self.service.loaded(self.llm, self.documents, pins, shares)
        fields = {"seconds": round(time.monotonic() - began_at, 1), "max_model_len": self.llm.longest_request}
        log.info("ready", extra={"fields": fields})

    async def _drain(self) -> None:
        told_at = time.monotonic()

        def tell(num_blocks: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                log.info("flush: %d blocks are still to be written", num_blocks)

        try:
            num_left = await self._drained()
            if num_left:
                log.warning("drain: %d completions did not end in time and are cut off", num_left)
            await self.documents.close()
        finally:
            await self.llm.close(tell)
        log.info("ended")

    async def _drained(self) -> int:
        settings = self.service.settings
        if num_running := self.service.room.num_inside:
            log.info("drain: %d completions may go on for %g s", num_running, settings.drain_s)
        return await self.service.drain(settings.drain_s)

    def _tell_stage(self, stage: str) -> None:
        self.service.stage = stage
        log.info("load: %s", stage)

    async def _watch_memory(self) -> None:
        """Tell how far host memory is prepared, until it is: pinning a large one takes longer than loading a model."""
        with contextlib.suppress(RuntimeError):  # the engine has ended
            await self._tell_memory()

    async def _tell_memory(self) -> None:
        told = 0
        while (host := (statistics := self.llm.statistics()).cache.tiers.get(Tier.HOST)) is not None:
            prepared = statistics.host_prepared_bytes
            if prepared != told:
                told = prepared
                log.info("host memory: %d of %d MiB are prepared", prepared >> 20, host.capacity_bytes >> 20)
            if prepared >= host.capacity_bytes:
                return
            await asyncio.sleep(_TELL_EVERY_S)


async def _open_documents(service: Service, llm: "AsyncLLM", shares: "PinShares") -> "Documents":
    from kvtier.engine.server.document_routes import open_documents

    return await open_documents(service, llm, shares)


def _import_engine(shows_bars: bool) -> "type[AsyncLLM]":
    from transformers.utils import logging as transformers_log

    from kvtier.engine.async_llm import AsyncLLM
    from kvtier.engine.server import document_routes, generation  # noqa: F401  # now, not when the first request comes

    take_in_libraries()
    if not shows_bars:  # in a file they would be lines without end
        transformers_log.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    return AsyncLLM
