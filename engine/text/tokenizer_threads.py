"""TokenizerThreads: where prompts become token ids, so that neither the event loop nor another tenant waits for one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvtier.engine.sharing.fair_share import FairShare
from kvtier.engine.sharing.turns import Turns
from kvtier.engine.text.least_tokens import LeastTokens
from kvtier.engine.text.prompt_limit import PromptLimit
from kvtier.engine.thread_work import guarded

_T = TypeVar("_T")


class TokenizerThreads:
    """Runs work with a tokenizer, tenant by tenant; no tenant has all threads. Owned by the event loop.

    Fast tokenizers give up the interpreter lock (0.1 s at most was another thread kept waiting by one of 3 MB), and
    may be used by several threads as long as nobody changes their settings. Slow ones get one thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_threads: int) -> None:
        """It may take a second for a large vocabulary: not on an event loop."""
        self._least_tokens = LeastTokens(tokenizer)
        self._num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        tokenizer("a")  # whatever truncation or padding its file asks for is off from here on
        self._tokenizer = tokenizer
        self._num_threads = num_threads if tokenizer.is_fast else 1
        self._turns = Turns(FairShare(self._num_threads, 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvtier-tokenizer")

    @property
    def num_running(self) -> int:
        """Jobs that have a thread; one whose caller has left keeps it until it is done."""
        return self._turns.num_taken

    @property
    def num_waiting(self) -> int:
        """Jobs that have none yet."""
        return self._turns.num_waiting

    def limit(self, most: int) -> PromptLimit:
        """The limit of a prompt that may have *most* tokens."""
        return PromptLimit(self._least_tokens, self._num_ids, most)

    def share_among(self, num_tenants: int) -> None:
        """So many tenants ask from now on."""
        self._turns.share = FairShare(self._num_threads, num_tenants)

    async def run(self, work: Callable[[PreTrainedTokenizerBase], _T], tenant: str | None = None) -> _T:
        """What *work* returns, or raises, in a thread. If the caller is cancelled before its turn it is never begun.

        RuntimeError if they are closed before its turn.
        """
        await self._turns.take(tenant)
        loop = asyncio.get_running_loop()

        def give_back(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._turns.give_back, tenant)

        try:
            job = self._threads.submit(guarded(partial(work, self._tokenizer)))
        except RuntimeError:  # closed while it waited, and so are they whose turn is next
            self._turns.give_back(tenant)
            raise
        job.add_done_callback(give_back)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads once they are done. Idempotent; from any thread."""
        self._threads.shutdown(wait=False)
