"""An engine's copy of its sidecar's index: which block is where."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier.tiers.device.block_pool import SlotIndex
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.disk_index import DiskIndex
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, ON_REMOTE, Lost, Places, names_at
from kvtier.tiers.lower.remote.presence import RemoteHints
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, BlockStored, EventLog
from kvtier.tiers.naming.tier import EvictionCause, Tier

NAMES_AT_ONCE = 4096  # blocks of a lost sidecar that are reported as removed per call


class Mirror:
    """An engine's copy of its sidecar's index, as of the sidecar's last message. It may be slightly outdated.

    Lookups use this copy, so they do not wait for the sidecar. `pop_lost` returns the blocks that have left both host
    memory and disk. Owned by the engine's thread.
    """

    def __init__(self, block_sizes: Sequence[int], events: EventLog | None, clock: Callable[[], float]) -> None:
        """Create a mirror that has no blocks yet. *block_sizes* is the block size of each group in tokens."""
        self.remote = RemoteHints(clock)  # hints about the blocks in the sidecar's remote tier
        self.num_changes = 0
        self._block_sizes = block_sizes
        self._events = events
        self._hosts: list[SlotIndex] = [SlotIndex(0) for _ in block_sizes]  # [group]
        self._disk = DiskIndex()
        self._disk.finish_loading()  # the sidecar reports every block, so there are no pages to load
        self._lost: list[Lost] = []
        self._past: deque[tuple[int, Iterator[list[BlockName]]]] = deque()  # names that `go_on` will report

    def begin(self, num_slots: Sequence[int]) -> None:
        """Start empty for a new sidecar, which will report its blocks. *num_slots* are its host slots by group."""
        self._hosts = [SlotIndex(num) for num in num_slots]
        self.num_changes += 1

    def find(self, group_id: int, names: Sequence[BlockName], is_readable: bool) -> Places:
        """Return where the blocks are, see `LowerTiers.find`. If *is_readable* is False, ignore blocks on disk."""
        places = np.array(self._hosts[group_id].get_all(names, ABSENT), np.int32)
        absent = np.flatnonzero(places == ABSENT)
        if len(absent) and is_readable:
            places[absent[self._disk.are_held(group_id, names_at(names, absent))]] = ON_DISK
            absent = np.flatnonzero(places == NOWHERE)
        if len(absent) and self.remote.num_blocks:
            places[absent[self.remote.are_held(group_id, names_at(names, absent))]] = ON_REMOTE
        return places

    def find_run(self, group_id: int, names: Sequence[BlockName], is_readable: bool) -> Places:
        """Return the result of `find` for the blocks before the first missing one, see `LowerTiers.find_run`.

        If *is_readable* is False, ignore blocks on disk.
        """
        places = np.array(self._hosts[group_id].get_all(names, ABSENT), np.int32)
        absent = np.flatnonzero(places == ABSENT)
        if not len(absent):
            return places
        if self.remote.num_blocks:
            places = self.find(group_id, names, is_readable)
            is_nowhere = places == NOWHERE
            return places[: int(is_nowhere.argmax())] if is_nowhere.any() else places
        num_held = self._disk.num_held(group_id, names_at(names, absent)) if is_readable else 0
        places[absent[:num_held]] = ON_DISK
        return places if num_held == len(absent) else places[: int(absent[num_held])]

    def on_in_host(self, group_id: int, names: Sequence[BlockName], slots: Sequence[int]) -> None:
        """Record that these blocks are in these host slots."""
        host = self._hosts[group_id]
        places = host.get_all(names, ABSENT)
        host.remove_all([name for name, place in zip(names, places, strict=True) if place != ABSENT])
        host.give_all(names, slots)
        self._tell(BlockStored(Tier.HOST, group_id, names, self._block_sizes[group_id]))

    def on_left_host(self, group_id: int, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Record that these blocks left host memory."""
        host = self._hosts[group_id]
        there = [name for name, slot in zip(names, host.get_all(names, ABSENT), strict=True) if slot != ABSENT]
        host.remove_all(there)
        is_on_disk = self._disk.are_held(group_id, there)
        gone = [name for name, is_there in zip(there, is_on_disk, strict=True) if not is_there]
        self._lose(group_id, gone, Tier.HOST, cause)
        self._tell(BlockRemoved(Tier.HOST, group_id, there, cause))

    def on_disk(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Record that these blocks are on disk."""
        self._disk.add(group_id, names)
        self._tell(BlockStored(Tier.DISK, group_id, names, self._block_sizes[group_id]))

    def on_left_disk(self, group_id: int, names: Sequence[BlockName], cause: EvictionCause) -> None:
        """Record that these blocks left the disk."""
        there = [name for name in names if self._disk.remove(group_id, name)]
        in_host = self._hosts[group_id].get_all(there, ABSENT)
        gone = [name for name, slot in zip(there, in_host, strict=True) if slot == ABSENT]
        self._lose(group_id, gone, Tier.DISK, cause)
        self._tell(BlockRemoved(Tier.DISK, group_id, there, cause))

    def end(self) -> None:
        """Forget all blocks, because the sidecar is gone. Later calls of `go_on` report these blocks as removed."""
        for group_id, host in enumerate(self._hosts):
            self._past.append((group_id, _pages(host)))
        self._hosts = [SlotIndex(0) for _ in self._hosts]
        self._disk.begin_again()
        self._disk.finish_loading()
        self.remote.clear()
        self._lost.clear()
        self.num_changes += 1

    def go_on(self) -> None:
        """Report the next batch of a lost sidecar's blocks as removed, unless a new sidecar has them."""
        if self._past:
            group_id, pages = self._past[0]
            page = next(pages, None)
            if page is None:
                self._past.popleft()
            else:
                self._tell(BlockRemoved(Tier.HOST, group_id, self._unknown(group_id, page, Tier.HOST)))
        elif (forgotten := self._disk.pop_forgotten()) is not None:
            group_id, names = forgotten.group_id, forgotten.names
            self._tell(BlockRemoved(Tier.DISK, group_id, self._unknown(group_id, names, Tier.DISK)))

    def pop_lost(self) -> Sequence[Lost]:
        """Return the blocks that have left both host memory and disk since the last call, see `LowerTiers.pop_lost`."""
        if not self._lost:
            return ()
        lost, self._lost = self._lost, []
        return lost

    def _unknown(self, group_id: int, names: Sequence[BlockName], tier: Tier) -> list[BlockName]:
        """Return those of *names* that the current sidecar has not reported to be in *tier*."""
        if tier is Tier.HOST:
            is_there = [slot != ABSENT for slot in self._hosts[group_id].get_all(names, ABSENT)]
        else:
            is_there = self._disk.are_held(group_id, names).tolist()
        return [name for name, is_known in zip(names, is_there, strict=True) if not is_known]

    def _lose(self, group_id: int, names: Sequence[BlockName], tier: Tier, cause: EvictionCause) -> None:
        if names:
            self._lost.append(Lost(group_id, names, tier, cause))

    def _tell(self, event: BlockStored | BlockRemoved) -> None:
        self.num_changes += 1
        if self._events is not None and event.names:
            self._events.append(event)


def _pages(host: SlotIndex) -> Iterator[list[BlockName]]:
    names = [name for name, _ in host.items()]
    for start in range(0, len(names), NAMES_AT_ONCE):
        yield names[start : start + NAMES_AT_ONCE]
