"""GroupTiers: the device state of one attention group: slots, memory, and the tenants of its blocks."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.group_slots import GroupSlots, SlotOwners
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import BlockIds, NamedBlocks, blocks_of, names_of
from kvtier.tiers.naming.tenant import number_of
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.transfer.block_memory import BlockMemory

OnLeftDevice = Callable[["GroupTiers", Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Callback for blocks of a group that have left the device; see `OnForgotten`."""


class GroupTiers:
    """Device state of one attention group, whose blocks have one size. A request has one block table per group.

    Owned by the cache's thread.
    """

    def __init__(
        self,
        group_id: int,
        attention: AttentionGroup,
        memory: BlockMemory,
        on_left_device: OnLeftDevice,
        is_spilled: bool,
        is_matched_in_part: bool,
    ) -> None:
        """Create the state of a group without blocks.

        *memory* holds the group's slots. *is_spilled* says whether there are tiers below the device, and
        *is_matched_in_part* whether device blocks can be found by their first tokens.
        """
        self.id = group_id  # index of the group in all lists by group, such as tables, demands and hits
        self.attention = attention
        self.block_size = attention.block_size
        self.memory = memory
        self.slots = GroupSlots(memory.num_device_slots, is_spilled, partial(on_left_device, self))
        self.pool = self.slots.pool
        self.owners = SlotOwners(memory.num_device_slots)
        self.partial_matches = PartialMatches(memory.num_device_slots, self.block_size) if is_matched_in_part else None
        self.tails: set[BlockName] = set()  # device blocks that are not full; they are not spilled and cause no events
        self.num_held = 0  # leases on device slots held by callers of the cache

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """Return the ids of the blocks from token *start* on that a request reads to resume after *num_tokens*."""
        end = num_tokens // self.block_size
        return range(min(end, max(self.attention.first_needed(num_tokens), start // self.block_size)), end)

    def names_in(self, chain: BlockChain, blocks: range) -> list[BlockName]:
        """Return the names of a range of the chain's blocks."""
        return chain.names_of(self.block_size, blocks)

    def names_of(self, chain: BlockChain, ids: BlockIds) -> Sequence[BlockName]:
        """Return the names of the chain's blocks *ids*, which need not be consecutive."""
        return names_of(chain, self.attention, ids)

    def blocks_of(self, chain: BlockChain, ids: BlockIds) -> NamedBlocks:
        """Return the chain's blocks *ids*, with their parents and their tenant."""
        return blocks_of(chain, self.attention, ids)

    def record_origin(self, slots: Ids, tenant: bytes, chain: BlockChain | None, start: int) -> None:
        """Record that *slots* hold blocks of *tenant*, namely those of *chain* from block *start* on if it is given."""
        self.owners.record(slots, tenant)
        if self.partial_matches is not None:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)

    def commit_tail(self, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """Name a block that is not full, of which *token_ids* are computed, unless another slot holds it already."""
        if self.pool.commit([slot], [name]):
            return
        if self.partial_matches is not None:
            self.partial_matches.record_tail(slot, key, token_ids)
        self.tails.add(name)

    def are_of(self, tenant: bytes, slots: Ids) -> npt.NDArray[np.bool_]:
        """Return for each device slot whether its block belongs to *tenant*."""
        own: npt.NDArray[np.bool_] = self.owners.of(slots) == np.uint64(number_of(tenant))
        return own

    def clear(self) -> Sequence[BlockName]:
        """Evict all device blocks without callbacks, and return their names. No slot may be leased."""
        self.tails.clear()
        return self.slots.clear()
