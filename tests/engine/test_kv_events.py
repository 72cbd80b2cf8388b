"""KV events: the bytes that routers get, subscribers that are late or slow, and a router that routes by events."""

import contextlib
import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import kv_router
import msgspec
import numpy as np
import pytest
import zmq
from kv_router import EventBatch, EventStream, Router
from small_models import VOCAB, build, byte_tokenizer
from transformers import PreTrainedModel
from vllm_core import vllm_version

from kvtier import LLM, SamplingParams
from kvtier.engine.config import EventsConfig
from kvtier.engine.kv_events import MAX_EVENTS, EventEncoder, ZmqPublisher
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys, Lora, MultimodalItem
from kvtier.tiers.naming.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
GROUPS = [FullAttention(BLOCK_SIZE)]


def name_of(number: int) -> BlockName:
    return BlockName(hashlib.sha256(str(number).encode()).digest())


def low64(name: BlockName) -> int:
    return int.from_bytes(name, "big") & (2**64 - 1)


def chain_of(token_ids: Sequence[int]) -> list[BlockName]:
    """The chain of a prompt, with the default configuration's names."""
    chain = BlockChain(BLOCK_SIZE)
    chain.extend(token_ids)
    return chain.names


def raw(*events: Event, groups: Sequence[AttentionGroup] = GROUPS, ints: bool = True) -> list[dict[str, object]]:
    """The events of a batch, decoded by plain msgpack."""
    timestamp, decoded, rank = msgspec.msgpack.decode(EventEncoder(groups, ints).encode(1.5, events))
    assert (timestamp, rank) == (1.5, 0)
    return decoded


def typed(*events: Event) -> list[kv_router.Event]:
    return kv_router.decode(EventEncoder(GROUPS).encode(1.5, events)).events


# The format


