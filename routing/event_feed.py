"""EventFeed: the KV events of one replica, in their order, without a gap that nobody knows of."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvtier.routing.kv_event import Batch, Publisher, decode

log = logging.getLogger(__name__)

REPLAY_S = 10.0  # nothing else is heard meanwhile
AGAIN_S = 1.0  # after an error, before the feed begins anew
_END = -1
_SEQ_BYTES = 8  # big-endian, signed: the end of a replay is -1
_MAX_MESSAGE_BYTES = 16 << 20  # more than the blocks of the largest step; a longer message ends the connection
_HWM = 100_000  # batches that wait for the router, as many as a publisher keeps for a slow one


@dataclass(frozen=True, slots=True)
class Told:
    """A batch and its number."""

    seq: int
    batch: Batch


class EventFeed:
    """Listens to a publisher, asks it again for what was missed, and says when what it told cannot be relied on.

    That is so after a gap that cannot be replayed, and when another publisher answers at the endpoint: a replica that
    was restarted. *take* is then given what can be replayed since the last gap. Owned by the event loop; `run` runs
    until it is cancelled.
    """

    def __init__(
        self,
        publisher: Publisher,
        take: Callable[[Batch], None],
        lose: Callable[[], None],
        replay_s: float = REPLAY_S,
    ) -> None:
        """*take* gets each batch once, in order; *lose* is called when all that it got before is in doubt. A replay is
        given up when its next part has not come for *replay_s* seconds."""
        self._name = publisher.name
        self._endpoint, self._replay_endpoint = publisher.events, publisher.replay
        self._topic = publisher.topic.encode()
        self._take, self._lose, self._replay_s = take, lose, replay_s
        self._last: Told | None = None  # that was taken
        self._is_in_doubt = False  # the connection was lost: another publisher may answer now
        self.num_batches = self.num_gaps = self.num_replays = self.num_losses = 0

    @property
    def next_seq(self) -> int | None:
        """The number of the batch that comes next; None before the first."""
        return None if self._last is None else self._last.seq + 1

    def start_over(self) -> None:
        """What was told is forgotten: learn anew all that can be replayed, when the next batch comes."""
        self._last = None
        self._is_in_doubt = False

    async def run(self) -> None:
        """Listen until cancelled. Whatever a publisher sends, the router lives: listening begins anew."""
        while True:
            try:
                await self._listen()
            except Exception as error:
                log.warning("events of %s: %r; what it has is learnt anew", self._name, error)
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
        """Of the connection: it was lost, or is there, now or again."""
        if event == zmq.EVENT_DISCONNECTED:
            self._is_in_doubt = self._last is not None
        elif self._last is None:
            self._take_tail(await self._replay(0))  # what was told before
        elif self._is_in_doubt:
            await self._resolve_doubt()

    async def _hear(self, told: Told) -> None:
        """A batch as it is published."""
        if self._is_in_doubt:
            await self._resolve_doubt()
        last = self._last
        if last is None:
            await self._begin_with(told)
        elif told.seq == last.seq + 1:
            self._accept(told)
        elif told.seq <= last.seq:
            if told.batch.ts > last.batch.ts:  # else it was replayed already
                await self._begin_anew(told)
        else:
            self.num_gaps += 1
            missed = await self._replay(last.seq + 1)
            if not self._take_from(last.seq + 1, missed):
                await self._begin_anew(told)
            elif self._last is not None and told.seq == self._last.seq + 1:
                self._accept(told)

    async def _resolve_doubt(self) -> None:
        """Ask whether it is still the publisher that was listened to: then it has the last batch as it was."""
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
        """Take what was told before *told*, as far as it can be had without a gap, then *told*."""
        if told.seq:  # a subscription takes a moment: what came in it was not heard
            self._take_tail(await self._replay(0))
        if self._last is None or told.seq == self._last.seq + 1:
            self._accept(told)

    def _forget(self) -> None:
        self.num_losses += 1
        self.start_over()
        self._lose()

    def _take_from(self, seq: int, replayed: Sequence[Told]) -> bool:
        """Take what is *replayed* from number *seq* on, if nothing is missing; whether all is taken."""
        if [each.seq for each in replayed] != list(range(seq, seq + len(replayed))):
            return False
        for told in replayed:
            self._accept(told)
        return bool(replayed)

    def _take_tail(self, replayed: Sequence[Told]) -> None:
        """Take what follows the last gap: what was told before it may have been taken back in the gap."""
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
        """All batches from number *start* on that the publisher still has; none if it cannot be asked."""
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
        log.warning("events of %s: no answer at %s; a replay is given up", self._name, self._replay_endpoint)
        return []


def _told(seq: bytes, payload: bytes) -> Told:
    if len(seq) != _SEQ_BYTES:
        raise ValueError(f"a message's number has {len(seq)} bytes and not {_SEQ_BYTES}")
    return Told(int.from_bytes(seq, "big"), decode(payload))
