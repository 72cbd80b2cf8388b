"""AsyncLLM: token streams for many callers at once; the engine runs in a thread of its own."""

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from asyncio_extras import call_in_executor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.config import Config, as_config
from kvtier.engine.core import EngineCore, EngineStatistics
from kvtier.engine.llm import GREEDY, Prompt, encode, keyed, load_model
from kvtier.engine.logprobs import TokenLogprobs
from kvtier.engine.metrics import MetricsServer, serve_metrics
from kvtier.engine.request import Completion, Request
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.terms import Terms
from kvtier.engine.tokenizer_threads import TokenizerThreads
from kvtier.tiers.block_hash import NO_EXTRA_KEYS, ExtraKeys

log = logging.getLogger(__name__)

IDLE_S = 0.1  # how often an engine without requests looks after its tiers …
COPYING_S = 0.005  # … and while it has something to copy down

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to a stream. The last one has the *completion*."""

    text: str
    token_id: int
    completion: Completion | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(eq=False, slots=True)
class _Stream:
    """One caller: where its pieces go, on its event loop. *request* is the engine thread's."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)
    request: Request | None = None

    def send(self, piece: Piece | Exception) -> None:
        """Hand a piece over to the caller's event loop, from the engine's thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class _EngineThread(Executor):
    """One daemon thread, for work in the order of submission.

    Python waits for the threads of a ThreadPoolExecutor before it ends, so a program that forgot to close would not.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvtier-engine", daemon=True).start()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(work, *arguments, **named)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:  # the thread's top: whoever waits for the future learns of it
                future.set_exception(error)


Commands = queue.SimpleQueue[Callable[[EngineCore], None] | None]


def _close_at_exit(commands: Commands, core: EngineCore, thread: Executor) -> None:
    commands.put(None)
    thread.submit(core.close).result()


