"""Owner: runs functions for the HTTP server's event loop on the thread that owns the tiers."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvtier.sidecar.sidecar import QueueFull, Sidecar
from kvtier.web.api_error import ApiError

ANSWER_S = 2.0  # the owner's thread answers within milliseconds; one that takes longer is stuck

_Answer = TypeVar("_Answer")


class Owner:
    """The event loop's access to the thread that owns the tiers. Each call has a deadline."""

    def __init__(self, sidecar: Sidecar, answer_s: float = ANSWER_S) -> None:
        self.sidecar = sidecar
        self._answer_s = answer_s

    async def ask(self, question: Callable[[], _Answer], answer_s: float | None = None) -> _Answer:
        """Run *question* on the thread that owns the tiers, and return its result or raise its exception.

        Raises ApiError 503 if there is no result after *answer_s* seconds (default: *answer_s* of `__init__`). If
        *question* has not begun by then, it is never run.
        """
        wait_s = self._answer_s if answer_s is None else answer_s
        answer = asyncio.wrap_future(self.sidecar.ask(question))
        try:
            await asyncio.wait({answer}, timeout=wait_s)
        finally:  # also if this server ends meanwhile, because no answer may reach a closed loop
            is_answered = answer.done()
            answer.cancel()
        if not is_answered:
            raise ApiError(503, f"the thread that owns the tiers has not answered for {wait_s:g} s", code="stuck")
        try:
            return answer.result()
        except QueueFull as error:
            raise ApiError(503, f"{error}; the thread is stuck", code="stuck") from None
