"""`EventFeed`: the KV events of one replica, in order and without undetected gaps."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvtier.routing.kv_event import EventBatch, Publisher, decode

log = logging.getLogger(__name__)

REPLAY_S = 10.0  # maximum wait for the next part of a replay, during which the feed receives nothing else
AGAIN_S = 1.0  # pause between an error and the restart of the feed
_END = -1
_SEQ_BYTES = 8  # big-endian, signed: the end of a replay is -1
_MAX_MESSAGE_BYTES = 16 << 20  # more than the blocks of the largest step; a longer message ends the connection
_HWM = 100_000  # batches that wait for the router, as many as a publisher keeps for a slow subscriber


@dataclass(frozen=True, slots=True)
class Told:
    """A batch of KV events and its sequence number."""

    seq: int
    batch: EventBatch


class EventFeed:
    """A subscription to one replica's KV events. It requests missed batches again, and reports batches that are lost.

    Batches are lost if they cannot be replayed, or if the replica restarts. Then all earlier batches are unreliable,
    and *lose* is called. After that, *take* is called with the latest batches that can be replayed without a gap.
    Owned by the event loop; `run` runs until it is cancelled.
    """

    def __init__(
        self,
        publisher: Publisher,
        take: Callable[[EventBatch], None],
        lose: Callable[[], None],
        replay_s: float = REPLAY_S,
    ) -> None:
        """Create the feed of *publisher*.

        *take* is called with each batch once, in order. *lose* is called when earlier batches have become unreliable,
        so that their blocks must be forgotten. A replay is abandoned if its next part does not arrive within *replay_s*
        seconds.
        """
        self._name = publisher.name
        self._endpoint, self._replay_endpoint = publisher.events, publisher.replay
        self._topic = publisher.topic.encode()
        self._take, self._lose, self._replay_s = take, lose, replay_s
        self._last: Told | None = None  # the last batch that was taken
        self._is_in_doubt = False  # whether the connection was lost, so that another publisher may answer now
        self.num_batches = self.num_gaps = self.num_replays = self.num_losses = 0

    @property
    def next_seq(self) -> int | None:
        """Expected sequence number of the next batch; None before the first batch."""
        return None if self._last is None else self._last.seq + 1

    def start_over(self) -> None:
        """Forget that any batch was received, because the caller has forgotten the replica's blocks.

        When the next batch arrives, the earlier batches that can be replayed are taken again.
        """
        self._last = None
        self._is_in_doubt = False

    async def run(self) -> None:
        """Listen until cancelled. After any error, such as a malformed message, forget all batches and start again."""
        while True:
            try:
                await self._listen()
            except Exception as error:
                log.warning(
                    "KV events of replica %s: %r; forgetting its blocks and subscribing again", self._name, error
                )
                self._forget()
                await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        context = zmq.asyncio.Context.instance()
        with ExitStack() as opened:
            subscriber = context.socket(zmq.SUB)
            opened.callback(subscriber.close, linger=0)
            subscriber.setsockopt(zmq.RCVHWM, _HWM)
            subscriber.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            subscriber.setsockopt(zmq.IPV6, int("::" in self._endpoint or "[" in self._endpoint))
            subscriber.subscribe(self._topic)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            opened.callback(subscriber.disable_monitor)
            subscriber.connect(self._endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(monitor, zmq.POLLIN)
            poller.register(subscriber, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:
                    await self._note((await recv_monitor_message(monitor))["event"])
                if subscriber in ready:
                    _, seq, payload = (await subscriber.recv_multipart())[-3:]
                    await self._hear(_told(seq, payload))

    async def _note(self, event: int) -> None:
        """Handle the loss or the establishment of the ZMQ connection."""
        if event == zmq.EVENT_DISCONNECTED:
            self._is_in_doubt = self._last is not None
        elif self._last is None:
            self._take_tail(await self._replay(0))  # batches that were published before
        elif self._is_in_doubt:
            await self._resolve_doubt()

    async def _hear(self, told: Told) -> None:
        """Process a batch that the publisher has just published."""
        if self._is_in_doubt:
            await self._resolve_doubt()
        last = self._last
        if last is None:
            await self._begin_with(told)
        elif told.seq == last.seq + 1:
            self._accept(told)
        elif told.seq <= last.seq:
            if told.batch.ts > last.batch.ts:  # otherwise the batch was replayed already
                await self._begin_anew(told)
        else:
            self.num_gaps += 1
            missed = await self._replay(last.seq + 1)
            if not self._take_from(last.seq + 1, missed):
                await self._begin_anew(told)
            elif self._last is not None and told.seq == self._last.seq + 1:
                self._accept(told)

    async def _resolve_doubt(self) -> None:
        """Check after a reconnection whether the publisher is still the same, and if not, forget all batches.

        The publisher is the same if it replays the last batch unchanged.
        """
        self._is_in_doubt = False
        assert self._last is not None
        again = await self._replay(self._last.seq)
        if again and again[0] == self._last:
            self._take_from(self._last.seq + 1, again[1:])
        else:
            self._forget()
            self._take_tail(await self._replay(0))

    async def _begin_anew(self, told: Told) -> None:
        self._forget()
        await self._begin_with(told)

    async def _begin_with(self, told: Told) -> None:
        """Process the batches before *told* that the publisher can replay without a gap, then *told* itself."""
        if told.seq:  # batches that were published while the subscription began were missed
            self._take_tail(await self._replay(0))
        if self._last is None or told.seq == self._last.seq + 1:
            self._accept(told)

    def _forget(self) -> None:
        self.num_losses += 1
        self.start_over()
        self._lose()

    def _take_from(self, seq: int, replayed: Sequence[Told]) -> bool:
        """Take the *replayed* batches from number *seq* on, if none is missing. Return whether they were taken."""
        if [each.seq for each in replayed] != list(range(seq, seq + len(replayed))):
            return False
        for told in replayed:
            self._accept(told)
        return bool(replayed)

    def _take_tail(self, replayed: Sequence[Told]) -> None:
        """Take only the batches after the last gap.

        A missing batch may have removed blocks that the batches before the gap report as stored.
        """
        start = len(replayed)
        while start and (start == len(replayed) or replayed[start - 1].seq + 1 == replayed[start].seq):
            start -= 1
        for told in replayed[start:]:
            self._accept(told)

    def _accept(self, told: Told) -> None:
        self._last = told
        self.num_batches += 1
        self._take(told.batch)

    async def _replay(self, start: int) -> list[Told]:
        """Return the batches from number *start* on that the publisher still has; empty if it does not answer."""
        if self._replay_endpoint is None:
            return []
        self.num_replays += 1
        told: list[Told] = []
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.IPV6, int("[" in self._replay_endpoint))
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")])
            while await socket.poll(int(1000 * self._replay_s)):
                seq, payload = (await socket.recv_multipart())[-2:]
                if int.from_bytes(seq, "big", signed=True) == _END:
                    return told
                told.append(_told(seq, payload))
        log.warning("KV events of %s: %s does not answer; missed events are lost", self._name, self._replay_endpoint)
        return []


def _told(seq: bytes, payload: bytes) -> Told:
    if len(seq) != _SEQ_BYTES:
        raise ValueError(f"the sequence number of a batch has {len(seq)} bytes instead of {_SEQ_BYTES}")
    return Told(int.from_bytes(seq, "big"), decode(payload))
