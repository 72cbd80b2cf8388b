"""A router as its users write one: it knows the description of vLLM's KV events and none of kvtier's code.

It does not know how blocks are named. It finds them as children: of this parent, with these tokens and extra keys.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import zmq

DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
LIVE_WAIT_MS = 50  # without news for so long, what may have been missed is asked for
WARMTH = {"GPU": 0, "CPU": 1, "STORAGE": 2}
GROUP = 0  # the router's models have one group of layers

Hash = int | bytes
ExtraKeys = tuple[object, ...] | None
Place = tuple[Hash | None, tuple[int, ...], ExtraKeys]  # parent, tokens, extra keys


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def decode(payload: bytes) -> EventBatch:
    """The batch in a message's payload."""
    return msgspec.msgpack.decode(payload, type=EventBatch)


class EventStream:
    """One publisher's messages in their order. What was missed is asked for; what cannot be had is counted."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: bytes = b"") -> None:
        self.next_seq = 0
        self.num_lost = 0
        self._context = zmq.Context.instance()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, topic)
        self._subscriber.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        for socket in (self._subscriber, self._replay):
            socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))

    def close(self) -> None:
        """Stop listening."""
        self._subscriber.close(linger=0)
        self._replay.close(linger=0)

    def read(self, next_seq: int) -> list[EventBatch]:
        """The batches before number *next_seq* that have not been read yet; TimeoutError if they do not come."""
        deadline = time.monotonic() + DEADLINE_S
        batches: list[EventBatch] = []
        while self.next_seq < next_seq:
            if time.monotonic() > deadline:
                raise TimeoutError(f"batch {self.next_seq} of {next_seq} did not come")
            if not self.hears_something():
                batches += [self._take(*message) for message in self.replay(self.next_seq)]
                continue
            seq, payload = self.receive()
            if seq > self.next_seq:
                missed = self.replay(self.next_seq)
                batches += [self._take(*message) for message in missed if message[0] < seq]
            if seq >= self.next_seq:
                batches.append(self._take(seq, payload))
        return batches

    def hears_something(self) -> bool:
        """Whether a message has come, or comes soon."""
        return bool(self._subscriber.poll(LIVE_WAIT_MS))

    def receive(self) -> tuple[int, bytes]:
        """Number and payload of the next message that is heard; zmq.Again if none is."""
        _, seq, payload = self.frames()
        return int.from_bytes(seq, "big"), payload

    def frames(self) -> list[bytes]:
        """The next message that is heard, as it came: topic, number, payload; zmq.Again if none is."""
        return self._subscriber.recv_multipart()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Number and payload of each message from *start* on that the publisher still has; zmq.Again without an end."""
        self.ask_again(start)
        messages: list[tuple[int, bytes]] = []
        while (message := self.told_again()) is not None:
            messages.append(message)
        return messages

    def ask_again(self, start: int) -> None:
        """Ask for each message from *start* on, and read nothing yet."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])

    def told_again(self) -> tuple[int, bytes] | None:
        """The next of the answer: number and payload; None at its end."""
        _, _, seq, payload = self._replay.recv_multipart()
        return None if seq == b"\xff" * 8 else (int.from_bytes(seq, "big"), payload)

    def _take(self, seq: int, payload: bytes) -> EventBatch:
        self.num_lost += seq - self.next_seq
        self.next_seq = seq + 1
        return decode(payload)


class Router:
    """Sends a prompt to the replica that has the longest prefix of it; of equally long ones to the warmest."""

    def __init__(self) -> None:
        self._children: dict[Place, Hash] = {}  # one tree for all: equal hashes are equal prefixes
        self._media: dict[str, dict[Hash, set[str]]] = defaultdict(lambda: defaultdict(set))  # [replica][hash]
        self._block_size = 0  # until an event tells

    def learn(self, replica: str, batch: EventBatch) -> None:
        """Take in what a replica tells."""
        for event in batch.events:
            match event:
                case BlockStored(group_idx=group) if group == GROUP:
                    self._place(event)
                    for block in event.block_hashes:
                        self._media[replica][block].add(event.medium)
                case BlockRemoved(group_idx=group) if group == GROUP:
                    for block in event.block_hashes:
                        self._media[replica][block].remove(event.medium)
                case AllBlocksCleared():
                    self.forget(replica)

    def forget(self, replica: str) -> None:
        """A replica has lost everything, or started anew."""
        self._media[replica].clear()

    def prefix(self, replica: str, token_ids: Sequence[int], salt: str | None = None) -> list[str]:
        """For each block of the prompt that the replica has, up to the first that it has not: its warmest medium."""
        media: list[str] = []
        parent: Hash | None = None
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size) if size else ():
            extra = (salt,) if salt is not None and start == 0 else None
            block = self._children.get((parent, tuple(token_ids[start : start + size]), extra))
            if block is None or not self._media[replica][block]:
                break
            media.append(min(self._media[replica][block], key=WARMTH.__getitem__))
            parent = block
        return media

    def pick(self, token_ids: Sequence[int], salt: str | None = None) -> str | None:
        """The replica to send the prompt to; None if nobody has anything of it."""
        prefixes = {replica: self.prefix(replica, token_ids, salt) for replica in self._media}
        best = max(prefixes, key=lambda replica: _score(prefixes[replica]), default=None)
        return best if best is not None and prefixes[best] else None

    def _place(self, stored: BlockStored) -> None:
        """Remember where in the tree the blocks are, if the event tells: it does so once, when they are computed."""
        if not stored.token_ids:
            return
        assert len(stored.token_ids) == len(stored.block_hashes) * stored.block_size
        self._block_size = stored.block_size
        parent = stored.parent_block_hash
        for i, block in enumerate(stored.block_hashes):
            tokens = tuple(stored.token_ids[i * stored.block_size : (i + 1) * stored.block_size])
            keys = stored.extra_keys[i] if stored.extra_keys else None
            self._children[parent, tokens, None if keys is None else tuple(keys)] = block
            parent = block


def _score(media: Sequence[str]) -> tuple[int, int]:
    return len(media), -sum(WARMTH[medium] for medium in media)
