"""GroupTiers: all that is one attention group's on the device: its slots, its memory, and whose its blocks are."""

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.device.slot_owners import SlotOwners
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import BlockIds, NamedBlocks, blocks_of, names_of
from kvtier.transfer.block_memory import BlockMemory

LeftDevice = Callable[["GroupTiers", Ids, Sequence[BlockName], set[BlockName | None]], None]
"""Told that blocks of a group cannot be found on the device any more, see `Forgotten`."""


class GroupTiers:
    """One attention group of a cache: its blocks have one size, and a request has one table of them. Owned by the
    cache's thread."""

    def __init__(
        self,
        group_id: int,
        attention: AttentionGroup,
        memory: BlockMemory,
        left_device: LeftDevice,
        is_spilled: bool,
        is_matched_in_part: bool,
    ) -> None:
        """*memory* has the group's slots. *is_spilled*: whether there are tiers below the device. *is_matched_in_part*:
        whether it is known of the group's device blocks which tokens they begin with."""
        self.id = group_id  # its place wherever there is something for each group: tables, demands, hits
        self.attention = attention
        self.block_size = attention.block_size
        self.memory = memory
        self.slots = GroupSlots(memory.num_device_slots, is_spilled, partial(left_device, self))
        self.pool = self.slots.pool
        self.owners = SlotOwners(memory.num_device_slots)
        self.partial_matches = PartialMatches(memory.num_device_slots, self.block_size) if is_matched_in_part else None
        self.tails: set[BlockName] = set()  # blocks on the device that are not full: they stay there, and are untold of
        self.num_held = 0  # leases on device slots that callers of the cache hold

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """The blocks that a request reads which goes on after that many tokens, but for those before *start*."""
        end = num_tokens // self.block_size
        return range(min(end, max(self.attention.first_needed(num_tokens), start // self.block_size)), end)

    def names_in(self, chain: BlockChain, blocks: range) -> list[BlockName]:
        """The names of these blocks of the chain."""
        return chain.names_of(self.block_size, blocks)

    def names_of(self, chain: BlockChain, ids: BlockIds) -> Sequence[BlockName]:
        """The same for blocks that need not be in a row."""
        return names_of(chain, self.attention, ids)

    def blocks_of(self, chain: BlockChain, ids: BlockIds) -> NamedBlocks:
        """These blocks of the chain, with what they continue and whose they are."""
        return blocks_of(chain, self.attention, ids)

    def record_origin(self, slots: Ids, tenant: bytes, chain: BlockChain | None, start: int) -> None:
        """The device slots hold the tenant's blocks now: those of the chain from *start* on, if that is known."""
        self.owners.record(slots, tenant)
        if self.partial_matches is not None:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)

    def commit_tail(self, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """Name the slot's block, of which only these tokens are computed, unless another slot has it already."""
        if self.pool.commit([slot], [name]):
            return
        if self.partial_matches is not None:
            self.partial_matches.record_tail(slot, key, token_ids)
        self.tails.add(name)

    def clear(self) -> None:
        """Forget every block of the device, and tell nobody of it; nothing may be leased."""
        self.slots.clear()
        self.tails.clear()
