"""The feed of events from real publishers: ours over ZMQ, late, with gaps, restarted, and without replay."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import zmq

from kvtier.engine.config import EventsConfig
from kvtier.engine.kv_events import ZmqPublisher
from kvtier.routing.event_feed import EventFeed
from kvtier.routing.kv_event import BlockRemoved, EventBatch, Publisher
from kvtier.tiers.naming import events as own
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier

DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
PAUSE_S = 0.005


class Heard:
    """What a feed has given: numbers, and "lost" where all before was in doubt."""

    def __init__(self) -> None:
        self.all: list[int | str] = []

    def take(self, batch: EventBatch) -> None:
        (removed,) = batch.events
        assert isinstance(removed, BlockRemoved)
        self.all += removed.block_hashes

    def lose(self) -> None:
        self.all.append("lost")

    async def become(self, *expected: int | str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.all[-len(expected) :] != [*expected]:
                await asyncio.sleep(PAUSE_S)


def removal(number: int) -> list[own.Event]:
    return [own.BlockRemoved(Tier.DEVICE, 0, [BlockName(number.to_bytes(32, "big"))])]


@contextlib.contextmanager
def publishing(
    endpoint: str = "tcp://*:0", replay: str | None = "tcp://*:0", **others: object
) -> Iterator[ZmqPublisher]:
    with ZmqPublisher(
        EventsConfig(endpoint=endpoint, replay_endpoint=replay, **others), [FullAttention(16)]
    ) as publisher:
        yield publisher


@contextlib.asynccontextmanager
async def listening(
    publisher: "ZmqPublisher | Wire", heard: Heard, replay: bool = True, events: str | None = None
) -> AsyncIterator[EventFeed]:
    again = publisher.replay_endpoint if replay else None
    feed = EventFeed(Publisher("replica", events or publisher.endpoint, again), heard.take, heard.lose, DEADLINE_S)
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def run(play: Callable[[], object]) -> None:
    asyncio.run(play())


def test_what_was_told_before_is_learnt_and_what_follows_too() -> None:
    async def play() -> None:
        heard = Heard()
        with publishing() as publisher:
            for number in (1, 2, 3):
                publisher.publish(removal(number))
            async with listening(publisher, heard) as feed:
                await heard.become(1, 2, 3)
                publisher.publish(removal(4))
                await heard.become(1, 2, 3, 4)
                assert heard.all == [1, 2, 3, 4]
                assert (feed.num_gaps, feed.num_losses, feed.next_seq) == (0, 0, 4)

    run(play)


def test_what_was_told_is_learnt_anew_when_it_was_forgotten() -> None:
    async def play() -> None:
        heard = Heard()
        with publishing() as publisher:
            for number in (1, 2):
                publisher.publish(removal(number))
            async with listening(publisher, heard) as feed:
                await heard.become(1, 2)
                feed.start_over()
                async with asyncio.timeout(DEADLINE_S):
                    while 3 not in heard.all:
                        publisher.publish(removal(3))
                        await asyncio.sleep(PAUSE_S)

                assert heard.all[:5] == [1, 2, 1, 2, 3]

    run(play)


class Wire:
    """A publisher that can leave out messages: it sends what it is told to, with the numbers that it is told."""

    def __init__(self, context: zmq.Context, port: int = 0, replay_port: int = 0) -> None:
        self._sockets = [context.socket(zmq.PUB), context.socket(zmq.ROUTER)]
        for socket, at in zip(self._sockets, (port, replay_port), strict=True):
            socket.linger = 0
            socket.bind(f"tcp://127.0.0.1:{at or '*'}")
        self.endpoint, self.replay_endpoint = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets)
        self.kept: dict[int, bytes] = {}
        self.num_asked = 0

    def send(self, seq: int, ts: float | None = None, *, is_heard: bool = True, is_kept: bool = True) -> None:
        removed = {"type": "BlockRemoved", "block_hashes": [seq], "medium": "GPU"}
        payload = msgspec.msgpack.encode([float(seq) if ts is None else ts, [removed], 0])
        if is_kept:
            self.kept[seq] = payload
        if is_heard:
            self._sockets[0].send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def send_raw(self, payload: bytes) -> None:
        self._sockets[0].send_multipart([b"", bytes(8), payload])

    async def answer(self) -> None:
        """Answer replays until cancelled."""
        while True:
            if not self._sockets[1].poll(0):
                await asyncio.sleep(PAUSE_S)
                continue
            client, _, start = self._sockets[1].recv_multipart()
            self.num_asked += 1
            for seq, payload in self.kept.items():
                if seq >= int.from_bytes(start, "big"):
                    self._sockets[1].send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            self._sockets[1].send_multipart([client, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


@contextlib.asynccontextmanager
async def wired(port: int = 0, replay_port: int = 0) -> AsyncIterator[Wire]:
    context = zmq.Context()
    wire = Wire(context, port, replay_port)
    answering = asyncio.create_task(wire.answer())
    try:
        yield wire
    finally:
        answering.cancel()
        wire.close()
        context.term()


async def until_asked(wire: Wire, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while wire.num_asked < number:
            await asyncio.sleep(PAUSE_S)


async def until_heard(wire: Wire, heard: Heard, seq: int, *expected: int | str, **how: object) -> None:
    """Send number *seq* until what it leads to has come."""
    async with asyncio.timeout(DEADLINE_S):
        while heard.all[-len(expected) :] != [*expected]:
            wire.send(seq, **how)
            await asyncio.sleep(PAUSE_S)


def test_a_gap_is_replayed_in_its_order_and_each_batch_comes_once() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard) as feed:
            await until_asked(wire, 1)
            await until_heard(wire, heard, 0, 0)
            for seq in (1, 2):
                wire.send(seq, is_heard=False)
            wire.send(3)
            wire.send(4)
            await heard.become(4)

            assert heard.all == [0, 1, 2, 3, 4]
            assert (feed.num_gaps, feed.num_losses) == (1, 0)

    run(play)


def test_after_a_gap_that_cannot_be_replayed_what_is_left_is_learnt_anew() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard) as feed:
            await until_asked(wire, 1)
            await until_heard(wire, heard, 0, 0)
            wire.kept.clear()  # its buffer has room for a few only
            for seq in (2, 3):
                wire.send(seq, is_heard=False)
            wire.send(4)
            await heard.become(4)

            assert heard.all == [0, "lost", 2, 3, 4]
            assert (feed.num_gaps, feed.num_losses) == (1, 1)

    run(play)


def test_a_number_that_the_publisher_itself_has_dropped_ends_what_was_known_before() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard):
            await until_asked(wire, 1)
            await until_heard(wire, heard, 0, 0)
            wire.send(1)
            wire.send(3)  # 2 is in no buffer
            await heard.become(3)

            assert heard.all == [0, 1, "lost", 3]

    run(play)


def test_without_replay_a_gap_ends_what_was_known() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard, replay=False):
            await until_heard(wire, heard, 0, 0)
            wire.send(5)
            await heard.become(5)

            assert heard.all == [0, "lost", 5]

    run(play)


def test_numbers_that_go_back_with_a_later_time_are_of_a_new_publisher() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard) as feed:
            await until_asked(wire, 1)
            await until_heard(wire, heard, 0, 0)
            wire.send(1)
            await heard.become(0, 1)
            wire.kept.clear()
            wire.send(0, ts=9.0)
            await heard.become("lost", 0)

            assert feed.num_losses == 1

    run(play)


def test_what_is_no_batch_ends_what_was_known_and_listening_goes_on() -> None:
    async def play() -> None:
        heard = Heard()
        async with wired() as wire, listening(wire, heard):
            await until_asked(wire, 1)
            await until_heard(wire, heard, 0, 0)
            wire.kept.clear()
            wire.send_raw(b"nonsense")
            await heard.become("lost")
            await until_heard(wire, heard, 5, 5)

    run(play)


def test_a_publisher_that_was_restarted_is_learnt_anew_although_its_numbers_fit() -> None:
    """The new one may have come as far as the old one when the feed has found it."""

    async def play() -> None:
        heard = Heard()
        with publishing() as before:
            before.publish(removal(1))
            endpoints = [f"tcp://*:{each.rpartition(':')[2]}" for each in (before.endpoint, before.replay_endpoint)]
            async with listening(before, heard):
                await heard.become(1)
                before.close()
                with publishing(*endpoints) as after:
                    after.publish(removal(2))
                    async with asyncio.timeout(DEADLINE_S):
                        while 3 not in heard.all:  # what is told before the feed is back is learnt with what follows
                            after.publish(removal(3))
                            await asyncio.sleep(PAUSE_S)
                    assert heard.all[:4] == [1, "lost", 2, 3]

    run(play)


class Relay:
    """A line to a publisher that can be cut."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, there_writer]
        for pair in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)


def test_a_line_that_was_cut_loses_nothing() -> None:
    async def play() -> None:
        heard = Heard()
        with publishing() as publisher:
            publisher.publish(removal(1))
            async with Relay(publisher.endpoint) as relay, listening(publisher, heard, events=relay.endpoint) as feed:
                await heard.become(1)
                relay.cut()
                publisher.publish(removal(2))
                async with asyncio.timeout(DEADLINE_S):
                    while 3 not in heard.all:
                        publisher.publish(removal(3))
                        await asyncio.sleep(PAUSE_S)

                assert heard.all[:3] == [1, 2, 3]
                assert feed.num_losses == 0

    run(play)


def test_without_replay_a_line_that_was_cut_ends_what_was_known() -> None:
    async def play() -> None:
        heard = Heard()
        with publishing() as publisher:
            async with (
                Relay(publisher.endpoint) as relay,
                listening(publisher, heard, replay=False, events=relay.endpoint),
            ):
                async with asyncio.timeout(DEADLINE_S):
                    while not heard.all:
                        publisher.publish(removal(1))
                        await asyncio.sleep(PAUSE_S)
                relay.cut()
                await heard.become("lost")

    run(play)
