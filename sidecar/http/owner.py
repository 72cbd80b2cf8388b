"""Owner: questions of the HTTP server's event loop to the thread that owns the tiers."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvtier.sidecar.sidecar import Sidecar, TooManyAsked
from kvtier.web.api_error import ApiError

ANSWER_S = 2.0  # the owner's thread answers within milliseconds; one that takes longer is stuck

_Answer = TypeVar("_Answer")


class Owner:
    """Asks, and waits for an answer no longer than a deadline. Owned by the event loop."""

    def __init__(self, sidecar: Sidecar, answer_s: float = ANSWER_S) -> None:
        self.sidecar = sidecar
        self._answer_s = answer_s

    async def ask(self, question: Callable[[], _Answer], answer_s: float | None = None) -> _Answer:
        """What *question* comes to on the owner's thread; its errors are raised. A 503 after *answer_s* seconds: then
        the question is not answered later either, unless that has begun."""
        wait_s = self._answer_s if answer_s is None else answer_s
        answer = asyncio.wrap_future(self.sidecar.ask(question))
        try:
            await asyncio.wait({answer}, timeout=wait_s)
        finally:  # also when this server ends meanwhile: an answer must not come to a loop that is closed
            is_answered = answer.done()
            answer.cancel()
        if not is_answered:
            raise ApiError(503, f"the thread that owns the tiers has not answered for {wait_s:g} s", code="stuck")
        try:
            return answer.result()
        except TooManyAsked as error:
            raise ApiError(503, f"{error}; it is stuck", code="stuck") from None