def test_a_batch_is_the_one_in_the_description_of_the_format() -> None:
    names = [name_of(1), name_of(2)]
    stored = BlockStored(Tier.DEVICE, 0, names, BLOCK_SIZE, token_ids=range(32))

    batch = msgspec.msgpack.decode(EventEncoder(GROUPS).encode(1.5, [stored]))

    expected = {
        "type": "BlockStored",
        "block_hashes": [low64(name) for name in names],
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert batch == [1.5, [expected], 0]
    assert list(batch[1][0]) == list(expected)


def test_a_batch_is_these_bytes() -> None:
    removed = BlockRemoved(Tier.DISK, 0, [BlockName(bytes(24) + b"\xff" * 7 + b"\xfe")])

    payload = EventEncoder(GROUPS).encode(1.5, [removed, AllBlocksCleared()])

    assert payload == (
        b"\x93\xcb\x3f\xf8\0\0\0\0\0\0"  # [1.5,
        b"\x92\x84\xa4type\xacBlockRemoved"  # [{"type": "BlockRemoved",
        b"\xacblock_hashes\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xfe"  # "block_hashes": [2**64 - 2],
        b"\xa6medium\xa7STORAGE\xa9group_idx\0"  # "medium": "STORAGE", "group_idx": 0},
        b"\x81\xa4type\xb0AllBlocksCleared\0"  # {"type": "AllBlocksCleared"}], 0]
    )


def test_a_stored_block_has_the_wide_header_of_vllms_struct() -> None:
    payload = EventEncoder(GROUPS).encode(1.5, [BlockStored(Tier.HOST, 0, chain_of(range(16)), BLOCK_SIZE)])

    assert payload.startswith(b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\xde\x00\x0a\xa4type\xabBlockStored\xacblock_hashes")


def test_the_real_vllm_reads_a_batch_and_writes_the_same_bytes() -> None:
    if vllm_version() is None:
        pytest.skip("vLLM's wheel is not importable")
    from vllm.distributed.kv_events import KVEventBatch

    token_ids = list(range(40))
    chain = BlockChain(BLOCK_SIZE, ExtraKeys(lora=Lora("adapter", "/path"), cache_salt="salt"))
    chain.extend(token_ids)
    events = [
        BlockStored(Tier.DEVICE, 0, chain.names, BLOCK_SIZE, None, token_ids[:32], 0, chain.extra),
        BlockStored(Tier.DEVICE, 0, chain.names[1:], BLOCK_SIZE, chain.names[0], token_ids[16:32], 16, chain.extra),
        BlockStored(Tier.HOST, 0, chain.names, BLOCK_SIZE),
        BlockRemoved(Tier.DISK, 0, chain.names[:1]),
        AllBlocksCleared(),
    ]
    payload = EventEncoder(GROUPS).encode(1.5, events)

    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)

    assert [event.medium for event in batch.events[:4]] == ["GPU", "GPU", "CPU", "STORAGE"]
    assert batch.events[1].parent_block_hash == batch.events[0].block_hashes[0]
    assert msgspec.msgpack.encode(batch) == payload


def test_stored_removed_and_stored_again_come_as_they_happened() -> None:
    """The events of a prompt of 40 tokens, of 8 more, and of three cached blocks whose slots another prompt takes."""
    token_ids = list(range(100, 148))
    names = chain_of(token_ids)
    other = chain_of(range(500, 548))

    first, more, *removed, again = typed(
        BlockStored(Tier.DEVICE, 0, names[:2], BLOCK_SIZE, None, token_ids[:32]),
        BlockStored(Tier.DEVICE, 0, names[2:], BLOCK_SIZE, names[1], token_ids[32:], 32),
        *(BlockRemoved(Tier.DEVICE, 0, [name]) for name in reversed(names)),
        BlockStored(Tier.DEVICE, 0, other, BLOCK_SIZE, None, range(500, 548)),
    )

    assert first == kv_router.BlockStored(
        [low64(name) for name in names[:2]],
        None,
        token_ids[:32],
        BLOCK_SIZE,
        None,
        "GPU",
        None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert (more.block_hashes, more.parent_block_hash, more.token_ids) == (
        [low64(names[2])],
        low64(names[1]),
        token_ids[32:],
    )
    assert removed == [kv_router.BlockRemoved([low64(name)], "GPU", 0) for name in reversed(names)]
    assert (again.block_hashes, len(again.token_ids)) == ([low64(name) for name in other], 48)


def test_a_removed_block_has_these_keys_and_no_others() -> None:
    (removed,) = raw(BlockRemoved(Tier.DEVICE, 0, [name_of(1), name_of(2)]))

    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [low64(name_of(1)), low64(name_of(2))],
        "medium": "GPU",
        "group_idx": 0,
    }


def test_cleared_is_nothing_but_its_type() -> None:
    assert raw(AllBlocksCleared()) == [{"type": "AllBlocksCleared"}]


def test_a_parent_that_is_not_in_the_cache_is_still_named() -> None:
    """A window may have released the parent, or never held it: it is the prompt's, not a slot's."""
    names = chain_of(range(64))

    (stored,) = typed(BlockStored(Tier.DEVICE, 0, names[3:], BLOCK_SIZE, names[2], range(48, 64), 48))

    assert stored.parent_block_hash == low64(names[2])


@pytest.mark.parametrize(("tier", "medium"), [(Tier.HOST, "CPU"), (Tier.DISK, "STORAGE")])
def test_copies_in_lower_tiers_come_without_tokens(tier: Tier, medium: str) -> None:
    (stored,) = raw(BlockStored(tier, 0, [name_of(1), name_of(7)], BLOCK_SIZE))

    assert stored == {
        "type": "BlockStored",
        "block_hashes": [low64(name_of(1)), low64(name_of(7))],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_hashes_are_whole_names_if_so_configured() -> None:
    first, second = name_of(1), name_of(2)

    stored, removed = raw(
        BlockStored(Tier.DEVICE, 0, [second], BLOCK_SIZE, first, range(16), 16),
        BlockRemoved(Tier.DEVICE, 0, [second]),
        ints=False,
    )

    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([second], first)
    assert removed["block_hashes"] == [second]


@pytest.mark.parametrize(
    ("group", "kind", "window"),
    [
        (FullAttention(16), "full_attention", None),
        (SlidingWindow(16, 40), "sliding_window", 40),
        (ChunkedLocal(16, 48), "chunked_local_attention", None),
        (RecurrentState(16), "mamba", None),
    ],
)
def test_a_group_says_what_kind_of_attention_it_is(group: AttentionGroup, kind: str, window: int | None) -> None:
    stored, removed = raw(
        BlockStored(Tier.DEVICE, 1, [name_of(1)], BLOCK_SIZE, None, range(16)),
        BlockRemoved(Tier.DEVICE, 1, [name_of(1)]),
        groups=[FullAttention(16), group],
    )

    assert (stored["group_idx"], stored["kv_cache_spec_kind"]) == (1, kind)
    assert stored.get("kv_cache_spec_sliding_window") == window
    assert ("kv_cache_spec_sliding_window" in stored) is (window is not None)
    assert removed["group_idx"] == 1


def test_extra_keys_are_those_of_the_names_without_tags() -> None:
    embeddings = np.arange(40, dtype=np.float32).reshape(20, 2)
    extra = ExtraKeys(
        lora=Lora("ad", "/p"),
        multimodal=(MultimodalItem("aaa", 11, 10), MultimodalItem("bbb", 30, 18)),
        cache_salt="salt",
        prompt_embeddings=embeddings,
    )
    names = chain_of(range(64))

    whole, rest = raw(
        BlockStored(Tier.DEVICE, 0, names, BLOCK_SIZE, None, range(64), 0, extra),
        BlockStored(Tier.DEVICE, 0, names[2:], BLOCK_SIZE, names[1], range(32, 64), 32, extra),
    )

    digests = [hashlib.sha256(embeddings[start : start + 16].tobytes()).digest() for start in (0, 16)]
    assert whole["extra_keys"] == [
        ["ad", ["aaa", 11], "salt", digests[0]],
        ["ad", ["aaa", -5], ["bbb", 14], digests[1]],
        ["ad", ["bbb", -2]],
        ["ad"],
    ]
    assert rest["extra_keys"] == whole["extra_keys"][2:]
    assert (whole["lora_name"], whole["lora_id"]) == ("ad", None)


def test_a_salt_is_told_with_the_first_block_only() -> None:
    names = chain_of(range(32))

    (stored,) = raw(BlockStored(Tier.DEVICE, 0, names, BLOCK_SIZE, None, range(32), 0, ExtraKeys(cache_salt="ann")))

    assert stored["extra_keys"] == [["ann"], None]


def test_token_ids_may_be_an_array_and_a_salt_any_text() -> None:
    token_ids = np.arange(16, dtype=np.int64)
    extra = ExtraKeys(cache_salt="nul \0 and 😀")

    (stored,) = raw(BlockStored(Tier.DEVICE, 0, [name_of(1)], BLOCK_SIZE, None, token_ids, 0, extra))

    assert stored["token_ids"] == list(range(16))
    assert stored["extra_keys"] == [["nul \0 and 😀"]]


# The stream


Publish = Callable[..., ZmqPublisher]
Listen = Callable[..., EventStream]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Opens publishers, on the loopback if nothing else is said, and closes them."""
    with contextlib.ExitStack() as opened:
        loopback = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        yield lambda **settings: opened.enter_context(ZmqPublisher(EventsConfig(**{**loopback, **settings}), GROUPS))


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Opens streams, and closes them."""
    with contextlib.ExitStack() as opened:

        def open_stream(publisher: ZmqPublisher, topic: bytes = b"") -> EventStream:
            stream = EventStream(publisher.endpoint, publisher.replay_endpoint, topic)
            opened.callback(stream.close)
            return stream

        yield open_stream


def removal(number: int) -> list[Event]:
    return [BlockRemoved(Tier.DEVICE, 0, [name_of(number)])]


def publish_numbers(publisher: ZmqPublisher, numbers: Sequence[int]) -> None:
    for number in numbers:
        publisher.publish(removal(number))


def publish_and_wait(publisher: ZmqPublisher, numbers: Sequence[int], listen: Listen) -> None:
    """Publish, and wait until all of it can be replayed."""
    publish_numbers(publisher, numbers)
    listen(publisher).read(publisher.next_seq)


def numbers_of(batches: Sequence[EventBatch]) -> list[int]:
    """The numbers of the removals."""
    known = {low64(name_of(number)): number for number in range(2000)}
    return [known[batch.events[0].block_hashes[0]] for batch in batches]


def wait_until_heard(publisher: ZmqPublisher, stream: EventStream) -> None:
    """A subscription takes a moment to arrive; what is published before that is not heard."""
    deadline = time.monotonic() + DEADLINE_S
    while not stream.hears_something():
        assert time.monotonic() < deadline, "the subscription did not arrive"
        publisher.publish([])


def test_many_events_are_several_batches(publish: Publish, listen: Listen) -> None:
    publisher = publish()

    publisher.publish([event for number in range(2 * MAX_EVENTS + 5) for event in removal(number)])
    batches = listen(publisher).read(publisher.next_seq)

    assert [len(batch.events) for batch in batches] == [MAX_EVENTS, MAX_EVENTS, 5]
    told = [event.block_hashes[0] for batch in batches for event in batch.events]
    assert told == [low64(name_of(number)) for number in range(2 * MAX_EVENTS + 5)]


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_batches_are_numbered_from_0_and_replayed_as_they_were_sent(
    transport: str, publish: Publish, listen: Listen, tmp_path: Path
) -> None:
    endpoints = {
        "tcp": ("tcp://*:0", "tcp://127.0.0.1:*"),
        "ipc": (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"),
        "inproc": ("inproc://events", "inproc://replay"),
    }
    publisher = publish(endpoint=endpoints[transport][0], replay_endpoint=endpoints[transport][1], topic="kv")
    stream = listen(publisher, b"k")
    wait_until_heard(publisher, stream)
    start = publisher.next_seq
    stream.read(start)

    publish_numbers(publisher, range(start, start + 5))
    live = [stream.frames() for _ in range(5)]

    assert [frames[0] for frames in live] == [b"kv"] * 5
    assert [frames[1] for frames in live] == [seq.to_bytes(8, "big") for seq in range(start, start + 5)]
    assert numbers_of([kv_router.decode(frames[2]) for frames in live]) == list(range(start, start + 5))
    replayed = stream.replay(0)
    assert [seq for seq, _ in replayed] == list(range(start + 5))
    assert [payload for _, payload in replayed[start:]] == [frames[2] for frames in live]


def test_a_replay_is_these_frames(publish: Publish, listen: Listen) -> None:
    publisher = publish(topic="kv")
    publish_and_wait(publisher, range(4), listen)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        client.connect(publisher.replay_endpoint)
        client.send_multipart([b"", (2).to_bytes(8, "big")])

        answers = [client.recv_multipart() for _ in range(3)]

    assert [frames[:3] for frames in answers] == [
        [b"", b"kv", bytes(7) + b"\x02"],
        [b"", b"kv", bytes(7) + b"\x03"],
        [b"", b"", b"\xff" * 8],
    ]
    assert numbers_of([kv_router.decode(frames[3]) for frames in answers[:2]]) == [2, 3]
    assert answers[2][3:] == [b""]


def test_a_request_socket_gets_the_first_batch_it_asks_for(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    publish_and_wait(publisher, range(3), listen)
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.linger = 0
        client.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        client.connect(publisher.replay_endpoint)
        client.send((1).to_bytes(8, "big"))

        topic, seq, payload = client.recv_multipart()

    assert (topic, seq, numbers_of([kv_router.decode(payload)])) == (b"", bytes(7) + b"\x01", [1])


def test_the_timestamp_is_when_the_batch_was_published(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    before = time.time()
    publisher.publish(removal(1))
    after = time.time()

    (batch,) = listen(publisher).read(1)

    assert before <= batch.ts <= after
    assert batch.data_parallel_rank == 0


def test_nothing_is_replayed_from_the_end_on(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    publish_numbers(publisher, range(3))
    stream = listen(publisher)
    stream.read(3)

    assert stream.replay(3) == []
    assert stream.replay(2**64 - 2) == []
    assert stream.replay(2**32) == []


def test_only_the_newest_batches_are_kept_for_replay(publish: Publish, listen: Listen) -> None:
    publisher = publish(buffer_steps=3)
    stream = listen(publisher)
    wait_until_heard(publisher, stream)

    publish_numbers(publisher, range(10))
    stream.read(publisher.next_seq)

    for _ in range(10):  # each time all of them, however little room there is
        assert [seq for seq, _ in stream.replay(0)] == [publisher.next_seq - 3 + i for i in range(3)]


def test_a_late_subscriber_gets_what_it_missed_and_then_what_comes(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    publish_numbers(publisher, range(50))
    stream = listen(publisher)
    publish_numbers(publisher, range(50, 60))

    past = stream.read(60)
    publish_numbers(publisher, range(60, 70))
    present = stream.read(70)

    assert numbers_of([*past, *present]) == list(range(70))
    assert stream.num_lost == 0


def test_a_whole_buffer_is_replayed_to_a_subscriber_that_reads_slowly(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    publish_and_wait(publisher, range(5000), listen)
    stream = listen(publisher)
    stream.ask_again(0)
    listen(publisher).read(5000)  # another subscriber is served meanwhile

    told = [stream.told_again() for _ in range(5001)]

    assert [message and message[0] for message in told] == [*range(5000), None]


class Gate(Sequence[int]):
    """Token ids that hold up their reader, the publisher's thread, when it encodes them."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __len__(self) -> int:
        return BLOCK_SIZE

    def __getitem__(self, index: int) -> int:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        return [0] * BLOCK_SIZE[index]

    def __iter__(self) -> Iterator[int]:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        return iter([0] * BLOCK_SIZE)


def stop_at(publisher: ZmqPublisher, gate: Gate) -> None:
    publisher.publish([BlockStored(Tier.DEVICE, 0, [name_of(0)], BLOCK_SIZE, None, gate)])
    assert gate.reached.wait(DEADLINE_S)


def test_what_finds_the_queue_full_is_dropped_counted_and_a_gap_in_the_numbers(
    publish: Publish, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish(hwm=4)
    stream = listen(publisher)
    gate = Gate()
    stop_at(publisher, gate)  # number 0

    publish_numbers(publisher, range(1, 8))  # 1 to 4 have a place, 5 to 7 have none; none waits for the gate
    gate.opened.set()
    stream.read(5)
    publish_numbers(publisher, [8])
    batches = stream.read(9)

    assert (publisher.num_dropped, publisher.next_seq) == (3, 9)
    assert [seq for seq, _ in stream.replay(0)] == [0, 1, 2, 3, 4, 8]
    assert (numbers_of(batches), stream.num_lost) == ([8], 3)
    assert [record.message for record in caplog.records] == [
        "events: 4 batches wait; batch 5 is dropped; raise events.hwm"
    ]


def test_a_batch_that_cannot_be_encoded_is_a_gap_and_not_the_end(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    stream = listen(publisher)
    publisher.publish(removal(0))
    publisher.publish([BlockStored(Tier.DEVICE, 0, [name_of(0)], BLOCK_SIZE, None, [2**70] * 16)])
    publisher.publish(removal(2))

    batches = stream.read(3)

    assert (numbers_of(batches), stream.num_lost, publisher.num_dropped) == ([0, 2], 1, 1)


@pytest.mark.parametrize(
    "request_frames",
    [[b""], [bytes(8)], [b"", b""], [b"", b"1234"], [b"", bytes(9)], [b"x", bytes(8)], [b"", bytes(8), b"more"]],
)
def test_a_replay_asked_for_wrongly_is_not_answered_and_harms_no_subscriber(
    publish: Publish, listen: Listen, request_frames: list[bytes]
) -> None:
    publisher = publish()
    publish_and_wait(publisher, range(2), listen)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        client.connect(publisher.replay_endpoint)
        client.send_multipart(request_frames)
        client.send_multipart([b"", bytes(7) + b"\x01"])

        seqs = [client.recv_multipart()[2] for _ in range(2)]

    assert seqs == [bytes(7) + b"\x01", b"\xff" * 8]


def test_without_a_replay_endpoint_batches_are_only_sent(publish: Publish) -> None:
    publisher = publish(replay_endpoint=None)

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(publisher.endpoint)
        deadline = time.monotonic() + DEADLINE_S
        while not subscriber.poll(20) and time.monotonic() < deadline:
            publisher.publish(removal(1))
        _, _, payload = subscriber.recv_multipart()

    assert numbers_of([kv_router.decode(payload)]) == [1]
    assert publisher.replay_endpoint is None


def test_a_publisher_connects_to_a_subscriber_that_is_bound(publish: Publish) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        publisher = publish(endpoint=f"tcp://127.0.0.1:{port}")
        deadline = time.monotonic() + DEADLINE_S
        while not subscriber.poll(20) and time.monotonic() < deadline:
            publisher.publish(removal(1))

        _, _, payload = subscriber.recv_multipart()

    assert numbers_of([kv_router.decode(payload)]) == [1]


def test_an_endpoint_is_on_the_loopback_unless_the_configuration_says_more(publish: Publish) -> None:
    publisher, elsewhere = publish(), publish(host="127.0.0.2")

    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    assert publisher.replay_endpoint.startswith("tcp://127.0.0.1:")
    assert not publisher.endpoint.endswith((":0", ":*"))
    assert elsewhere.endpoint.startswith("tcp://127.0.0.2:")


def test_closing_sends_what_is_queued_first(publish: Publish, listen: Listen) -> None:
    publisher = publish()
    stream = listen(publisher)
    wait_until_heard(publisher, stream)
    start = publisher.next_seq
    stream.read(start)

    publish_numbers(publisher, range(500))
    publisher.close()
    publisher.close()

    assert [stream.receive()[0] for _ in range(500)] == list(range(start, start + 500))
    assert not any(thread.name == "kvtier-events" for thread in threading.enumerate())


def test_closing_gives_up_after_its_time_limit(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.engine.kv_events.LINGER_S", 0.1)
    publisher = publish()
    gate = Gate()
    stop_at(publisher, gate)
    publish_numbers(publisher, range(100))

    publisher.close(timeout_s=0.1)  # does not wait for the gate
    gate.opened.set()

    assert [record.message for record in caplog.records] == ["events: the publisher hangs; closing without it"]


def test_a_taken_endpoint_is_one_clear_error(publish: Publish) -> None:
    taken = publish()
    port = taken.endpoint.rpartition(":")[2]

    with pytest.raises(OSError, match=f"tcp://127.0.0.1:{port}") as no:
        publish(endpoint=f"tcp://*:{port}")
    with pytest.raises(OSError, match="choose another") as no_replay:
        publish(replay_endpoint=taken.replay_endpoint)

    assert "\n" not in f"{no.value}{no_replay.value}"


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)

    with pytest.raises(ImportError, match=r"pip install 'kvtier\[events\]'") as no:
        ZmqPublisher(EventsConfig(), GROUPS)

    assert "\n" not in str(no.value)


# The engine


def configuration(device_slots: int = 40, host_slots: int = 0, folder: Path | None = None) -> dict[str, object]:
    tables: dict[str, object] = {
        "device": {"capacity": device_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE, "partial_blocks": False},
        "host": {"capacity": host_slots * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
        "events": {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"},
    }
    return tables if folder is None else {**tables, "disk": {"path": str(folder / "store"), "capacity": "64MiB"}}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def greedy(max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def settle(llm: LLM) -> None:
    """Let the engine finish its copies down."""
    deadline = time.monotonic() + DEADLINE_S
    llm.statistics()
    while llm.core.cache.num_in_flight:
        assert time.monotonic() < deadline, "copies do not end"
        llm.statistics()


class Fleet:
    """Replicas of one model, and a router that knows their caches by events alone."""

    def __init__(self) -> None:
        self.router = Router()
        self.llms: dict[str, LLM] = {}
        self._streams: dict[str, EventStream] = {}

    def start(self, replica: str, **sizes: object) -> LLM:
        """A replica; the models have equal weights, so that their blocks have equal names."""
        llm = LLM(build("llama"), configuration(**sizes), byte_tokenizer())
        publisher = llm.core.publisher
        self.llms[replica] = llm
        self._streams[replica] = EventStream(publisher.endpoint, publisher.replay_endpoint)
        wait_until_heard(publisher, self._streams[replica])
        self.router.forget(replica)
        return llm

    def stop(self, replica: str) -> list[kv_router.Event]:
        """End a replica, and feed its last events to the router."""
        llm, stream = self.llms.pop(replica), self._streams.pop(replica)
        llm.close()
        batches = stream.read(llm.core.publisher.next_seq)
        for batch in batches:
            self.router.learn(replica, batch)
        stream.close()
        return [event for batch in batches for event in batch.events]

    def catch_up(self) -> None:
        """Wait until all published events have reached the router."""
        for replica, llm in self.llms.items():
            settle(llm)
            stream = self._streams[replica]
            for batch in stream.read(llm.core.publisher.next_seq):
                self.router.learn(replica, batch)
            assert (stream.num_lost, llm.core.publisher.num_dropped) == (0, 0)

    def pick(self, prompt: Sequence[int], salt: str | None = None) -> str | None:
        """The replica to which the router would send the prompt."""
        self.catch_up()
        return self.router.pick(prompt, salt)

    def close(self) -> None:
        """End all replicas."""
        for stream in self._streams.values():
            stream.close()
        for llm in self.llms.values():
            llm.check()
            llm.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    replicas = Fleet()
    yield replicas
    replicas.close()


def events_of(llm: LLM, stream: EventStream) -> list[kv_router.Event]:
    return [event for batch in stream.read(llm.core.publisher.next_seq) for event in batch.events]


def test_a_prompt_and_its_answer_are_told_as_their_blocks_fill(model: PreTrainedModel, listen: Listen) -> None:
    prompt = prompt_of(1, 40)
    with LLM(model, configuration(device_slots=4), byte_tokenizer()) as llm:
        stream = listen(llm.core.publisher)
        done = llm.generate(prompt, greedy(9))[0]
        first, more = events_of(llm, stream)
        llm.generate(prompt_of(2, 63), greedy(1))
        *removed, again = events_of(llm, stream)

    names = [low64(name) for name in chain_of([*prompt, *done.token_ids])]
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (names[:2], None, prompt[:32])
    assert (more.block_hashes, more.parent_block_hash) == (names[2:], names[1])
    assert more.token_ids == [*prompt[32:], *done.token_ids[:8]]
    assert (first.extra_keys, first.group_idx, first.kv_cache_spec_kind) == ([None, None], 0, "full_attention")
    assert {type(event) for event in removed} == {kv_router.BlockRemoved}
    assert [name for event in removed for name in event.block_hashes] == names[::-1]
    assert (again.block_hashes, again.parent_block_hash) == ([low64(name) for name in chain_of(prompt_of(2, 63))], None)


def test_what_is_copied_down_between_requests_is_told(model: PreTrainedModel, listen: Listen) -> None:
    with LLM(model, configuration(device_slots=12, host_slots=60), byte_tokenizer()) as llm:
        stream = listen(llm.core.publisher)
        llm.generate(prompt_of(1, 100), greedy())
        before = {event.medium for event in events_of(llm, stream)}
        settle(llm)
        after = {event.medium for event in events_of(llm, stream)}

    assert (before, after) == ({"GPU"}, {"CPU"})


def test_hybrid_groups_are_told_apart(listen: Listen) -> None:
    with LLM(build("gemma3"), configuration(), byte_tokenizer()) as llm:
        stream = listen(llm.core.publisher)
        llm.generate(prompt_of(1, 40), greedy())
        events = events_of(llm, stream)
        kinds = [type(group) for group in llm.core.cache.groups]

    told = {event.group_idx: (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in events}
    expected = {FullAttention: ("full_attention", None), SlidingWindow: ("sliding_window", 40)}
    assert told == {group_id: expected[kind] for group_id, kind in enumerate(kinds)}
    assert len(told) == 2


def test_a_prompt_goes_where_its_beginning_was_computed(fleet: Fleet) -> None:
    first, second = fleet.start("first"), fleet.start("second")
    letters, numbers = prompt_of(1, 100), prompt_of(2, 100)
    first.generate(letters, greedy())
    second.generate(numbers, greedy())

    for stem, expected in ((letters, "first"), (numbers, "second")):
        prompt = [*stem, *prompt_of(3, 30)]
        chosen = fleet.pick(prompt)
        done = fleet.llms[chosen].generate(prompt, greedy())[0]

        assert (chosen, done.tokens.device) == (expected, 96)
    assert fleet.pick(prompt_of(4, 100)) is None


def test_the_longer_prefix_wins(fleet: Fleet) -> None:
    first, second = fleet.start("first"), fleet.start("second")
    prompt = prompt_of(1, 200)
    first.generate(prompt[:64], greedy())
    second.generate(prompt[:160], greedy())

    chosen = fleet.pick(prompt)

    assert (fleet.router.prefix("first", prompt), fleet.router.prefix("second", prompt)) == (["GPU"] * 4, ["GPU"] * 10)
    assert chosen == "second"
    assert second.generate(prompt, greedy())[0].tokens.device == 160


def test_a_replica_that_has_evicted_a_prefix_is_not_chosen_for_it(fleet: Fleet) -> None:
    first, second = fleet.start("first", device_slots=12), fleet.start("second", device_slots=12)
    prompt = prompt_of(1, 100)
    for llm in (second, first):
        llm.generate(prompt, greedy())
    before = fleet.pick(prompt)

    first.generate(prompt_of(2, 150), greedy())  # the tail of the prompt's blocks has to go
    after = fleet.pick(prompt)

    assert (before, after) == ("first", "second")
    assert 0 < len(fleet.router.prefix("first", prompt)) < len(fleet.router.prefix("second", prompt)) == 6
    assert second.generate(prompt, greedy())[0].tokens.device == 96


def test_only_prompts_of_the_same_salt_are_sent_where_a_salted_prefix_is(fleet: Fleet) -> None:
    first = fleet.start("first")
    fleet.start("second")
    prompt = prompt_of(1, 100)
    first.generate(prompt, greedy(), cache_salt="ann")

    assert [fleet.pick(prompt, salt) for salt in ("ann", "bob", None)] == ["first", None, None]
    assert first.generate(prompt, greedy(), cache_salt="ann")[0].tokens.device == 96


def test_nothing_is_sent_to_a_cache_that_was_cleared(fleet: Fleet) -> None:
    first, second = fleet.start("first"), fleet.start("second")
    prompt = prompt_of(1, 100)
    second.generate(prompt[:50], greedy())
    first.generate(prompt, greedy())
    before = fleet.pick(prompt)

    assert first.core.reset()

    assert (before, fleet.pick(prompt)) == ("first", "second")


def test_of_equally_long_prefixes_the_warmest_wins(fleet: Fleet) -> None:
    first, second = (fleet.start(replica, device_slots=12, host_slots=60) for replica in ("first", "second"))
    prompt = prompt_of(1, 100)
    for llm in (first, second):
        llm.generate(prompt, greedy())

    for seed in range(2, 6):  # the tail of the prompt's blocks has to go, to host memory
        settle(first)
        first.generate(prompt_of(seed, 40), greedy())
    chosen = fleet.pick(prompt)

    assert fleet.router.prefix("first", prompt).count("CPU") > 0
    assert [len(fleet.router.prefix(replica, prompt)) for replica in ("first", "second")] == [6, 6]
    assert (chosen, second.generate(prompt, greedy())[0].tokens.device) == ("second", 96)


def test_a_replica_that_starts_again_is_chosen_for_what_is_on_its_disk(fleet: Fleet, tmp_path: Path) -> None:
    sizes = {"host_slots": 40, "folder": tmp_path}
    first = fleet.start("first", **sizes)
    fleet.start("second")
    prompt = prompt_of(1, 100)
    first.generate(prompt, greedy())

    last_words = fleet.stop("first")
    again = fleet.start("first", **sizes)
    forgotten = fleet.router.prefix("first", prompt)
    chosen = fleet.pick(prompt)

    written = [block for event in last_words if event.medium == "STORAGE" for block in event.block_hashes]
    assert sorted(written) == sorted(low64(name) for name in chain_of(prompt))
    assert forgotten == []
    assert (chosen, fleet.router.prefix("first", prompt)) == ("first", ["STORAGE"] * 6)
    assert again.generate(prompt, greedy())[0].tokens.disk == 96
    fleet.catch_up()
    assert fleet.router.prefix("first", prompt) == ["GPU"] * 6


def test_what_is_on_disk_is_told_at_the_start(model: PreTrainedModel, listen: Listen, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)
    tables = configuration(host_slots=40, folder=tmp_path)
    with LLM(model, tables, byte_tokenizer()) as llm:
        llm.generate(prompt, greedy())

    with LLM(model, tables, byte_tokenizer()) as llm:
        events = events_of(llm, listen(llm.core.publisher))

    assert {(event.medium, event.group_idx, event.block_size) for event in events} == {("STORAGE", 0, BLOCK_SIZE)}
    told = [block for event in events for block in event.block_hashes]
    assert sorted(told) == sorted(low64(name) for name in chain_of(prompt))


def test_what_the_router_believes_is_what_the_caches_hold(fleet: Fleet, tmp_path: Path) -> None:
    """Many prompts with common beginnings, in tiers so small that blocks come and go in all of them."""
    fleet.start("first", device_slots=14)
    fleet.start("second", device_slots=14, host_slots=24)
    fleet.start("third", device_slots=14, host_slots=24, folder=tmp_path)
    media = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
    rng = random.Random(3)
    stems = [prompt_of(stem, 150) for stem in range(6)]
    asked: list[list[int]] = []
    hits, seen = 0, set()

    for seed in range(60):
        prompt = [*rng.choice(stems)[: rng.randrange(30, 150)], *prompt_of(seed, 10)]
        chosen = fleet.pick(prompt)
        replica = chosen if chosen is not None and rng.random() < 0.5 else rng.choice(list(fleet.llms))
        expected = fleet.router.prefix(replica, prompt)
        done = fleet.llms[replica].generate(prompt, greedy())[0]
        hits += replica == chosen
        seen.update(expected)
        asked.append(prompt)

        last_block = len(prompt) % BLOCK_SIZE == 0  # is always computed
        num_loaded = min(len(expected), len(prompt) // BLOCK_SIZE - last_block) * BLOCK_SIZE
        assert len(prompt) - done.tokens.recomputed == num_loaded, f"prompt {seed}"
        fleet.catch_up()
        for name, llm in fleet.llms.items():
            for known in asked:
                chain = BlockChain(BLOCK_SIZE)
                chain.extend(known)
                where = llm.core.cache.lookups.where(chain)
                assert fleet.router.prefix(name, known) == [
                    media[tier] for tier in where[: where.index(None) if None in where else None]
                ], f"{name} after prompt {seed}"
    assert (hits > 10, seen) == (True, set(media.values()))


# Starting


def test_without_the_table_there_is_no_publisher(model: PreTrainedModel) -> None:
    tables = configuration()
    del tables["events"]

    with LLM(model, tables, byte_tokenizer()) as llm:
        assert llm.core.publisher is None


def test_an_llm_that_found_its_endpoint_taken_leaves_the_store_to_the_next(
    model: PreTrainedModel, tmp_path: Path, publish: Publish
) -> None:
    tables = configuration(host_slots=40, folder=tmp_path)
    taken = publish().endpoint.rpartition(":")[2]

    with pytest.raises(OSError, match="choose another"):
        LLM(model, {**tables, "events": {"endpoint": f"tcp://*:{taken}"}}, byte_tokenizer())

    with LLM(model, tables, byte_tokenizer()) as llm:
        assert llm.generate(prompt_of(1, 50), greedy())


def test_an_llm_that_could_not_start_ends_its_publisher(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="host"):
        LLM(model, {**configuration(), "host": {"capacity": 100}}, byte_tokenizer())

    assert not any(thread.name == "kvtier-events" for thread in threading.enumerate())


def test_closing_an_llm_ends_its_publisher(model: PreTrainedModel) -> None:
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        endpoint = llm.core.publisher.endpoint

    assert not any(thread.name == "kvtier-events" for thread in threading.enumerate())
    with zmq.Context() as context, context.socket(zmq.PUB) as again:
        again.linger = 0
        again.bind(endpoint)
