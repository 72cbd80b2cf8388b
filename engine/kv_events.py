"""Encoder and ZMQ publisher of KV events in vLLM's wire format, for routers."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from kvtier.engine.config import EventsConfig
from kvtier.extras import extra
from kvtier.tiers.naming.block_hash import BlockName, ExtraKey
from kvtier.tiers.naming.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvtier.tiers.naming.tier import Tier

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
RANK = 0  # data parallel rank; there is only one engine
SEQ_BYTES = 8  # big-endian
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
BOUND = ("*", "::", "ipc://", "inproc://")  # an endpoint with one of these is bound, any other one is connected to
REPLAY_EVERY_S = 0.05  # how often an idle publisher polls for replay requests
# Limit per batch, because encoding blocks every other thread: 8 million names on disk are 8,000 events.
MAX_EVENTS = 64
CLOSE_TIMEOUT_S = 2.0
LINGER_S = 1.0  # how long closed sockets wait for subscribers to receive messages

Hash = int | bytes


# The wire format: field names, order and tags are vLLM's, and fields with their default value are omitted.


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class _Stored(_Event, frozen=True, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None  # deprecated, and always None here
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    # Always omitted. They make 16 fields, so that msgspec encodes the map header as it does for vLLM's struct.
    locality: None = None
    ownership: None = None
    session_id: None = None
    lookahead_token_ids: None = None


class _Removed(_Event, frozen=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str
    group_idx: int | None = None


class _Cleared(_Event, frozen=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # seconds since the epoch
    events: list[_Event]
    data_parallel_rank: int


class EventEncoder:
    """An encoder of KV events as vLLM's `KVEventBatch` in msgpack.

    *groups* are the model's attention groups, in the order of the group ids in events.
    """

    def __init__(self, groups: Sequence[AttentionGroup], int_block_hashes: bool = True) -> None:
        self._groups = groups
        self._int_block_hashes = int_block_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, timestamp: float, events: Sequence[Event]) -> bytes:
        """Encode a batch of events as the payload of one message. *timestamp* is in seconds since the epoch."""
        return self._encoder.encode(_Batch(timestamp, [self._event(event) for event in events], RANK))

    def _event(self, event: Event) -> _Event:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return _Removed(self._hashes(event.names), MEDIUM[event.tier], event.group_id)
            case AllBlocksCleared():
                return _Cleared()

    def _stored(self, event: BlockStored) -> _Stored:
        group = self._groups[event.group_id]
        lora = event.extra.lora
        return _Stored(
            block_hashes=self._hashes(event.names),
            parent_block_hash=None if event.parent is None else self._hash(event.parent),
            token_ids=[int(token_id) for token_id in event.token_ids],
            block_size=event.block_size,
            lora_id=None,
            medium=MEDIUM[event.tier],
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(event) if len(event.token_ids) else None,
            group_idx=event.group_id,
            kv_cache_spec_kind=_kind(group),
            kv_cache_spec_sliding_window=group.window_tokens if isinstance(group, SlidingWindow) else None,
        )

    def _hashes(self, names: Sequence[BlockName]) -> list[Hash]:
        return [self._hash(name) for name in names]

    def _hash(self, name: BlockName) -> Hash:
        """Return the block's name or, if integer hashes are configured, the low 64 bits of the name."""
        return int.from_bytes(name[-8:], "big") if self._int_block_hashes else name


def _kind(group: AttentionGroup) -> str:
    match group:
        case FullAttention():
            return "full_attention"
        case SlidingWindow():
            return "sliding_window"
        case ChunkedLocal():
            return "chunked_local_attention"
        case RecurrentState():
            return "mamba"
        case _:
            return "unknown"


def _extra_keys(event: BlockStored) -> list[tuple[object, ...] | None]:
    """Return the extra keys of each block as vLLM sends them; None for a block without extra keys.

    vLLM sends only the value of a key, without its kind, and only the name of a LoRA.
    """
    starts = (event.first_token + i * event.block_size for i in range(len(event.names)))
    keys_of_blocks = (event.extra.keys_of_block(start, start + event.block_size) for start in starts)
    return [None if keys is None else tuple(map(_untagged, keys)) for keys in keys_of_blocks]


def _untagged(key: ExtraKey) -> object:
    match key:
        case "mm", str(identifier), offset:
            return identifier, offset
        case _:
            return key[1]


@dataclass(frozen=True, slots=True)
class _Queued:
    seq: int
    timestamp: float
    events: list[Event]


@dataclass(frozen=True, slots=True)
class _Sockets:
    """The publisher's open sockets and the stack that closes them."""

    publishing: "zmq.Socket[bytes]"
    replay: "zmq.Socket[bytes] | None"
    ends: ExitStack

    @classmethod
    def open(cls, config: EventsConfig) -> Self:
        """Open the configured sockets.

        Raises:
            MissingExtra: If pyzmq is not installed.
            OSError: If an endpoint cannot be used.
        """
        with extra("events", "events", "or remove [events]"):
            import zmq

        with ExitStack() as undo:
            context: zmq.Context[zmq.Socket[bytes]]
            if config.endpoint.startswith("inproc://"):
                context = zmq.Context.instance()  # the process-wide context, which inproc subscribers share
            else:
                context = zmq.Context()
                undo.callback(context.term)  # waits at most LINGER_S until everything is sent
            publishing = _open(undo, context, zmq.PUB, config, config.endpoint, config.hwm)
            replay = None
            if config.replay_endpoint is not None:
                # Room for two replays. A subscriber that has read one replay can request the next one, although ZMQ
                # notices reads only once half the queue is free. A subscriber that requests more replays without
                # reading them loses messages.
                room = 2 * (config.buffer_steps + 1)
                replay = _open(undo, context, zmq.ROUTER, config, config.replay_endpoint, room)
            return cls(publishing, replay, undo.pop_all())


