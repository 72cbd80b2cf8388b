"""Has an ASGI app answer a call, and gives what it sends."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope

from kvtier.routing.ray_serve.call import Call


async def messages(app: ASGIApp, call: Call) -> AsyncGenerator[Message]:
    """What *app* sends for the *call*, as it comes. If the reader leaves before the end, the app is cancelled: that is
    how it learns that its client has left."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()  # an answer is not longer than the model writes
    to_receive: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if to_receive:
            return to_receive.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def work() -> None:
        try:
            await app(_scope(call), receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(work())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
        "state": {},
    }