class AsyncLLM:
    """Use it with `async with`; arguments as for `LLM`. Loading, flushing and tokenizing never block the event loop.

    async with AsyncLLM(model, config) as llm:
        async for piece in llm.generate("…"):
            print(piece.text, end="")

    Leaving the `async for` early, or cancelling its task, ends the request and its leases within a step.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: Config | Mapping[str, object] | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """*progress* is told what is being done while the engine starts, in the engine's thread."""
        self.config = as_config({} if config is None else config)
        self._progress = progress
        self._model = model
        self._tokenizer = tokenizer
        self._core: EngineCore | None = None
        self._metrics: MetricsServer | None = None
        self._streams: dict[Request, _Stream] = {}  # the engine thread's
        self._looks: list[Callable[[EngineCore], None]] = []  # the engine thread's
        self._open: set[_Stream] = set()  # the event loop's: all that wait for pieces
        self._commands: Commands = queue.SimpleQueue()
        # All that touches the engine happens in the one thread of this executor.
        self._engine_thread = _EngineThread()
        self._tokenizers: TokenizerThreads | None = None
        self._serving: asyncio.Future[None] | None = None
        self._at_exit: weakref.finalize[..., AsyncLLM] | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model and start serving. Errors are those of `LLM`."""
        self._core = await call_in_executor(self._load, executor=self._engine_thread)
        self._at_exit = weakref.finalize(self, _close_at_exit, self._commands, self._core, self._engine_thread)
        try:
            self._metrics = serve_metrics(self.statistics, self.config)
        except BaseException:
            await self.close()
            raise
        self._serving = call_in_executor(self._serve, self._core, executor=self._engine_thread)
        self._serving.add_done_callback(self._end_streams)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams = GREEDY,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        skip_reading_prefix_cache: bool = False,
        max_load_tokens: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Piece, None]:
        """Stream the continuation of one prompt, by the adapter *lora* if it is named.

        ValueError for a prompt that cannot run, an adapter that is not there, or when the queue is full.
        """
        arrived_at = time.monotonic()
        terms = Terms(priority, not skip_reading_prefix_cache, max_load_tokens)
        token_ids = await self._token_ids(prompt)
        keys = keyed(self._running_core(), extra, lora, cache_salt)  # again: it may have been closed meanwhile
        stream = _Stream(asyncio.get_running_loop())
        self._open.add(stream)
        self._commands.put(
            lambda core: self._add(
                core,
                stream,
                partial(core.add, token_ids, sampling, keys, arrived_at, terms),
            )
        )
        try:
            while True:
                piece = await stream.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.completion is not None:
                    return
        finally:
            self._open.discard(stream)
            self._commands.put(lambda core: self._abort(core, stream))

    async def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return await self.with_tokenizer(lambda tokenizer: encode(tokenizer, prompt))
        return prompt.tolist() if isinstance(prompt, np.ndarray) else prompt

    async def with_tokenizer(self, work: Callable[[PreTrainedTokenizerBase], _T], tenant: str | None = None) -> _T:
        """The result of *work* with the tokenizer, in a thread in which prompts are tokenized, when it is *tenant*'s
        turn."""
        return await self.tokenizers.run(work, tenant)

    @property
    def tokenizers(self) -> TokenizerThreads:
        """The threads in which prompts are tokenized."""
        self._running_core()
        assert self._tokenizers is not None, "they are there when the engine is"
        return self._tokenizers

    @property
    def longest_request(self) -> int:
        """Tokens that a prompt and its continuation may have together."""
        return self._running_core().longest_request

    async def wait_end(self) -> None:
        """Until the engine has been closed; raises what it failed of."""
        self._running_core()
        assert self._serving is not None, "the engine runs"
        await asyncio.shield(self._serving)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block, in host memory and on disk too; False, and nothing changed, while requests run."""
        return await self.ask(lambda core: core.reset())

    async def ask(self, question: Callable[[EngineCore], _T]) -> _T:
        """What *question* returns, or raises, in the engine's thread, between two steps: keep it short.

        RuntimeError if the engine ends before.
        """
        self._running_core()
        answer: Future[_T] = Future()

        def put(core: EngineCore) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(core))
            except Exception as error:  # the asker's mistake, and not the engine's end
                answer.set_exception(error)

        self._commands.put(put)
        done: asyncio.Future[Any] = asyncio.wrap_future(answer)
        assert self._serving is not None, "the engine runs"
        await asyncio.wait({done, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise RuntimeError("AsyncLLM: has ended; start a new one")
        return answer.result()

    async def attend(self, look: Callable[[EngineCore], None]) -> None:
        """Have *look* called in the engine's thread after every step, and every 0.1 s while there are none."""
        await self.ask(lambda _: self._looks.append(look))

    def statistics(self) -> EngineStatistics:
        """The engine's last snapshot, by value; at most a quarter of a second old."""
        return self._running_core().statistics

    async def close(self, progress: Callable[[int], None] = lambda num_left: None) -> None:
        """Abort what runs, write what is cached to disk, end the threads. Idempotent.

        *progress* gets the number of blocks still to write, in the engine's thread.
        """
        if self._closed:
            return
        self._closed = True
        if self._metrics is not None:
            await call_in_executor(self._metrics.close)
        if self._serving is not None:
            self._commands.put(None)
            await asyncio.wait([self._serving])
        if self._core is not None:
            await call_in_executor(self._core.close, progress, executor=self._engine_thread)
        if self._at_exit is not None:
            self._at_exit.detach()
        self._engine_thread.shutdown(wait=False)
        if self._tokenizers is not None:
            self._tokenizers.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _running_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("AsyncLLM: not started; use 'async with AsyncLLM(...)' or await start()")
        if self._closed or (self._serving is not None and self._serving.done()):
            raise RuntimeError("AsyncLLM: has ended; start a new one")
        return self._core

    def _load(self) -> EngineCore:
        self._progress("loading the weights")
        model, tokenizer = load_model(self._model, self.config.model, self._tokenizer)
        self._tokenizers = TokenizerThreads(tokenizer, self.config.server.tokenizer_threads)
        return EngineCore(model, tokenizer, self.config, self._progress)

    def _serve(self, core: EngineCore) -> None:
        """The engine's thread: take commands, step, hand out pieces, until told to end."""
        while self._take_commands(core):
            if core.has_work:
                for request in core.step():
                    self._send(request)
            else:
                core.idle()
            for look in self._looks:
                look(core)

    def _end_streams(self, serving: asyncio.Future[None]) -> None:
        """The engine's thread has ended, as it was told or by an error: everybody who still waits learns of it."""
        error = serving.exception()
        if error is not None:
            log.error("the engine failed", exc_info=error)
        why = "AsyncLLM: closed while the request was running" if error is None else f"the engine failed: {error}"
        for stream in self._open:
            stream.pieces.put_nowait(RuntimeError(why))

    def _take_commands(self, core: EngineCore) -> bool:
        """Carry out what callers asked for; wait for it a moment if there is nothing else to do. False: end."""
        waits = not core.has_work
        while True:
            try:
                timeout_s = COPYING_S if core.cache.num_under_way else IDLE_S
                command = self._commands.get(block=waits, timeout=timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)
            waits = False  # for one only: who asks again and again must not keep the engine from looking after itself

    def _add(self, core: EngineCore, stream: _Stream, add: Callable[[], Request]) -> None:
        try:
            stream.request = add()
        except Exception as error:  # a caller's mistake must end that caller only
            stream.send(error)
            return
        self._streams[stream.request] = stream

    def _abort(self, core: EngineCore, stream: _Stream) -> None:
        if stream.request is not None:
            core.abort(stream.request)
            self._streams.pop(stream.request, None)

    def _send(self, request: Request) -> None:
        stream = self._streams.get(request)
        if stream is not None:
            done = None if request.finish_reason is None else request.completion()
            logprobs = request.logprobs[-1] if request.logprobs else None
            stream.send(Piece(request.new_text, request.token_ids[-1], done, logprobs))
