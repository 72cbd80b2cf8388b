"""Functions that stop the work on a request when its client disconnects or stops reading."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

_T = TypeVar("_T")

SEND_TIMEOUT_S = 60.0  # a client that reads nothing for this long counts as gone


def in_time(send: Send) -> Send:
    """Wrap *send* so that it raises TimeoutError if the client does not read for 60 s."""

    async def send_in_time(message: Message) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)

    return send_in_time


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run *work* and return its result or raise its exception.

    If the client disconnects before *work* ends, cancel *work* and raise ClientDisconnect.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