class ZmqPublisher:
    """A publisher that sends batches of KV events to all subscribers, and sends recent batches again on request.

    Batches are numbered from 0. If the queue is full, a batch is dropped and its number is missing, so subscribers
    notice the loss. The engine's thread calls `publish`, which never blocks. A separate thread sends the batches.

    A message is (topic, number, payload), with the number as 8 bytes big-endian. To request earlier batches, a
    subscriber sends (b"", number) to the replay socket. It gets (b"", topic, number, payload) for each buffered batch
    from this number on. The last reply is (b"", b"", -1, b"").

    Raises:
        MissingExtra: If pyzmq is not installed.
        OSError: If an endpoint cannot be used.
    """

    def __init__(self, config: EventsConfig, groups: Sequence[AttentionGroup]) -> None:
        self.next_seq = 0
        self._encoder = EventEncoder(groups, config.int_block_hashes)
        self._topic = config.topic.encode()
        self._queue: queue.Queue[_Queued] = queue.Queue(config.hwm)
        self._num_refused = self._num_failed = 0  # counted by the engine's thread and by the publisher's, respectively
        self._give_up_at: float | None = None  # set by `close`
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # number and payload
        self._sockets = _Sockets.open(config)
        self.endpoint = _address(self._sockets.publishing)
        self.replay_endpoint = None if self._sockets.replay is None else _address(self._sockets.replay)
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()
        log.info("publishing KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    @property
    def num_dropped(self) -> int:
        """Number of batches that were dropped."""
        return self._num_refused + self._num_failed

    def publish(self, events: list[Event]) -> None:
        """Queue the events in batches of at most `MAX_EVENTS`. The publisher takes ownership of the list."""
        for start in range(0, max(1, len(events)), MAX_EVENTS):
            self._publish_batch(events[start : start + MAX_EVENTS])

    def _publish_batch(self, events: list[Event]) -> None:
        seq = self.next_seq
        self.next_seq += 1
        if not self._thread.is_alive():
            self._num_refused += 1
            return
        try:
            self._queue.put_nowait(_Queued(seq, time.time(), events))
        except queue.Full:
            self._num_refused += 1
            if self._num_refused == 1:
                log.warning("events: %d batches wait; batch %d is dropped; raise events.hwm", self._queue.maxsize, seq)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the queued batches for at most *timeout_s*, then end the thread. May be called repeatedly."""
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + timeout_s
        self._thread.join(timeout_s + 2 * LINGER_S)
        if self._thread.is_alive():
            log.warning("events: the publisher hangs; closing without it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Send batches and answer replay requests until closed. Runs in the publisher's thread."""
        try:
            replay = self._sockets.replay
            with self._sockets.ends:
                while not self._is_over():
                    with suppress(queue.Empty):
                        self._send(self._queue.get(timeout=REPLAY_EVERY_S))
                    # One replay after each batch, so that a subscriber that keeps asking hardly delays new batches.
                    if replay is not None and replay.poll(0):
                        self._answer(replay, replay.recv_multipart())
        except Exception:
            log.exception("events: the publisher failed and has stopped")
        finally:
            self._num_failed += self._queue.qsize()

    def _is_over(self) -> bool:
        if self._give_up_at is None:
            return False
        return self._queue.empty() or time.monotonic() >= self._give_up_at

    def _send(self, batch: _Queued) -> None:
        try:
            payload = self._encoder.encode(batch.timestamp, batch.events)
        except Exception:  # a batch that cannot be encoded must not end the publisher
            self._num_failed += 1
            log.exception("events: batch %d is dropped", batch.seq)
            return
        seq = batch.seq.to_bytes(SEQ_BYTES, "big")
        if self._sockets.replay is not None:
            self._buffer.append((seq, payload))
        self._sockets.publishing.send_multipart([self._topic, seq, payload])

    def _answer(self, replay: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != SEQ_BYTES:
            log.warning(
                "events: ignored a replay request of %d frames; send an empty frame, then a batch's number as 8 bytes",
                len(request) - 1,
            )
            return
        client, _, start = request
        for seq, payload in self._buffer:
            if seq >= start:  # big-endian numbers sort in the order of their bytes
                replay.send_multipart([client, b"", self._topic, seq, payload])
        replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


def _open(
    undo: ExitStack, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, config: EventsConfig, endpoint: str, hwm: int
) -> "zmq.Socket[bytes]":
    """Open a socket of this *kind* at *endpoint*, and make *undo* close it.

    A ROUTER socket always binds. Other sockets bind to the endpoints in `BOUND` and connect to all others.
    """
    import zmq

    address = endpoint.replace("://*:", f"://{config.host}:")
    socket = context.socket(kind)
    undo.callback(socket.close)
    socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.IPV6, int("::" in address))
    try:
        if kind == zmq.ROUTER or any(mark in endpoint for mark in BOUND):
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        raise OSError(f"events: cannot serve on {address} ({error.strerror}); choose another endpoint") from error
    return socket


def _address(socket: "zmq.Socket[bytes]") -> str:
    """Return the socket's address, including the port that it was given."""
    import zmq

    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
