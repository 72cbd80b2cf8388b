"""Holds: prefixes kept in host memory because they will be wanted: of prompts in a queue, of pinned documents."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import ABSENT
from kvtier.tiers.down.spiller import Spiller
from kvtier.tiers.lower.residency import Residency
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.landings import Landing, Landings

RETRY_S = 0.02  # how often it is looked whether a block has come to host memory
PART = 48  # blocks looked at in one go
MOST_UNDER_WAY = 256  # blocks of a hold on their way from disk: many times what a reader is given at once


class Hold:
    """The blocks of one prefix that are, or will be, in host memory until the hold ends. Its owner ends it."""

    def __init__(self, chain: BlockChain, blocks: Sequence[range], num_bytes: int) -> None:
        """*num_bytes*: of all its blocks."""
        self.chain = chain
        self.num_bytes = num_bytes
        self.blocks = list(blocks)
        self.slots = [np.full(len(needed), ABSENT, np.int32) for needed in blocks]  # [group][block], each leased
        self.num_absent = sum(map(len, blocks))  # not there yet
        self.landings: list[dict[int, Landing]] = [{} for _ in blocks]  # [group] on their way from disk, by place
        self.look_from = (0, 0)  # the group and the place where looking for what is absent goes on
        self.look_at = 0.0  # not before

    @property
    def is_whole(self) -> bool:
        """Whether every block is there."""
        return not self.num_absent


class Holds:
    """Leases on host slots, and how they come to be: from disk when nothing more urgent is read, from the device when
    the bus is free. A hold is looked through in parts, those before others that were not looked at for longest. Owned
    by the cache's thread.
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
        self._holds: dict[Hold, None] = {}
        self._absent: dict[Hold, None] = {}  # of which something is absent, in the order in which they have their turn
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of host memory that all holds take when they are whole."""
        return self._num_bytes

    def begin(self, chain: BlockChain, blocks: Sequence[range]) -> Hold:
        """Hold these blocks, by group."""
        num_bytes = sum(len(needed) * size for needed, size in zip(blocks, self._block_bytes, strict=True))
        hold = Hold(chain, blocks, num_bytes)
        self._holds[hold] = None
        self._num_bytes += num_bytes
        if hold.num_absent and self._residency.host is not None:
            self._absent[hold] = None
            self._look(hold, PART)
        return hold

    def end(self, hold: Hold) -> None:
        """Let go: the leases end, and what is only queued is not read. A second time does nothing."""
        if hold not in self._holds:
            return
        del self._holds[hold]
        self._absent.pop(hold, None)
        self._num_bytes -= hold.num_bytes
        for group_id, (slots, landings) in enumerate(zip(hold.slots, hold.landings, strict=True)):
            self._landings.leave(landings.values(), hold)
            landings.clear()
            if self._residency.host is not None:  # the tail first, so that it is evicted first
                self._residency.host.pools[group_id].release(slots[slots != ABSENT][::-1])
            slots.fill(ABSENT)
        hold.num_absent = sum(map(len, hold.blocks))  # it is not whole any more

    def end_all(self) -> None:
        """Let everything go."""
        for hold in list(self._holds):
            self.end(hold)

    def pump(self) -> None:
        """Look for what is not there yet: for some of it, now and then."""
        num_left, now = PART, self._clock()
        for hold in [hold for hold in self._absent if hold.look_at <= now]:
            if num_left <= 0:
                break
            num_left -= self._look(hold, num_left)
            if hold in self._absent and hold.look_at > now:  # it has had its turn
                del self._absent[hold]
                self._absent[hold] = None

    def num_leases(self, group_id: int) -> int:
        """Leases that holds have on the host's pool of the group."""
        return sum(int(np.count_nonzero(hold.slots[group_id] != ABSENT)) for hold in self._holds)

    def _look(self, hold: Hold, most: int) -> int:
        """Go on looking through a hold, for up to *most* blocks; how many that were. At its end it rests."""
        group_id, start = hold.look_from
        absent = start + np.flatnonzero(hold.slots[group_id][start:] == ABSENT)[:most]
        if len(absent):
            self._try(hold, group_id, absent)
        if len(absent) == most:
            hold.look_from = group_id, int(absent[-1]) + 1
        elif group_id + 1 < len(self._groups):
            hold.look_from = group_id + 1, 0
        else:
            hold.look_from = 0, 0
            hold.look_at = self._clock() + RETRY_S
        return max(1, len(absent))

    def _try(self, hold: Hold, group_id: int, places: npt.NDArray[np.int64]) -> None:
        """Lease what is in host memory, have read what is on disk, have copied down what is on the device only."""
        host, device, disk = self._residency.host, self._residency.device, self._residency.disk
        assert host is not None, "there is nowhere to hold blocks"
        landings = hold.landings[group_id]
        wanted = [place for place in places.tolist() if place not in landings]
        first, step = hold.blocks[group_id].start, self._groups[group_id].block_size // hold.chain.block_size
        names = [hold.chain.names[(first + place + 1) * step - 1] for place in wanted]
        slots = host.pools[group_id].find_all(names)
        self._came(hold, group_id, np.array(wanted, np.int64)[slots != ABSENT], slots[slots != ABSENT])
        elsewhere = [
            (place, name) for place, name, slot in zip(wanted, names, slots.tolist(), strict=True) if slot == ABSENT
        ]
        to_read = [place for place, name in elsewhere if disk is not None and disk.holds(group_id, name)]
        to_read = to_read[: max(0, MOST_UNDER_WAY - len(landings))]
        ids = [first + place for place in to_read]
        come = self._landings.join(hold.chain, group_id, ids, hold, partial(self._landed, hold), now=False)
        landings.update(zip(to_read, come, strict=True))
        is_read = set(to_read)
        on_device = device.pools[group_id].find_all([name for place, name in elsewhere if place not in is_read])
        if (on_device != ABSENT).any():
            self._spiller.copy_down(group_id, on_device[on_device != ABSENT].tolist())

    def _came(self, hold: Hold, group_id: int, places: npt.NDArray[np.int64], slots: npt.NDArray[np.int32]) -> None:
        """These blocks are in host memory."""
        assert self._residency.host is not None, "a block came to a host tier that is not there"
        self._residency.host.pools[group_id].lease(slots)
        hold.slots[group_id][places] = slots
        hold.num_absent -= len(slots)
        if not hold.num_absent:
            self._absent.pop(hold, None)

    def _landed(self, hold: Hold, landing: Landing, failure: Reason | None) -> None:
        place = landing.block_id - hold.blocks[landing.group_id].start
        del hold.landings[landing.group_id][place]
        if failure is None and landing.host_slot is not None:
            slots = np.array([landing.host_slot], np.int32)
            self._came(hold, landing.group_id, np.array([place]), slots)
