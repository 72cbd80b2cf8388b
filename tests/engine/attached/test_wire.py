"""What an engine and its sidecar say to each other: every message survives, and nothing else does harm."""

import random

import msgspec
import numpy as np
import pytest

from kvtier.engine.attached.wire import (
    LENGTH_BYTES,
    Abandon,
    Chain,
    Clear,
    Fetch,
    Fetched,
    Frames,
    FromEngine,
    FromSidecar,
    GroupShape,
    Hello,
    InHost,
    Inquire,
    Inquired,
    Malformed,
    Publish,
    ReadState,
    Refused,
    Reserve,
    Start,
    TiersState,
    TimeOut,
    Traced,
    Welcome,
    digests_in,
    frame_of,
    joined,
    message_of_engine,
    message_of_sidecar,
    names_in,
    numbers_in,
    owners_in,
    packed,
    parents_in,
    starts_of,
)
from kvtier.store.remote_store import RemoteUsage
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason, Tier

NAMES = [BlockName(bytes([i]) * 32) for i in range(5)]
DISK = DiskStatistics(
    1, 2, 3, True, False, {"read": BreakerState.OPEN}, {"read": 1}, {"read": "gone"}, None, None, {b"tenant00": 3}
)
REMOTE = RemoteStatistics(
    "redis://cache:6379",
    RemoteUsage(1, 2, 3, 4, 5),
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    0.5,
    {"ask": BreakerState.CLOSED},
    {"ask": 0},
    {"ask": ""},
    {"corrupt": 1},
)
OF_ENGINE: list[FromEngine] = [
    Hello(1, "kvtier 0.1.0", "a model", b"n" * 16, [GroupShape(16, False, 4096)]),
    Fetch(3, 1, joined(NAMES), [Start(0, None)], b"tenant00", False),
    Inquire(4, 1, joined(NAMES)),
    TimeOut(3),
    Reserve(0, 64),
    Publish(0, packed([3, 1]), joined(NAMES[:2]), [Chain(0, 2, None)], b"d" * 32, bytes(16)),
    Publish(0, b"", b"", [], b"", b"", [Traced("00-" + "1" * 32 + "-" + "2" * 16 + "-01", packed([0, 1]))]),
    Abandon(0, packed([7])),
    Clear(),
]
OF_SIDECAR: list[FromSidecar] = [
    Refused("no"),
    Inquired(4, joined(NAMES[:2])),
    Welcome(1, "kvtier 0.1.0", b"boot", 1 << 30),
    InHost(0, joined(NAMES), packed(range(5))),
    Fetched(3, packed([0]), packed([9]), b"d" * 16, bytes(8), [(1, Reason.CORRUPT)]),
    TiersState(
        True,
        False,
        True,
        {Tier.DISK: ReadState(1.5, 0.1, 3)},
        {Tier.HOST: TierStatistics(corrupt={"crc": 2})},
        DISK,
        REMOTE,
        [(b"tenant00", 5)],
    ),
]


def payload(message: FromEngine | FromSidecar) -> bytes:
    (found,) = Frames().receive(frame_of(message))
    return found


@pytest.mark.parametrize("message", OF_ENGINE, ids=lambda message: type(message).__name__)
def test_what_an_engine_says_is_what_is_understood(message: FromEngine) -> None:
    assert message_of_engine(payload(message)) == message


@pytest.mark.parametrize("message", OF_SIDECAR, ids=lambda message: type(message).__name__)
def test_what_a_sidecar_says_is_what_is_understood(message: FromSidecar) -> None:
    assert message_of_sidecar(payload(message)) == message


def test_traces_are_told_to_sidecars_and_by_engines_that_know_none_of_them() -> None:
    class OldPublish(msgspec.Struct, frozen=True, array_like=True, tag="Publish"):
        group: int
        slots: bytes
        names: bytes
        chains: list[Chain]
        digests: bytes
        owners: bytes

    old = OldPublish(0, packed([3]), joined(NAMES[:1]), [Chain(0, 1, None)], b"d" * 16, bytes(8))
    new = Publish(0, packed([3]), joined(NAMES[:1]), [Chain(0, 1, None)], b"d" * 16, bytes(8), [Traced("t", b"")])

    to_old_sidecar = msgspec.msgpack.decode(frame_of(new)[LENGTH_BYTES:], type=OldPublish)
    from_old_engine = message_of_engine(msgspec.msgpack.encode(old))

    assert to_old_sidecar == old
    assert from_old_engine == Publish(0, packed([3]), joined(NAMES[:1]), [Chain(0, 1, None)], b"d" * 16, bytes(8))


def test_one_side_does_not_take_what_only_the_other_says() -> None:
    with pytest.raises(Malformed):
        message_of_engine(payload(Refused("no")))
    with pytest.raises(Malformed):
        message_of_sidecar(payload(Clear()))


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_whole_however_the_bytes_come(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rng.choice(OF_ENGINE) for _ in range(30)]
    stream = b"".join(frame_of(message) for message in sent)
    frames, received = Frames(), list[FromEngine]()

    while stream:
        cut = rng.randrange(1, 200)
        received += map(message_of_engine, frames.receive(stream[:cut]))
        stream = stream[cut:]

    assert received == sent
    assert frames.num_held_bytes == 0


def test_a_frame_that_is_too_large_is_refused_by_its_length_alone() -> None:
    with pytest.raises(Malformed, match="at most 1024"):
        Frames(1024).receive((1025).to_bytes(LENGTH_BYTES, "little"))


@pytest.mark.parametrize("seed", range(50))
def test_bytes_that_mean_nothing_are_refused_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(payload(rng.choice(OF_ENGINE)))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        data = bytearray(rng.randbytes(rng.randrange(200)))

    try:
        message = message_of_engine(bytes(data))
    except Malformed:
        return
    assert isinstance(message, msgspec.Struct)


def test_names_numbers_digests_and_tenants_survive_and_what_is_none_is_refused() -> None:
    assert names_in(joined(NAMES)) == NAMES
    assert names_in(b"") == []
    assert numbers_in(packed([4, 0, 2]), 5).tolist() == [4, 0, 2]
    assert digests_in(b"a" * 16 + b"b" * 16, 2) == [b"a" * 16, b"b" * 16]
    assert owners_in(np.array([1, 2], np.uint64).tobytes(), 2).tolist() == [1, 2]
    for wrong in (
        lambda: names_in(b"x" * 33),
        lambda: numbers_in(packed([5]), 5),
        lambda: numbers_in(packed([-1]), 5),
        lambda: numbers_in(b"xyz", 5),
        lambda: digests_in(b"a" * 16, 2),
        lambda: owners_in(bytes(8), 2),
    ):
        with pytest.raises(Malformed):
            wrong()


@pytest.mark.parametrize(
    "parents",
    [
        [None, *NAMES[:4]],
        [NAMES[4], *NAMES[:4]],
        [None] * 5,
        [NAMES[1], None, NAMES[1], NAMES[0], NAMES[3]],
    ],
)
def test_parents_survive_by_their_exceptions(parents: list[BlockName | None]) -> None:
    assert parents_in(NAMES, starts_of(NAMES, parents)) == parents


def test_a_row_of_blocks_says_its_parents_in_a_word() -> None:
    assert len(starts_of(NAMES, [None, *NAMES[:4]])) == 1


@pytest.mark.parametrize("start", [Start(5, None), Start(-1, None), Start(0, b"short")])
def test_a_start_that_is_none_is_refused(start: Start) -> None:
    with pytest.raises(Malformed):
        parents_in(NAMES, [start])
