"""What comes over the wire: of kvtier, of vLLM today and before, of LMCache, and what nobody sends."""

import msgspec
import pytest

from kvtier.routing.kv_event import AllBlocksCleared, BlockRemoved, BlockStored, decode, tier_of
from kvtier.tiers.naming.tier import Tier


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, [*events], 0])


STORED = {
    "type": "BlockStored",
    "block_hashes": [5, 6],
    "parent_block_hash": 4,
    "token_ids": [*range(32)],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def test_vllms_maps() -> None:
    batch = decode(payload({**STORED, "extra_keys": [["salt"], None], "locality": "x"}, {"type": "AllBlocksCleared"}))

    stored = BlockStored([5, 6], 4, [*range(32)], 16, "GPU", None, [["salt"], None])
    assert (batch.ts, batch.events) == (1.5, [stored, AllBlocksCleared()])
    assert stored.tier is Tier.DEVICE


def test_vllms_arrays_of_before() -> None:
    batch = decode(
        payload(
            ["BlockStored", [b"5"], None, [*range(16)], 16, None, "CPU"],
            ["BlockStored", [b"5"], None, [*range(16)], 16, None],
            ["BlockRemoved", [b"5"], "GPU"],
            ["BlockRemoved", [b"5"]],
            ["AllBlocksCleared"],
        )
    )

    assert batch.events == [
        BlockStored([b"5"], None, [*range(16)], 16, "CPU"),
        BlockStored([b"5"], None, [*range(16)], 16),
        BlockRemoved([b"5"], "GPU"),
        BlockRemoved([b"5"]),
        AllBlocksCleared(),
    ]


def test_lmcaches_chunks_come_in_vllms_format_with_a_medium_of_their_own() -> None:
    chunk = {**STORED, "block_hashes": [b"chunk"], "token_ids": [*range(256)], "block_size": 256, "medium": "cpu"}

    (stored,) = decode(payload(chunk)).events

    assert isinstance(stored, BlockStored)
    assert (stored.tier, stored.block_size, stored.block_hashes) == (Tier.HOST, 256, [b"chunk"])


def test_events_of_kinds_that_are_not_known_are_left_out_and_the_others_taken() -> None:
    batch = decode(payload({"type": "BlockMoved", "block_hashes": [1]}, STORED, ["Something"], 7))

    assert [type(event) for event in batch.events] == [BlockStored]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        payload({**STORED, "block_size": "x"}),
        payload({**STORED, "block_size": 0}),
        payload({**STORED, "token_ids": [-1]}),
    ],
)
def test_what_is_no_batch_is_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(wrong)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, "device"), ("GPU", "device"), ("CPU", "host"), ("cpu", "host"), ("CPU_TIER1", "host"), ("STORAGE", "disk")],
)
def test_the_tier_of_a_medium(medium: str | None, tier: str) -> None:
    assert tier_of(medium) == tier
