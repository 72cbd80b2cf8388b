"""GroupTiers: one attention group's part of the cache: device slots, memory, and the tenants of its blocks."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.group_slots import GroupSlots, SlotOwners
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import BlockIds, NamedBlocks, blocks_of, names_of
from kvtier.tiers.naming.tenant import number_of
from kvtier.transfer.block_memory import BlockMemory

OnLeftDevice = Callable[["GroupTiers", Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Called when blocks of a group have left the device, see `OnForgotten`."""


class GroupTiers:
    """All that one attention group has on the device. Its blocks have one size, and a request has one table of them.
    Owned by the cache's thread."""

    def __init__(
        self,
        group_id: int,
        attention: AttentionGroup,
        memory: BlockMemory,
        on_left_device: OnLeftDevice,
        is_spilled: bool,
        is_matched_in_part: bool,
    ) -> None:
        """*memory* has the group's slots. *is_spilled*: whether there are tiers below the device. *is_matched_in_part*:
        whether the group's device blocks can be found by their first tokens."""
        self.id = group_id  # index of the group in every list by group: tables, demands, hits
        self.attention = attention
        self.block_size = attention.block_size
        self.memory = memory
        self.slots = GroupSlots(memory.num_device_slots, is_spilled, partial(on_left_device, self))
        self.pool = self.slots.pool
        self.owners = SlotOwners(memory.num_device_slots)
        self.partial_matches = PartialMatches(memory.num_device_slots, self.block_size) if is_matched_in_part else None
        self.tails: set[BlockName] = set()  # device blocks that are not full: not spilled, and no event tells of them
        self.num_held = 0  # leases on device slots that callers of the cache hold

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """Ids of the blocks that a request reads to go on after *num_tokens*, without those before token *start*."""
        end = num_tokens // self.block_size
        return range(min(end, max(self.attention.first_needed(num_tokens), start // self.block_size)), end)

    def names_in(self, chain: BlockChain, blocks: range) -> list[BlockName]:
        """The names of these blocks of the chain."""
        return chain.names_of(self.block_size, blocks)

    def names_of(self, chain: BlockChain, ids: BlockIds) -> Sequence[BlockName]:
        """The same for blocks that need not be in a row."""
        return names_of(chain, self.attention, ids)

    def blocks_of(self, chain: BlockChain, ids: BlockIds) -> NamedBlocks:
        """These blocks of the chain, with their parents and their tenant."""
        return blocks_of(chain, self.attention, ids)

    def record_origin(self, slots: Ids, tenant: bytes, chain: BlockChain | None, start: int) -> None:
        """Note that the device slots hold the tenant's blocks now: those of *chain* from *start* on, if it is known."""
        self.owners.record(slots, tenant)
        if self.partial_matches is not None:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)

    def commit_tail(self, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """Name a block of which only these tokens are computed, unless another slot has it already."""
        if self.pool.commit([slot], [name]):
            return
        if self.partial_matches is not None:
            self.partial_matches.record_tail(slot, key, token_ids)
        self.tails.add(name)

    def are_of(self, tenant: bytes, slots: Ids) -> npt.NDArray[np.bool_]:
        """For each of the device slots whether its block is the tenant's."""
        own: npt.NDArray[np.bool_] = self.owners.of(slots) == np.uint64(number_of(tenant))
        return own

    def clear(self) -> Sequence[BlockName]:
        """Forget every block of the device, without telling of it; nothing may be leased. Their names."""
        self.tails.clear()
        return self.slots.clear()
