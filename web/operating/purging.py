"""How a purge is carried out by an event loop that is not the tiers' thread."""

import asyncio
from collections.abc import Awaitable, Callable

PAUSE_S = 0.002  # between two parts: the tiers' thread has its other deeds


async def until_done(go_on: Callable[[], Awaitable[bool]]) -> None:
    """Call *go_on*, which has the tiers' thread take the next parts, until it says that all are done."""
    while not await go_on():
        await asyncio.sleep(PAUSE_S)
