"""Threads that tokenize prompts, so that neither the event loop nor another tenant waits for a long prompt."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvtier.engine.sharing.turns import FairShare, Turns
from kvtier.engine.text.min_tokens import MinTokens, PromptLimit
from kvtier.engine.thread_work import guarded

_T = TypeVar("_T")


class TokenizerThreads:
    """A thread pool for work with a tokenizer, shared fairly among tenants. Owned by the event loop.

    If there are several tenants, none of them can use all threads. Several threads may use one fast tokenizer, as long
    as its settings do not change. It releases the interpreter lock: tokenizing a text of 3 MB blocked another thread
    for at most 0.1 s. A slow tokenizer gets a single thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_threads: int) -> None:
        """Create the threads. Do not call this on an event loop: with a large vocabulary it may take a second."""
        self._min_tokens = MinTokens(tokenizer)
        self._num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        tokenizer("a")  # switches off truncation and padding that the tokenizer's file may request
        self._tokenizer = tokenizer
        self._num_threads = num_threads if tokenizer.is_fast else 1
        self._turns = Turns(FairShare(self._num_threads, 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvtier-tokenizer")

    @property
    def num_running(self) -> int:
        """Number of jobs that have a thread. A job whose caller was cancelled keeps its thread until it is done."""
        return self._turns.num_taken

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return self._turns.num_waiting

    def limit(self, max_tokens: int) -> PromptLimit:
        """Return the checks for a prompt of at most *max_tokens* tokens."""
        return PromptLimit(self._min_tokens, self._num_ids, max_tokens)

    def share_among(self, num_tenants: int) -> None:
        """Give each of *num_tenants* tenants an equal share of the threads from now on."""
        self._turns.share = FairShare(self._num_threads, num_tenants)

    async def run(self, work: Callable[[PreTrainedTokenizerBase], _T], tenant: str | None = None) -> _T:
        """Call *work* in a thread when it is the tenant's turn, and return its result or raise its exception.

        If the caller is cancelled before its turn, *work* is not called. Raises RuntimeError if `close` is called
        before the turn.
        """
        await self._turns.take(tenant)
        loop = asyncio.get_running_loop()

        def give_back(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.give_back, tenant)

        try:
            job = self._threads.submit(guarded(partial(work, self._tokenizer)))
        except RuntimeError:  # closed while this job waited; the next job finds out at its own turn
            self._turns.give_back(tenant)
            raise
        job.add_done_callback(give_back)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads once their jobs are done. May be called repeatedly and from any thread."""
        self._threads.shutdown(wait=False)
