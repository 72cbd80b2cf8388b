"""KV events as they come over the wire: vLLM's format of today and of before, and LMCache's, which vLLM publishes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from kvtier.tiers.naming.tier import Tier

Name: TypeAlias = int | bytes  # of a block, as the replica calls it

# vLLM says GPU, CPU and STORAGE, LMCache cpu, SGLang CPU_TIER1; what is neither device nor host memory is behind both.
_TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "CPU_TIER1": Tier.HOST, "CPU_PINNED": Tier.HOST}
_FIELDS = {  # in the order of the arrays in which vLLM before 0.32 sent events
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """The replica has these blocks in *medium*. They follow each other, and *parent_block_hash*, if it has
    *token_ids*. Of *group_idx* only the first group is looked at, whose blocks decide how far a prefix goes."""

    block_hashes: Sequence[Name]
    parent_block_hash: Name | None
    token_ids: Sequence[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None

    @property
    def tier(self) -> Tier:
        """Where they are."""
        return tier_of(self.medium)


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """The replica has these blocks no longer in *medium*."""

    block_hashes: Sequence[Name]
    medium: str | None = None
    group_idx: int | None = None

    @property
    def tier(self) -> Tier:
        """Where they were."""
        return tier_of(self.medium)


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The replica has nothing any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Events that came together, *ts* seconds after the epoch. What is no event that is known is not among them."""

    ts: float
    events: list[Event]


class _Anything(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[object]


_AS_MAPS = msgspec.msgpack.Decoder(Batch)
_AS_ANYTHING = msgspec.msgpack.Decoder(_Anything)


def decode(payload: bytes) -> Batch:
    """The batch in a message's payload. ValueError for what is none."""
    try:
        return _AS_MAPS.decode(payload)
    except msgspec.ValidationError:  # arrays, or an event of a kind that is not known
        batch = _AS_ANYTHING.decode(payload)
        return Batch(batch.ts, [event for raw in batch.events if (event := _event(raw)) is not None])


def tier_of(medium: str | None) -> Tier:
    """The tier that a medium is; without one it is the device's."""
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper(), Tier.DISK)


def _event(raw: object) -> Event | None:
    """The event in a map, or in an array that begins with its kind; None if it is of no kind that is known."""
    if isinstance(raw, Sequence) and raw and raw[0] in _FIELDS:
        raw = {"type": raw[0], **dict(zip(_FIELDS[raw[0]], raw[1:], strict=False))}
    if not isinstance(raw, Mapping) or raw.get("type") not in _FIELDS:
        return None
    return msgspec.convert(raw, Event)  # type: ignore[no-any-return]  # of a union, for which there is no type


@dataclass(frozen=True, slots=True)
class Publisher:
    """The ZMQ endpoints of the replica called *name*: where it publishes KV events of *topic*, and where it sends what
    was missed again, if it does."""

    name: str
    events: str
    replay: str | None = None
    topic: str = ""
