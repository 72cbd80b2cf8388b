"""Residency: which block is in which tier, and how a slot is taken from the block that can best be spared."""

from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.block_pool import BlockPool
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.tier import Reason, Tier

NUM_GHOSTS = 1 << 16  # names of lost blocks that are remembered, to tell "evicted" from "never seen"


@dataclass(slots=True)
class SlotTier:
    """The device's or the host's slots: a pool for each group, and which of its blocks have no copy further down."""

    tier: Tier
    pools: list[BlockPool]
    dirty: list[OrderedDict[int, None]] = field(init=False)  # [group] slots, in the order in which they became so
    num_evicted: int = 0
    dropped_spills: int = 0
    corrupt: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dirty = [OrderedDict() for _ in self.pools]

    def choose(self, group_id: int, num_slots: int, window: int) -> list[int]:
        """Up to *num_slots* cached slots to evict: clean ones among the *window* oldest, then simply the oldest."""
        pool = self.pools[group_id]
        chosen = self.oldest_clean(group_id, window)[:num_slots]
        if len(chosen) < num_slots:
            taken = set(chosen)
            chosen += [slot for slot in pool.victims(num_slots) if slot not in taken][: num_slots - len(chosen)]
        return chosen

    def oldest_clean(self, group_id: int, window: int) -> list[int]:
        """Of the *window* oldest cached slots those whose block may go: it will still be found below."""
        dirty = self.dirty[group_id]
        return [slot for slot in self.pools[group_id].oldest(window) if slot not in dirty]

    def check(self) -> None:
        """Raise AssertionError if a pool's books disagree or a slot without a block is dirty."""
        for pool, dirty in zip(self.pools, self.dirty, strict=True):
            pool.check()
            assert all(pool.name(slot) is not None for slot in dirty), f"{self.tier}: a slot without a block is dirty"


class Residency:
    """All tiers' indexes together. Owned by one thread; holds no bytes and starts no copy."""

    def __init__(self, device: SlotTier, host: SlotTier | None, disk: DiskTier | None) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        # Digest of each named host block, taken when its bytes arrived: [group][slot].
        self.digests: list[dict[int, bytes]] = [{} for _ in device.pools]
        self._ghosts: OrderedDict[BlockName, Tier] = OrderedDict()

    def tier_of(self, group_id: int, name: BlockName) -> Tier | None:
        """The warmest tier that has the block."""
        if self.device.pools[group_id].find(name) is not None:
            return Tier.DEVICE
        if self.host is not None and self.host.pools[group_id].find(name) is not None:
            return Tier.HOST
        if self.disk is not None and self.disk.holds(group_id, name):
            return Tier.DISK
        return None

    def why_missing(self, name: BlockName) -> Reason:
        """Why no tier has a block: the tier that dropped the last copy, as far as is remembered."""
        tier = self._ghosts.get(name)
        return Reason.NEVER_SEEN if tier is None else Reason.evicted_from(tier)

    def has_copy_below_device(self, group_id: int, name: BlockName) -> bool:
        """Whether the device may forget the block and it will still be found."""
        if self.host is not None and self.host.pools[group_id].find(name) is not None:
            return True
        return self.disk is not None and self.disk.holds(group_id, name)

    def take(self, tier: SlotTier, group_id: int, num_slots: int, window: int) -> list[int] | None:
        """Lease that many slots of *tier*, evicting clean blocks first. None, and nothing changed, if too few are free.

        A dirty block that has to go is dropped and counted; nobody waits for a copy.
        """
        pool = tier.pools[group_id]
        if num_slots > pool.num_free:
            return None
        if num_slots > pool.num_blank:
            self.evict(tier, group_id, tier.choose(group_id, num_slots - pool.num_blank, window))
        return pool.allocate(num_slots)

    def num_clean(self, tier: SlotTier, group_id: int, window: int, besides: Set[int]) -> int:
        """How many slots could be taken now, blank or among the *window* oldest, without losing a last copy.

        The slots *besides* do not count: they are about to be leased.
        """
        clean = tier.oldest_clean(group_id, window)
        return tier.pools[group_id].num_blank + sum(slot not in besides for slot in clean)

    def take_clean(self, tier: SlotTier, group_id: int, num_slots: int, window: int) -> list[int]:
        """Lease up to that many slots of *tier* without losing any block's last copy."""
        pool = tier.pools[group_id]
        missing = num_slots - pool.num_blank
        if missing > 0:
            self.evict(tier, group_id, tier.oldest_clean(group_id, window)[:missing])
        return pool.allocate(min(num_slots, pool.num_blank)) or []

    def evict(self, tier: SlotTier, group_id: int, slots: Sequence[int]) -> None:
        """Forget the blocks in the slots of *tier*; their last copies are remembered as ghosts."""
        pool = tier.pools[group_id]
        for slot in slots:
            name = pool.name(slot)
            if name is None:
                continue
            was_dirty = slot in tier.dirty[group_id]
            tier.dirty[group_id].pop(slot, None)
            pool.evict([slot])
            tier.num_evicted += 1
            if tier is self.host:
                self.digests[group_id].pop(slot, None)
                if not self.has_copy_below_device(group_id, name):
                    self.lost(group_id, name)
            if not self._anywhere(group_id, name):
                tier.dropped_spills += was_dirty and self._is_spilled(tier)
                self._remember(name, tier.tier)

    def evicted_from_disk(self, keys: Sequence[bytes]) -> None:
        """The store dropped these keys, the oldest it had: what is still on the device is dirty again.

        What is still in host memory is not written a second time: a disk smaller than the host would never rest.
        """
        for key in keys:
            block = self.disk.block_of(key) if self.disk is not None else None
            if block is None:
                continue
            group_id, name = block
            tier = self.tier_of(group_id, name)
            if tier is None:
                self._remember(name, Tier.DISK)
            elif tier is Tier.DEVICE and not self.has_copy_below_device(group_id, name):
                self.lost(group_id, name)

    def lost(self, group_id: int, name: BlockName) -> None:
        """A copy is gone: what relied on it has to be copied again."""
        for tier in (self.device, self.host):
            slot = tier.pools[group_id].find(name) if tier is not None else None
            if tier is not None and slot is not None:
                tier.dirty[group_id][slot] = None

    def check(self) -> None:
        """Raise AssertionError if the indexes disagree."""
        self.device.check()
        if self.host is None:
            return
        self.host.check()
        for pool, digests in zip(self.host.pools, self.digests, strict=True):
            named = {slot for slot in range(pool.num_slots) if pool.name(slot) is not None}
            assert named == set(digests), "a host block without a digest, or a digest without a block"

    def _anywhere(self, group_id: int, name: BlockName) -> bool:
        return self.tier_of(group_id, name) is not None

    def _is_spilled(self, tier: SlotTier) -> bool:
        return self.host is not None if tier is self.device else self.disk is not None

    def _remember(self, name: BlockName, tier: Tier) -> None:
        self._ghosts[name] = tier
        self._ghosts.move_to_end(name)
        if len(self._ghosts) > NUM_GHOSTS:
            self._ghosts.popitem(last=False)
