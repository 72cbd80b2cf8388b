"""AsyncEngine: an engine in a thread of its own, which streams tokens to many concurrent callers of an event loop."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import numpy as np
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.config import Config, as_config
from kvtier.engine.core import IDLE_WAIT_S, RESET_WAIT_S, EngineCore, EngineStatistics
from kvtier.engine.engine_thread import Attendant, EngineThread, Progress, fail
from kvtier.engine.images.engine_images import Images
from kvtier.engine.images.image_prompt import ImagePrompt, PreparedPrompt
from kvtier.engine.llm import GREEDY, Prompt, keyed, prepare
from kvtier.engine.loaded_engine import LoadedEngine
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.sampling_defaults import SamplingDefaults
from kvtier.engine.model.structured.grammar import Grammar
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.engine.scheduling.request import Completion, Request, RequestOptions
from kvtier.engine.scheduling.timeline import ANONYMOUS, Caller
from kvtier.engine.text.tokenizer_threads import TokenizerThreads
from kvtier.engine.thread_work import coroutine_safe
from kvtier.tiers.lower.lower_tiers import Deletion
from kvtier.tiers.lower.statistics import NO_TOKENS, TokenBalance
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, ExtraKeys

_T = TypeVar("_T")
_A = TypeVar("_A", bound=Attendant)


@dataclass(frozen=True, slots=True, repr=False)
class StreamChunk:
    """The output of one step for one request.

    *tokens* and *prompt_logprobs* describe the prompt, and are repeated in every chunk. Only the last chunk has a
    *completion*.
    """

    text: str
    token_id: int | None  # None if the request generates no tokens
    completion: Completion | None = None
    logprobs: TokenLogprobs | None = None
    tokens: TokenBalance = NO_TOKENS  # where the prompt's tokens came from
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # for each token of the prompt, if requested

    def __repr__(self) -> str:
        end = "" if self.completion is None else f", last: finish_reason={self.completion.finish_reason}"
        return f"<StreamChunk {self.text!r}: token {self.token_id}{end}; prompt: {self.tokens}>"


@dataclass(eq=False, slots=True)
class _Stream:
    """The stream of one caller: a queue on the caller's event loop, filled by the engine's thread.

    Only the engine's thread uses *request*.
    """

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[StreamChunk | Exception] = field(default_factory=asyncio.Queue)
    request: Request | None = None

    def send(self, piece: StreamChunk | Exception) -> None:
        """Pass a chunk, or the error that ends the stream, from the engine's thread to the caller's event loop."""
        with suppress(RuntimeError):  # raised if the caller's loop has been closed
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def refuse(self, why: str) -> None:
        """End the stream with a RuntimeError that says *why* the engine has ended."""
        self.send(RuntimeError(why))


class AsyncEngine:
    """An engine in a thread of its own, for callers on an event loop.

    The public `AsyncLLM` and the server use it. Besides streaming tokens, it runs functions in the engine's thread
    (`ask`, `tell`, attendants) and in tokenizer threads. Arguments are those of `LLM`. Loading, tokenizing, and
    flushing (the writing of cached blocks to disk) never block the event loop.

    If `start` or `close` is cancelled, the engine's thread still flushes and closes the engine; await `close` to wait
    until that is done.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: Config | Mapping[str, object] | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: Callable[[str], None] = lambda stage: None,
        image_processor: BaseImageProcessor | None = None,
    ) -> None:
        """Prepare the engine without loading it.

        `start` loads the engine and calls *progress*, in the engine's thread, with the name of each stage.
        """
        self.config = as_config({} if config is None else config)
        self._streams: dict[Request, _Stream] = {}  # owned by the engine's thread
        # Only this thread touches the engine.
        load = partial(LoadedEngine.load, model, self.config, tokenizer, progress, image_processor)
        self._thread = EngineThread(load, self._send, self._end_streams)
        self._closed = False

    async def start(self) -> None:
        """Load the model and start serving. Call it once; it raises the same errors as `LLM`.

        If the calling task is cancelled, the engine is closed as soon as it has loaded.
        """
        self._thread.start()
        at_exit = weakref.finalize(self, self._thread.end_at_exit)
        self._thread.closed.add_done_callback(lambda _: at_exit.detach())
        try:
            await asyncio.wrap_future(self._thread.loaded)
        except asyncio.CancelledError:
            self._end()
            raise
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompt: Prompt | PreparedPrompt,
        sampling: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        skip_reading_prefix_cache: bool = False,
        max_load_tokens: int | None = None,
        priority: int = 0,
        caller: Caller = ANONYMOUS,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Stream the continuation of one prompt. Arguments shared with `LLM.generate` have the same meaning.

        A lower *priority* is more urgent. *caller* identifies the request in the request log, metrics and traces.

        Raises:
            ValueError: If the prompt cannot run, the adapter is not loaded, or the queue is full.
        """
        arrived_at = time.monotonic()
        options = RequestOptions(priority, not skip_reading_prefix_cache, max_load_tokens)
        prepared = await self._prepared(prompt, extra.cache_salt if cache_salt is None else cache_salt)
        grammar = None if sampling is None else await self.grammar_of(sampling.structured_outputs, caller.tenant)
        core = self._loaded_engine().core  # only now: the engine may have been closed during the awaits above
        keys = keyed(core, extra, lora, cache_salt)
        params = core.sampling_defaults.over(GREEDY) if sampling is None else sampling
        stream = _Stream(asyncio.get_running_loop())
        self._thread.put(
            lambda core: self._add(
                core,
                stream,
                partial(
                    core.add,
                    prepared.token_ids,
                    params,
                    keys,
                    arrived_at,
                    options,
                    caller,
                    grammar,
                    prepared.images,
                ),
            ),
            stream.refuse,
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
            self._thread.put(lambda core: self._abort(core, stream))

    async def grammar_of(self, asked: StructuredOutputs | None, tenant: str | None = None) -> Grammar | None:
        """Compile *asked*, the structured-output constraint of a request, in a tokenizer thread.

        Tenants take turns on the tokenizer threads, so this call may wait until it is the turn of *tenant*.

        Returns:
            The compiled grammar, which is cached for later requests; None if *asked* is None.

        Raises:
            InvalidParameter: If *asked* is not a valid grammar, cannot be enforced, or takes too much time or memory.
        """
        if asked is None:
            return None
        grammars = self._loaded_engine().core.grammars
        return await self.with_tokenizer(lambda _: grammars.compile(asked), tenant)

    async def _prepared(self, prompt: Prompt | PreparedPrompt, cache_salt: str | None) -> PreparedPrompt:
        if isinstance(prompt, PreparedPrompt):
            return prompt
        if isinstance(prompt, str | ImagePrompt):
            images = self.images
            return await self.with_tokenizer(lambda tokenizer: prepare(tokenizer, images, prompt, cache_salt))
        return PreparedPrompt(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)

    async def with_tokenizer(self, work: Callable[[PreTrainedTokenizerBase], _T], tenant: str | None = None) -> _T:
        """Call *work* with the tokenizer in a tokenizer thread, and return its result.

        Tenants take turns on the tokenizer threads, so this call may wait until it is the turn of *tenant*.
        """
        return await self.tokenizers.run(work, tenant)

    @property
    def tokenizers(self) -> TokenizerThreads:
        """Threads that tokenize prompts."""
        return self._loaded_engine().tokenizers

    @property
    def images(self) -> Images:
        """The image part of the engine. Its methods for prompts may be called in tokenizer threads."""
        return self._loaded_engine().core.images

    @property
    def longest_request(self) -> int:
        """Maximum number of tokens of a request, prompt and continuation together, that this engine can run."""
        return self._loaded_engine().core.longest_request

    @property
    def model_tokens(self) -> int | None:
        """Maximum context length of the model, regardless of the device's capacity; None if the model has no limit."""
        return self._loaded_engine().core.runner.max_tokens

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters from the model's `generation_config`, for requests that do not set them."""
        return self._loaded_engine().core.sampling_defaults

    async def wait_end(self) -> None:
        """Wait until the engine stops serving. Raise the engine's error if it failed."""
        self._loaded_engine()
        await asyncio.wrap_future(self._thread.served)

    async def reset_prefix_cache(self) -> bool:
        """Evict all blocks from device, host memory and disk.

        A remote tier keeps its blocks, so later prompts may still hit them. The engine continues to run steps, because
        the records on disk are deleted in short parts.

        Returns:
            True if the blocks were evicted. False, with nothing evicted, if requests are running, if copies hang, or if
            the disk store is known to fail. Also False if the store fails to delete the records; see
            `EngineCore.reset`.
        """

        def begin(core: EngineCore) -> tuple[bool, bool]:
            """Return whether the reset has begun, and whether only copies in flight prevent it.

            Both answers are of the same moment: copies that end between two questions are no reason to give up.
            """
            return core.begin_reset(), bool(core.cache.num_in_flight) and not core.scheduler.running

        deadline = time.monotonic() + RESET_WAIT_S
        while True:
            has_begun, is_copying = await self.ask(begin)
            if has_begun:
                break
            if not is_copying or time.monotonic() >= deadline:
                return False
            await asyncio.sleep(IDLE_WAIT_S)
        while (deletion := await self.ask(lambda core: core.cache.deletion)) is Deletion.IN_PROGRESS:
            await asyncio.sleep(IDLE_WAIT_S)
        return deletion is Deletion.DONE

    async def ask(self, question: Callable[[EngineCore], _T]) -> _T:
        """Call *question* in the engine's thread between two steps, and return its result or raise its error.

        *question* should be short, because the engine computes nothing meanwhile. It is not called if the calling task
        is cancelled before.

        Raises:
            RuntimeError: If the engine ends before *question* is called.
        """
        self._loaded_engine()
        answer: Future[_T] = Future()

        def put(core: EngineCore) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(core))
            except BaseException as error:  # an error of *question* must not end the engine
                fail(answer, error)

        def refuse(why: str) -> None:
            if answer.set_running_or_notify_cancel():
                fail(answer, RuntimeError(why))

        self._thread.put(put, refuse)
        return await asyncio.wrap_future(answer)

    def tell(self, do: Callable[[EngineCore], None]) -> None:
        """Schedule *do* to run in the engine's thread between two steps, and return at once.

        *do* must not raise. It is not called if the engine ends before.
        """
        self._thread.put(do)

    async def add_attendant(self, make: Callable[[EngineCore], _A]) -> _A:
        """Create an attendant by calling *make* in the engine's thread, and return it.

        An attendant is a task that the engine's thread runs between steps, see `Attendant`. No other thread may use
        it. If the calling task is cancelled, an attendant that was already created is ended.

        Raises:
            RuntimeError: If the engine ends before *make* is called.
        """
        made: list[_A] = []

        def begin(core: EngineCore) -> _A:
            made.append(attendant := make(core))
            self._thread.add_attendant(attendant)
            return attendant

        def end(_: EngineCore) -> None:
            for attendant in made:
                self._thread.remove_attendant(attendant)

        try:
            return await self.ask(begin)
        except BaseException:
            self._thread.put(end)  # runs after `begin`, if `begin` runs at all
            raise

    def remove_attendant(self, attendant: Attendant) -> None:
        """Ask the engine's thread to end *attendant*, a task that it runs between steps, and return at once."""
        self._thread.put(lambda _: self._thread.remove_attendant(attendant))

    def statistics(self) -> EngineStatistics:
        """Return the engine's latest statistics, which are at most 0.25 s old while the engine runs steps."""
        return self._loaded_engine().core.statistics

    async def close(self, progress: Progress | None = None) -> None:
        """Abort all requests, flush cached blocks to disk, and end the threads. A second call waits for the first.

        The engine's thread calls *progress* with the number of blocks left to write. Closing continues even if the
        calling task is cancelled.
        """
        if self._thread.is_forked:
            return
        self._end(progress)
        if self._thread.has_begun:
            await asyncio.wrap_future(self._thread.closed)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncLLM has threads and cannot be pickled or copied; create one in each process")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _loaded_engine(self) -> LoadedEngine:
        if self._thread.is_forked:
            raise RuntimeError(
                "AsyncLLM: this process was forked after the AsyncLLM was started, and its threads exist only in the "
                "parent process; create it in the process that uses it, or start processes with the spawn method"
            )
        if self._closed or self._thread.served.done():
            raise RuntimeError("AsyncLLM: the engine has ended; create a new AsyncLLM")
        if not self._thread.loaded.done():
            raise RuntimeError("AsyncLLM: not started; use 'async with AsyncLLM(...)' or await start()")
        return self._thread.loaded.result()

    def _end(self, progress: Progress | None = None) -> None:
        self._closed = True
        self._thread.end(progress)

    def _end_streams(self, why: str) -> None:
        for stream in self._streams.values():
            stream.refuse(why)

    def _add(self, core: EngineCore, stream: _Stream, add: Callable[[], Request]) -> None:
        try:
            stream.request = add()
        except BaseException as error:  # an invalid request must end only its own stream
            stream.send(coroutine_safe(error))
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
            token_id = request.token_ids[-1] if request.sampling.max_tokens else None
            stream.send(
                StreamChunk(request.new_text, token_id, done, logprobs, request.balance(), request.prompt_logprobs)
            )
