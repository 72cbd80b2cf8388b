"""Pins: prefixes kept in host memory because they will be wanted: of prompts in a queue, of pinned documents."""

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
from kvtier.tiers.up.disk_reads import DiskRead, DiskReads

RETRY_S = 0.02  # how often it is looked whether a block has come to host memory
PART = 48  # blocks looked at in one go
MOST_UNDER_WAY = 256  # blocks of a pin on their way from disk: many times what a reader is given at once


class Pin:
    """The blocks of one prefix that are, or will be, in host memory until the pin ends. Its owner ends it."""

    def __init__(self, chain: BlockChain, blocks: Sequence[range], num_bytes: int) -> None:
        """*num_bytes*: of all its blocks."""
        self.chain = chain
        self.num_bytes = num_bytes
        self.blocks = list(blocks)
        self.slots = [np.full(len(needed), ABSENT, np.int32) for needed in blocks]  # [group][block], each leased
        self.num_absent = sum(map(len, blocks))  # not there yet
        self.disk_reads: list[dict[int, DiskRead]] = [{} for _ in blocks]  # [group] on their way from disk, by place
        self.look_from = (0, 0)  # the group and the place where looking for what is absent goes on
        self.look_at = 0.0  # not before

    @property
    def is_whole(self) -> bool:
        """Whether every block is there."""
        return not self.num_absent


class Pins:
    """Leases on host slots, and how they come to be: from disk when nothing more urgent is read, from the device when
    the bus is free. A pin is looked through in parts, those before others that were not looked at for longest. Owned
    by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        block_bytes: Sequence[int],
        disk_reads: DiskReads,
        spiller: Spiller,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._block_bytes = block_bytes
        self._disk_reads = disk_reads
        self._spiller = spiller
        self._clock = clock
        self._pins: dict[Pin, None] = {}
        self._absent: dict[Pin, None] = {}  # of which something is absent, in the order in which they have their turn
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of host memory that all pins take when they are whole."""
        return self._num_bytes

    def begin(self, chain: BlockChain, blocks: Sequence[range]) -> Pin:
        """Pin these blocks, by group."""
        num_bytes = sum(len(needed) * size for needed, size in zip(blocks, self._block_bytes, strict=True))
        pin = Pin(chain, blocks, num_bytes)
        self._pins[pin] = None
        self._num_bytes += num_bytes
        if pin.num_absent and self._residency.host is not None:
            self._absent[pin] = None
            self._look(pin, PART)
        return pin

    def end(self, pin: Pin) -> None:
        """Let go: the leases end, and what is only queued is not read. A second time does nothing."""
        if pin not in self._pins:
            return
        del self._pins[pin]
        self._absent.pop(pin, None)
        self._num_bytes -= pin.num_bytes
        for group_id, (slots, disk_reads) in enumerate(zip(pin.slots, pin.disk_reads, strict=True)):
            self._disk_reads.leave(disk_reads.values(), pin)
            disk_reads.clear()
            if self._residency.host is not None:  # the tail first, so that it is evicted first
                self._residency.host.pools[group_id].release(slots[slots != ABSENT][::-1])
            slots.fill(ABSENT)
        pin.num_absent = sum(map(len, pin.blocks))  # it is not whole any more

    def end_all(self) -> None:
        """Let everything go."""
        for pin in list(self._pins):
            self.end(pin)

    def pump(self) -> None:
        """Look for what is not there yet: for some of it, now and then."""
        num_left, now = PART, self._clock()
        for pin in [pin for pin in self._absent if pin.look_at <= now]:
            if num_left <= 0:
                break
            num_left -= self._look(pin, num_left)
            if pin in self._absent and pin.look_at > now:  # it has had its turn
                del self._absent[pin]
                self._absent[pin] = None

    def num_leases(self, group_id: int) -> int:
        """Leases that pins have on the host's pool of the group."""
        return sum(int(np.count_nonzero(pin.slots[group_id] != ABSENT)) for pin in self._pins)

    def _look(self, pin: Pin, most: int) -> int:
        """Go on looking through a pin, for up to *most* blocks; how many that were. At its end it rests."""
        group_id, start = pin.look_from
        absent = start + np.flatnonzero(pin.slots[group_id][start:] == ABSENT)[:most]
        if len(absent):
            self._try(pin, group_id, absent)
        if len(absent) == most:
            pin.look_from = group_id, int(absent[-1]) + 1
        elif group_id + 1 < len(self._groups):
            pin.look_from = group_id + 1, 0
        else:
            pin.look_from = 0, 0
            pin.look_at = self._clock() + RETRY_S
        return max(1, len(absent))

    def _try(self, pin: Pin, group_id: int, places: npt.NDArray[np.int64]) -> None:
        """Lease what is in host memory, have read what is on disk, have copied down what is on the device only."""
        host, device, disk = self._residency.host, self._residency.device, self._residency.disk
        assert host is not None, "there is nowhere to pin blocks"
        disk_reads = pin.disk_reads[group_id]
        wanted = [place for place in places.tolist() if place not in disk_reads]
        first, step = pin.blocks[group_id].start, self._groups[group_id].block_size // pin.chain.block_size
        names = [pin.chain.names[(first + place + 1) * step - 1] for place in wanted]
        slots = host.pools[group_id].find_all(names)
        self._came(pin, group_id, np.array(wanted, np.int64)[slots != ABSENT], slots[slots != ABSENT])
        elsewhere = [
            (place, name) for place, name, slot in zip(wanted, names, slots.tolist(), strict=True) if slot == ABSENT
        ]
        to_read = [place for place, name in elsewhere if disk is not None and disk.holds(group_id, name)]
        to_read = to_read[: max(0, MOST_UNDER_WAY - len(disk_reads))]
        ids = [first + place for place in to_read]
        come = self._disk_reads.join(pin.chain, group_id, ids, pin, partial(self._landed, pin), now=False)
        disk_reads.update(zip(to_read, come, strict=True))
        is_read = set(to_read)
        on_device = device.pools[group_id].find_all([name for place, name in elsewhere if place not in is_read])
        if (on_device != ABSENT).any():
            self._spiller.copy_down(group_id, on_device[on_device != ABSENT].tolist())

    def _came(self, pin: Pin, group_id: int, places: npt.NDArray[np.int64], slots: npt.NDArray[np.int32]) -> None:
        """These blocks are in host memory."""
        assert self._residency.host is not None, "a block came to a host tier that is not there"
        self._residency.host.pools[group_id].lease(slots)
        pin.slots[group_id][places] = slots
        pin.num_absent -= len(slots)
        if not pin.num_absent:
            self._absent.pop(pin, None)

    def _landed(self, pin: Pin, disk_read: DiskRead, failure: Reason | None) -> None:
        place = disk_read.block_id - pin.blocks[disk_read.group_id].start
        del pin.disk_reads[disk_read.group_id][place]
        if failure is None and disk_read.host_slot is not None:
            slots = np.array([disk_read.host_slot], np.int32)
            self._came(pin, disk_read.group_id, np.array([place]), slots)
