"""Pins: prefixes kept in host memory for later requests, for example for queued prompts and pinned documents."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.cleared_blocks import Leftovers
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.down.host_spill import HostSpill
from kvtier.tiers.lower.lower_tiers import NOWHERE, Fetch, ReadPriority
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import alignment
from kvtier.tiers.naming.named_blocks import BlockIds, blocks_of, names_of
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.residency import GroupTiers, Residency

RETRY_S = 0.02  # pause before the blocks missing in host memory are looked up again
RELEASED_AT_ONCE = 1024  # leases of ended pins released per call, which takes 0.3 ms
PART = 32  # blocks looked up per call of `pump` or `pin`; with 48, calls took up to 2.4 ms
MAX_IN_FLIGHT = 256  # maximum number of blocks in flight from disk, for each attention group of a pin


class Leases:
    """The blocks of one attention group in a pin, and the fetches that load them and lease them in host memory."""

    def __init__(self, group: GroupTiers, blocks: range) -> None:
        self.group = group
        self.blocks = blocks
        self.is_here = np.zeros(len(blocks), np.bool_)  # [block] whether it is leased
        self.is_coming = np.zeros(len(blocks), np.bool_)  # [block] whether it is in flight
        self.fetched: dict[int, tuple[Fetch, int]] = {}  # block to its fetch and its index in the fetch

    @property
    def num_bytes(self) -> int:
        """Total size of the blocks."""
        return len(self.blocks) * self.group.memory.block_bytes

    @property
    def num_coming(self) -> int:
        """Number of blocks that are being loaded."""
        return int(np.count_nonzero(self.is_coming))

    def missing(self, start: int, limit: int) -> npt.NDArray[np.int64]:
        """Return up to *limit* blocks that are not leased, from the block at index *start* on."""
        return start + np.flatnonzero(~self.is_here[start:])[:limit]

    def release(self, limit: int) -> int:
        """Release up to *limit* leases, the last blocks first, and cancel their reads. Return their number."""
        held = np.flatnonzero(self.is_here | self.is_coming)[-limit:]
        self.let_go(held)
        return len(held)

    def let_go(self, blocks: BlockIds) -> None:
        """Release the leases of *blocks*, and cancel their reads.

        The last block is released first, so that the end of the prefix is evicted before its beginning.
        """
        from_tail = [self.fetched.pop(block) for block in blocks[::-1].tolist()]
        for fetch, places in groupby(from_tail, lambda each: each[0]):
            fetch.release([place for _, place in places])
        self.is_here[blocks] = self.is_coming[blocks] = False


@dataclass(slots=True)
class Term:
    """The state shared by all pins that were created between two calls of `Pins.end_all`, which ends them together."""

    has_ended: bool = False


class Pin:
    """A prefix whose blocks are loaded into host memory and kept there until its owner ends the pin."""

    def __init__(self, chain: BlockChain, leases: Sequence[Leases], term: Term) -> None:
        self.chain = chain
        self.term = term
        self.num_bytes = sum(each.num_bytes for each in leases)
        self.leases = leases  # by group
        self.num_absent = sum(len(each.blocks) for each in leases)  # blocks that are not leased yet
        self.look_from = (0, 0)  # index in `leases` and block at which the next lookup of absent blocks starts
        self.look_at = 0.0  # earliest time of the next lookup

    @property
    def is_whole(self) -> bool:
        """True if every block is in host memory, and the pin has not ended."""
        return not self.num_absent and not self.term.has_ended


class Pins:
    """All pins of a cache. Loads their blocks into host memory, and leases them there.

    Blocks are read from disk when nothing more urgent is read, and copied from the device when the bus is free. Each
    call of `pump` looks up some of the missing blocks, starting with the pin that has waited longest. Owned by the
    cache's thread.
    """

    def __init__(
        self,
        residency: Residency,
        host_spill: HostSpill,
        clock: Callable[[], float],
    ) -> None:
        self._groups = residency.groups
        self._lower = residency.lower
        self._host_spill = host_spill
        self._clock = clock
        self._alignment = alignment([group.attention for group in residency.groups])
        self._pins: dict[Pin, None] = {}
        self._absent: dict[Pin, None] = {}  # pins that are not whole, the next one to process first
        self._num_bytes = 0
        self._epoch = self._lower.status.epoch
        self._doubtful: list[Pin] = []  # pins whose leases may be on memory that the tiers no longer use
        self._term = Term()
        self._ending: deque[dict[Pin, None]] = deque()  # pins that have ended but still have leases
        self._leftovers = Leftovers()

    @property
    def num_bytes(self) -> int:
        """Total bytes of the blocks of all pins, including blocks that are not in host memory yet."""
        return self._num_bytes

    @property
    def max_bytes(self) -> int:
        """Limit on pinned bytes: half of host memory. The rest is for unpinned blocks."""
        return self._lower.status.host_bytes // 2

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be pinned. Negative if callers have passed a larger *max_bytes* to `pin`."""
        return self.max_bytes - self._num_bytes

    def pin(self, chain: BlockChain, num_tokens: int, max_bytes: int | None = None, start: int = 0) -> Pin | None:
        """Keep in host memory, until `unpin`, the blocks that a prompt needs to resume after *num_tokens* tokens.

        Blocks that are only on disk or on the device are copied when nothing more urgent is copied. Blocks before token
        *start* are excluded; the caller keeps them with another pin.

        Returns None if the blocks have more than *max_bytes* (default: `free_bytes`). A caller that passes *max_bytes*
        must itself limit the total size of all pins.
        """
        whole = self.whole_tokens(chain, num_tokens)
        pin = Pin(chain, [Leases(group, group.needed(whole, start)) for group in self._groups], self._term)
        if pin.num_bytes > (self.free_bytes if max_bytes is None else max_bytes):
            return None
        self._pins[pin] = None
        self._num_bytes += pin.num_bytes
        if pin.num_absent and all(self._lower.status.num_slots):
            self._absent[pin] = None
            self._look(pin, PART)
        return pin

    def whole_tokens(self, chain: BlockChain, num_tokens: int) -> int:
        """Return how many of the first *num_tokens* tokens can be pinned: those in full blocks of all groups."""
        return min(num_tokens, len(chain.names) * chain.block_size) // self._alignment * self._alignment

    def unpin(self, pin: Pin) -> None:
        """End the pin: release its leases and cancel its queued reads. Idempotent.

        If the pin has more than `RELEASED_AT_ONCE` leases, later calls of `pump` release the rest.
        """
        if pin not in self._pins:
            return
        del self._pins[pin]
        self._absent.pop(pin, None)
        self._num_bytes -= pin.num_bytes
        pin.num_absent = sum(len(leases.blocks) for leases in pin.leases)  # so that the pin is no longer whole
        if self._release(pin, RELEASED_AT_ONCE) == RELEASED_AT_ONCE:
            self._ending.append({pin: None})

    def end_all(self) -> None:
        """End every pin in one short step. Later calls of `pump` release their leases."""
        self._ending.append(self._pins)
        self._leftovers.add(self._absent)
        self._pins, self._absent, self._doubtful = {}, {}, []
        self._num_bytes = 0
        self._term.has_ended = True
        self._term = Term()

    def pump(self) -> None:
        """Look up at most `PART` missing blocks of the pins whose next lookup is due.

        When `LowerStatus.epoch` has changed, the lower tiers may have lost any block. Then each call also checks one
        pin, and releases the leases on its lost blocks. Each call also releases some leases of pins that have ended.
        """
        self._release_ended()
        if self._epoch != self._lower.status.epoch:
            self._epoch = self._lower.status.epoch
            self._doubtful = list(self._pins)
        if self._doubtful and (doubtful := self._doubtful.pop()) in self._pins:
            self._let_go_of_lost(doubtful)
        if not self._absent:
            return
        num_left, now = PART, self._clock()
        for pin in [pin for pin in self._absent if pin.look_at <= now]:
            if num_left <= 0:
                break
            num_left -= self._look(pin, num_left)
            if pin in self._absent and pin.look_at > now:  # all were looked up: move the pin to the end
                del self._absent[pin]
                self._absent[pin] = None

    def _release_ended(self) -> None:
        """Release at most `RELEASED_AT_ONCE` leases of pins that have ended."""
        num_left = RELEASED_AT_ONCE
        while self._ending and num_left > 0:
            pins = self._ending[0]
            if not pins:
                self._ending.popleft()
                continue
            pin = next(reversed(pins))
            num_released = self._release(pin, num_left)
            if num_released < num_left:  # the pin has no more leases
                del pins[pin]
            num_left -= max(num_released, RELEASED_AT_ONCE // 32)
        self._leftovers.free_some()

    def _release(self, pin: Pin, limit: int) -> int:
        """Release up to *limit* leases of a pin, and return how many were released."""
        num_left = limit
        for leases in reversed(pin.leases):
            num_left -= leases.release(num_left) if num_left else 0
        return limit - num_left

    def _let_go_of_lost(self, pin: Pin) -> None:
        """Release the pin's leases on blocks that the lower tiers have lost, so that these are looked up again."""
        for leases in pin.leases:
            if not len(here := np.flatnonzero(leases.is_here)):
                continue
            found = self._lower.find(
                leases.group.id, names_of(pin.chain, leases.group.attention, leases.blocks.start + here)
            )
            leased = np.array([fetch.slots[number] for fetch, number in map(leases.fetched.__getitem__, here.tolist())])
            lost = here[found != leased]
            leases.let_go(lost)
            pin.num_absent += len(lost)
        if pin.num_absent:
            self._absent[pin] = None

    def _look(self, pin: Pin, limit: int) -> int:
        number, start = pin.look_from
        absent = pin.leases[number].missing(start, limit)
        if len(absent):
            self._seek(pin, pin.leases[number], absent)
        if len(absent) == limit:
            pin.look_from = number, int(absent[-1]) + 1
        elif number + 1 < len(pin.leases):
            pin.look_from = number + 1, 0
        else:
            pin.look_from = 0, 0
            pin.look_at = self._clock() + RETRY_S
        return max(1, len(absent))  # at least 1, so that `pump` processes at most `PART` pins per call

    def _seek(self, pin: Pin, leases: Leases, places: BlockIds) -> None:
        """Fetch the blocks that the lower tiers hold; start to copy blocks that are only on the device to the host."""
        group = leases.group
        places = places[~leases.is_coming[places]]
        names = names_of(pin.chain, group.attention, leases.blocks.start + places)
        found = self._lower.find(group.id, names)
        is_read = found != NOWHERE
        is_read &= (found >= 0) | (np.cumsum(found < 0) <= MAX_IN_FLIGHT - leases.num_coming)
        if is_read.any():
            self._fetch(pin, leases, places[is_read])
        nowhere = np.flatnonzero(found == NOWHERE).tolist()
        on_device = group.pool.find_all([names[place] for place in nowhere])
        if (on_device != ABSENT).any():
            self._host_spill.copy_down(group, on_device[on_device != ABSENT].tolist())

    def _fetch(self, pin: Pin, leases: Leases, places: BlockIds) -> None:
        wanted = blocks_of(pin.chain, leases.group.attention, leases.blocks.start + places)
        fetch = self._lower.fetch(
            leases.group.id, wanted, partial(self._on_fetched, pin, leases, places), priority=ReadPriority.LATER
        )
        is_here = fetch.slots != ABSENT
        leases.is_coming[places[~is_here]] = True
        leases.fetched.update((block, (fetch, number)) for number, block in enumerate(places.tolist()))
        self._mark_here(pin, leases, places[is_here])

    def _mark_here(self, pin: Pin, leases: Leases, places: BlockIds) -> None:
        leases.is_here[places] = True
        pin.num_absent -= len(places)
        if not pin.num_absent:
            self._absent.pop(pin, None)

    def _on_fetched(
        self, pin: Pin, leases: Leases, places: BlockIds, fetch: Fetch, number: int, failure: Reason | None
    ) -> None:
        """Record that a block in flight has arrived, or that its fetch has failed."""
        place = int(places[number])
        if pin not in self._pins:
            return
        leases.is_coming[place] = False
        if failure is None:
            self._mark_here(pin, leases, places[number : number + 1])
        else:
            del leases.fetched[place]
