"""Holds: prefixes kept in host memory because they will be wanted: of prompts in a queue, of pinned documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.tiers.block_hash import BlockChain, BlockName
from kvtier.tiers.groups import AttentionGroup
from kvtier.tiers.landings import Landing, Landings
from kvtier.tiers.residency import Residency
from kvtier.tiers.spiller import Spiller
from kvtier.tiers.tier import Reason

RETRY_S = 0.02  # how often it is looked whether a block has come to host memory


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block of a held prefix."""

    group_id: int
    block_id: int
    name: BlockName


@dataclass(eq=False, slots=True)
class Hold:
    """The blocks of one prefix that are, or will be, in host memory until the hold ends. Its owner ends it."""

    chain: BlockChain
    num_bytes: int  # of all its blocks
    slots: dict[Wanted, int] = field(default_factory=dict)  # each leased
    landings: dict[Wanted, Landing] = field(default_factory=dict)  # on their way from disk
    absent: list[Wanted] = field(default_factory=list)  # not on disk either: on the device, or nowhere

    @property
    def is_whole(self) -> bool:
        """Whether every block is there."""
        return not self.landings and not self.absent


class Holds:
    """Leases on host slots, and how they come to be: from disk when nothing more urgent is read, from the device when
    the bus is free. Owned by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        block_bytes: Sequence[int],
        landings: Landings,
        spiller: Spiller,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._block_bytes = block_bytes
        self._landings = landings
        self._spiller = spiller
        self._clock = clock
        self._holds: set[Hold] = set()
        self._retry_at = 0.0

    @property
    def num_bytes(self) -> int:
        """Of host memory that all holds take when they are whole."""
        return sum(hold.num_bytes for hold in self._holds)

    def begin(self, chain: BlockChain, blocks: Sequence[range]) -> Hold:
        """Hold these blocks, by group."""
        wanted = [
            Wanted(group_id, block_id, name)
            for group_id, (group, needed) in enumerate(zip(self._groups, blocks, strict=True))
            for block_id, name in zip(needed, chain.names_of(group.block_size, needed), strict=True)
        ]
        hold = Hold(chain, sum(self._block_bytes[block.group_id] for block in wanted), absent=wanted)
        self._holds.add(hold)
        self._try(hold)
        return hold

    def end(self, hold: Hold) -> None:
        """Let go: the leases end, and what is only queued is not read. A second time does nothing."""
        if hold not in self._holds:
            return
        self._holds.remove(hold)
        for landing in hold.landings.values():
            self._landings.leave(landing, hold)
        assert self._residency.host is not None or not hold.slots, "host slots without a host"
        for block, slot in reversed(hold.slots.items()):  # the tail first, so that it is evicted first
            if self._residency.host is not None:
                self._residency.host.pools[block.group_id].release([slot])
        hold.absent += [*hold.slots, *hold.landings]  # it is not whole any more
        hold.landings.clear()
        hold.slots.clear()

    def end_all(self) -> None:
        """Let everything go."""
        for hold in list(self._holds):
            self.end(hold)

    def pump(self) -> None:
        """Look again for what is not there yet."""
        if self._holds and self._clock() >= self._retry_at:
            self._retry_at = self._clock() + RETRY_S
            for hold in self._holds:
                if hold.absent:
                    self._try(hold)

    def num_leases(self, group_id: int) -> int:
        """Leases that holds have on the host's pool of the group."""
        return sum(block.group_id == group_id for hold in self._holds for block in hold.slots)

    def _try(self, hold: Hold) -> None:
        """Lease what is in host memory, have read what is on disk, have copied down what is on the device only."""
        host, device = self._residency.host, self._residency.device
        if host is None:
            return
        absent, hold.absent = hold.absent, []
        to_copy: list[list[int]] = [[] for _ in self._groups]
        for block in absent:
            slot = host.pools[block.group_id].find(block.name)
            if slot is not None:
                host.pools[block.group_id].lease([slot])
                hold.slots[block] = slot
                continue
            if self._residency.disk is not None and self._residency.disk.holds(block.group_id, block.name):
                hold.landings[block] = self._landings.join(
                    hold.chain, block.group_id, block.block_id, hold, self._landed(hold, block), now=False
                )
                continue
            hold.absent.append(block)
            on_device = device.pools[block.group_id].find(block.name)
            if on_device is not None:
                to_copy[block.group_id].append(on_device)
        for group_id, slots in enumerate(to_copy):
            if slots:
                self._spiller.copy_down(group_id, slots)

    def _landed(self, hold: Hold, block: Wanted) -> Callable[[Landing, Reason | None], None]:
        def landed(landing: Landing, failure: Reason | None) -> None:
            del hold.landings[block]
            if failure is None and landing.host_slot is not None and self._residency.host is not None:
                self._residency.host.pools[block.group_id].lease([landing.host_slot])
                hold.slots[block] = landing.host_slot
            else:
                hold.absent.append(block)

        return landed
