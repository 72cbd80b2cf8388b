"""TokenizerThreads: threads that tokenize prompts, so that neither the event loop nor another tenant waits for one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvtier.engine.sharing.turns import FairShare, Turns
from kvtier.engine.text.min_tokens import MinTokens
from kvtier.engine.text.prompt_limit import PromptLimit
from kvtier.engine.thread_work import guarded

_T = TypeVar("_T")


class TokenizerThreads:
    """Runs work with a tokenizer, tenant by tenant; no tenant has all threads. Owned by the event loop.

    Fast tokenizers give up the interpreter lock (a text of 3 MB kept another thread waiting for 0.1 s at most), and
    several threads may use one as long as its settings do not change. Slow tokenizers get one thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_threads: int) -> None:
        """For a large vocabulary this may take a second: do not call it on an event loop."""
        self._min_tokens = MinTokens(tokenizer)
        self._num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        tokenizer("a")  # switches off the truncation and padding that its file may ask for
        self._tokenizer = tokenizer
        self._num_threads = num_threads if tokenizer.is_fast else 1
        self._turns = Turns(FairShare(self._num_threads, 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvtier-tokenizer")

    @property
    def num_running(self) -> int:
        """Jobs that have a thread; a job whose caller has left keeps it until it is done."""
        return self._turns.num_taken

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a thread."""
        return self._turns.num_waiting

    def limit(self, max_tokens: int) -> PromptLimit:
        """The limit of a prompt that may have *max_tokens* tokens."""
        return PromptLimit(self._min_tokens, self._num_ids, max_tokens)

    def share_among(self, num_tenants: int) -> None:
        """Give each of so many tenants an equal share of the threads from now on."""
        self._turns.share = FairShare(self._num_threads, num_tenants)

    async def run(self, work: Callable[[PreTrainedTokenizerBase], _T], tenant: str | None = None) -> _T:
        """Call *work* in a thread when it is the tenant's turn, and return or raise what it does.

        If the caller is cancelled before its turn, *work* is not called. RuntimeError if the threads are closed before.
        """
        await self._turns.take(tenant)
        loop = asyncio.get_running_loop()

        def give_back(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._turns.give_back, tenant)

        try:
            job = self._threads.submit(guarded(partial(work, self._tokenizer)))
        except RuntimeError:  # closed while this job waited: the next job learns of it in its turn
            self._turns.give_back(tenant)
            raise
        job.add_done_callback(give_back)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads once their jobs are done. Idempotent; any thread may call it."""
        self._threads.shutdown(wait=False)
