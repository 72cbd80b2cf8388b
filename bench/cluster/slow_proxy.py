"""`SlowProxy`: a way to a server by which each answer takes a while, in the time of a block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 1 << 16


class SlowProxy:
    """Hands on what comes, at a free port of this machine; what the server says comes *delay_s* later."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._server_port = port
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        self._is_ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(self._hand_on(reader, back, 0.0), self._hand_on(there, writer, self._delay_s))

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()
            writer.close()


@contextmanager
def slow_proxy(port: int, delay_s: float) -> Iterator[int]:
    """The port of a proxy to the server at *port*."""
    proxy = SlowProxy(port, delay_s)
    try:
        yield proxy.port
    finally:
        proxy.close()
