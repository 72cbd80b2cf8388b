"""`Load`: the transfer of one prompt's prefix from lower tiers into host memory, where its blocks are verified."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.connectors.vllm_connector.digests import Digests
from kvtier.connectors.vllm_connector.names import RequestNames
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import ON_DISK, ON_REMOTE, Fetch, LowerTiers, Places
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup, longest_hit
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.block_memory import HostMemory


class _State(IntEnum):
    """The state of one block of a load."""

    COMING = 0  # not in host memory yet
    UNVERIFIED = 1  # leased
    GOOD = 2  # leased, and its bytes match its digest
    LOST = 3  # failed, corrupt or released


@dataclass(slots=True)
class _Part:
    """The blocks of a load that belong to one group. *first* is the first block's index in the request."""

    first: int
    fetch: Fetch
    names: Sequence[BlockName]
    places: Places  # where each block was when the load began
    states: npt.NDArray[np.uint8] = field(init=False)  # of `_State`
    come: list[int] = field(default_factory=list)  # indices of blocks that are leased but not submitted to `Digests`

    def __post_init__(self) -> None:
        self.states = np.full(len(self.names), _State.COMING, np.uint8)


@dataclass(frozen=True, slots=True)
class Where:
    """The parts of the connector that a load uses. *on_corrupt* is called for each corrupt block."""

    tiers: LowerTiers
    groups: Sequence[AttentionGroup]
    memories: Sequence[HostMemory]
    digests: Digests
    on_corrupt: Callable[[], None]


class Load:
    """The transfer into host memory of the blocks that a request needs to continue at token *end*.

    vLLM already has the blocks before token *start*. Each block is leased, and verified against its digest once it is
    in its host slot. A verified block stays valid even if the sidecar ends, because its slot is leased and the memory
    stays mapped. `release` ends all leases. All methods are called under the connector's lock.
    """

    def __init__(self, where: Where, names: RequestNames, tenant: bytes, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self._where = where
        self._parts = [self._begin(group_id, names, tenant) for group_id in range(len(where.groups))]
        for part in self._parts:
            self._verify(part)

    @property
    def is_done(self) -> bool:
        """True if every block is verified or lost."""
        return not any((part.states <= _State.UNVERIFIED).any() for part in self._parts)

    @property
    def num_tokens(self) -> int:
        """Number of leading tokens that vLLM need not compute if the request continues now.

        vLLM itself has the first `start` of them. The others are covered by loaded blocks that match their digests.
        """
        return max(self.start, longest_hit(self.end, self._where.groups, self._first_hole))

    def slots_of(self, group_id: int, blocks: Sequence[int]) -> list[int | None]:
        """Return the host slot of each of *blocks*, or None for a block that is not verified."""
        part = self._parts[group_id]
        found: list[int | None] = []
        for block in blocks:
            place = block - part.first
            is_good = 0 <= place < len(part.states) and part.states[place] == _State.GOOD
            found.append(int(part.fetch.slots[place]) if is_good else None)
        return found

    def tokens_by_tier(self, start: int, end: int) -> dict[Tier, int]:
        """Return how many of the tokens *start* to before *end* were in each tier when the load began.

        The count uses a group with full attention if there is one, because such a group has blocks for all tokens. If
        no group has, all tokens count for the tier of the last block.
        """
        groups = self._where.groups
        group_id = next((i for i, group in enumerate(groups) if not group.forgets), None)
        if group_id is None:
            last = self._parts[0].places[-1] if len(self._parts[0].places) else None
            tier = Tier.DISK if last == ON_DISK else Tier.REMOTE if last == ON_REMOTE else Tier.HOST
            return {**dict.fromkeys((Tier.HOST, Tier.DISK, Tier.REMOTE), 0), tier: end - start}
        part, size = self._parts[group_id], groups[group_id].block_size
        blocks = slice(max(0, start // size - part.first), max(0, end // size - part.first))
        places = part.places[blocks]
        from_disk, from_remote = (int(np.count_nonzero(places == where)) * size for where in (ON_DISK, ON_REMOTE))
        return {Tier.HOST: end - start - from_disk - from_remote, Tier.DISK: from_disk, Tier.REMOTE: from_remote}

    def poll(self) -> None:
        """Start to verify the blocks that have arrived in host memory."""
        for part in self._parts:
            self._verify(part)

    def release(self) -> None:
        """End all leases and stop waiting for blocks."""
        for part in self._parts:
            part.states[:] = _State.LOST
            part.come.clear()
            part.fetch.release(range(len(part.states))[::-1])

    def _begin(self, group_id: int, names: RequestNames, tenant: bytes) -> _Part:
        where, group = self._where, self._where.groups[group_id]
        size = group.block_size
        first = max(self.start // size, group.first_needed(self.end))
        wanted = names.of(size, first, self.end // size)
        parent = names.of(size, first - 1, first)[0] if first else None
        parents = [None] * len(wanted) if group.forgets else [parent, *wanted[:-1]][: len(wanted)]
        places = where.tiers.find(group_id, wanted)
        blocks = NamedBlocks(wanted, parents, tenant)
        part: _Part

        def on_fetched(_: Fetch, place: int, failure: Reason | None) -> None:
            if part.states[place] != _State.COMING:
                return
            part.states[place] = _State.UNVERIFIED if failure is None else _State.LOST
            if failure is None:
                part.come.append(place)

        fetch = where.tiers.fetch(group_id, blocks, on_fetched)
        part = _Part(first, fetch, wanted, places)
        for place in np.flatnonzero(fetch.slots != ABSENT).tolist():
            on_fetched(fetch, place, None)
        for place, failure in fetch.failures.items():
            on_fetched(fetch, place, failure)
        return part

    def _verify(self, part: _Part) -> None:
        if not part.come:
            return
        places, part.come = part.come, []
        memory = self._where.memories[part.fetch.group_id]

        def on_taken(which: range, digests: Sequence[bytes] | None) -> None:
            for number, i in enumerate(which):
                place = places[i]
                if part.states[place] != _State.UNVERIFIED:  # released meanwhile
                    continue
                if digests is not None and digests[number] == known[i]:
                    part.states[place] = _State.GOOD
                else:
                    self._on_bad(part, place, is_corrupt=digests is not None)

        known = [part.fetch.digest(place) for place in places]
        self._where.digests.take(memory, part.fetch.slots[places].tolist(), on_taken)

    def _on_bad(self, part: _Part, place: int, is_corrupt: bool) -> None:
        part.states[place] = _State.LOST
        part.fetch.release([place])
        if is_corrupt:
            self._where.on_corrupt()
            self._where.tiers.forget(part.fetch.group_id, [part.names[place]])

    def _first_hole(self, group_id: int, start: int, end: int) -> int:
        """Return the first of the blocks *start* to before *end* that is not verified, or *end* if there is none.

        Blocks before the load's start count as verified, because vLLM has them.
        """
        part, size = self._parts[group_id], self._where.groups[group_id].block_size
        for block in range(max(start, self.start // size), end):
            place = block - part.first
            if place < 0 or part.states[place] != _State.GOOD:
                return block
        return end
