"""KV events in the wire formats of vLLM (current and older versions) and of LMCache, whose events vLLM publishes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from kvtier.tiers.naming.tier import Tier

Name: TypeAlias = int | bytes  # a replica's name of a block

# vLLM sends GPU, CPU and STORAGE, LMCache cpu, SGLang CPU_TIER1. Any medium that is not listed counts as disk.
_TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "CPU_TIER1": Tier.HOST, "CPU_PINNED": Tier.HOST}
_FIELDS = {  # in the order of the arrays in which vLLM before 0.32 sent events
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A KV event: the replica now has these blocks in *medium*, such as `GPU` or `CPU`.

    If the event has *token_ids*, the blocks are consecutive, and the first one follows *parent_block_hash*. If the
    model has several groups of layers, each group has events of its own, with its *group_idx*. The router uses only
    events of the first group, whose blocks determine how long a prefix is.
    """

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
        """Tier that has the blocks."""
        return tier_of(self.medium)


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """A KV event: the replica no longer has these blocks in *medium*."""

    block_hashes: Sequence[Name]
    medium: str | None = None
    group_idx: int | None = None

    @property
    def tier(self) -> Tier:
        """Tier that had the blocks."""
        return tier_of(self.medium)


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """A KV event: the replica has no cached blocks any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one message, sent *ts* seconds after the epoch. Events of unknown kinds are left out."""

    ts: float
    events: list[Event]


class _Anything(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[object]


_AS_MAPS = msgspec.msgpack.Decoder(EventBatch)
_AS_ANYTHING = msgspec.msgpack.Decoder(_Anything)


def decode(payload: bytes) -> EventBatch:
    """Return the batch in a message's *payload*. Raise ValueError if the payload is not a batch."""
    try:
        return _AS_MAPS.decode(payload)
    except msgspec.ValidationError:  # events as arrays, or an event of an unknown kind
        batch = _AS_ANYTHING.decode(payload)
        return EventBatch(batch.ts, [event for raw in batch.events if (event := _event(raw)) is not None])


def tier_of(medium: str | None) -> Tier:
    """Return the tier of an event's *medium*. An event without a medium is about the device."""
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper(), Tier.DISK)


def _event(raw: object) -> Event | None:
    """Return the event in *raw*, a map or an array that begins with the event's kind; None if it is unknown."""
    if isinstance(raw, Sequence) and raw and raw[0] in _FIELDS:
        raw = {"type": raw[0], **dict(zip(_FIELDS[raw[0]], raw[1:], strict=False))}
    if not isinstance(raw, Mapping) or raw.get("type") not in _FIELDS:
        return None
    return msgspec.convert(raw, Event)  # type: ignore[no-any-return]  # of a union, for which there is no type


@dataclass(frozen=True, slots=True)
class Publisher:
    """The ZMQ endpoints of the replica *name*.

    The replica publishes KV events at *events*, under the topic *topic*. It sends missed events again at *replay*; None
    if it cannot do that.
    """

    name: str
    events: str
    replay: str | None = None
    topic: str = ""
