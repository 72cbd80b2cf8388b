"""A server of which a test says, byte by byte, what it answers: real connections, and no model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Heard:
    """A request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict:
        return json.loads(self.body)


@dataclass
class FakeReplica:
    """Says that it is ready, tokenizes bytes, and answers everything else with *answer*, by default its name."""

    name: str
    ready: int = 200
    heard: list[Heard] = field(default_factory=list)
    answer: "Callable[[FakeReplica, Heard, asyncio.StreamWriter], Awaitable[None]] | None" = None
    tokenize_status: Callable[[Heard], int] = lambda heard: 200
    num_tokenized: int = 0
    ready_paths: tuple[str, ...] = ("/ready", "/health")
    num_left: int = 0  # connections on which a client had gone while it was answered

    async def __aenter__(self) -> "FakeReplica":
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As SIGKILL: nobody listens, and each connection is reset."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (heard := await _read(reader)) is not None:
                await self._respond(heard, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_left += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        if heard.target in self.ready_paths:
            await whole(writer, {"status": "as told"}, self.ready)
        elif heard.target == "/tokenize" and (status := self.tokenize_status(heard)) != 200:
            await whole(writer, {}, status)
        elif heard.target == "/tokenize":
            self.num_tokenized += 1
            tokens = list(json.dumps(heard.content.get("messages", heard.content.get("prompt"))).encode())
            await whole(writer, {"count": len(tokens), "tokens": tokens})
        else:
            self.heard.append(heard)
            if self.answer is None:
                await whole(writer, {"replica": self.name})
            else:
                await self.answer(self, heard, writer)


async def whole(writer: asyncio.StreamWriter, content: object, status: int = 200) -> None:
    """An answer that says its length."""
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Fine\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def begin_events(writer: asyncio.StreamWriter) -> None:
    """The head of a stream of events."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()


async def event(writer: asyncio.StreamWriter, text: str) -> None:
    """One event of a stream."""
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def end_events(writer: asyncio.StreamWriter) -> None:
    """The end of a stream."""
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Heard | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, target, _ = line.split(" ")
    return Heard(method, target, headers, body)
