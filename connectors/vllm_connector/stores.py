"""`Stores`: the transfer of computed blocks from vLLM into the sidecar's host memory."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvtier.connectors.vllm_connector.digests import Digests
from kvtier.connectors.vllm_connector.names import RequestNames
from kvtier.connectors.vllm_connector.step_work import PageCopies
from kvtier.connectors.vllm_connector.taint import Placement
from kvtier.connectors.vllm_connector.vllm_request import NULL_PAGE, StatePage
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.lower.lower_tiers import LowerTiers, are_kept
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import number_of
from kvtier.transfer.block_memory import HostMemory


@dataclass(slots=True)
class Offer:
    """The names of the blocks of one request that should be stored, and the progress so far.

    *num_offered* is the number of blocks, per group, that need no further attempt: they are in lower tiers, on their
    way there, or cannot be stored. It is always 0 for groups of recurrent states, see `StatePage`.
    """

    names: RequestNames
    tenant: bytes
    num_offered: list[int]


@dataclass(slots=True, eq=False)
class _Copied:
    """A row: consecutive blocks of one request and group, and the host slots that workers copy them to.

    *slots* and *names* are in reverse order: the last block comes first.
    """

    offer: Offer
    placement: Placement  # whose pages the workers copy
    group_id: int
    first: int  # index of the row's first block in its request
    slots: list[int]
    names: list[BlockName]
    parent: BlockName | None
    owner: int
    pages: list[int]  # in the order of the request's blocks
    is_late: bool  # see `PageCopies`
    is_discarded: bool = False


@dataclass(slots=True)
class _Digested:
    """Blocks of one group that workers have copied, while their digests are being computed."""

    rows: Sequence[_Copied]
    slots: list[int]  # of all rows
    digests: list[bytes]
    num_taken: int = 0


class Stores:
    """The transfer of all requests' computed blocks into the sidecar's host memory.

    First, a host slot is reserved for a block. In the step after the one that computed the block, workers copy the
    block's page into the slot. They copy it after that step's forward pass if the page is certain to stay unchanged
    until then, and otherwise before the forward pass. Then the slot's digest is computed, and the block is published,
    so that lookups find it. If no slot is free, another attempt is made in a later step. All methods are called under
    the connector's lock.

    A request's pages of recurrent states have no fixed positions: vLLM keeps few of them, and moves and overwrites
    them. So a state is stored only from the page that vLLM names (a `StatePage`), and only in the next step.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        groups: Sequence[AttentionGroup],
        memories: Sequence[HostMemory],
        digests: Digests,
        num_workers: int,
        on_stored: Callable[[int], None],
        on_failed: Callable[[int], None],
    ) -> None:
        """Create an object that has no blocks to transfer.

        Each of *num_workers* workers copies a part of each block. The object calls *on_stored* with the number of
        blocks that were published, and *on_failed* with the number of blocks that could not be stored.
        """
        self._tiers = tiers
        self._groups = groups
        self._memories = memories
        self._digests = digests
        self._num_workers = num_workers
        self._on_stored = on_stored
        self._on_failed = on_failed
        self._copying: dict[int, list[_Copied]] = {}  # by number of the step
        self._ends: dict[int, list[bool]] = {}  # by number of the step: whether all copies succeeded, per worker
        self._under_way: set[tuple[int, BlockName]] = set()
        self._digesting: list[Sequence[_Copied]] = []

    @property
    def is_digesting(self) -> bool:
        """True if copied blocks wait for their digests before they are published."""
        return bool(self._digesting)

    def copies(
        self,
        step: int,
        offer: Offer,
        num_tokens: int,
        placement: Placement,
        left: list[int],
        overwritten: Collection[int] = (),
        *,
        stays: bool = False,
    ) -> list[PageCopies]:
        """Reserve slots for a request's blocks that are not stored yet, and return the copies to make in this step.

        Only blocks of the request's first *num_tokens* tokens are copied. *left* is the number of blocks per group that
        may still be copied in this step. The method reduces it in place. *overwritten* has the pages that vLLM may
        change before the workers can copy them. Blocks in these pages are not stored. If *stays* is True, the
        request keeps its pages in this step. Then pages of groups that keep all tokens (no sliding windows) may be
        copied late.
        """
        copies = []
        for group_id, group in enumerate(self._groups):
            start, size = offer.num_offered[group_id], group.block_size
            end = min(num_tokens // size, offer.names.num_blocks(size), len(placement.pages[group_id]))
            if group.resumes_inside and start < end:
                blocks, pages = range(start, end), placement.pages[group_id][start:end]
                is_late = stays and not group.forgets
                row_copies, offer.num_offered[group_id] = self._copies(
                    step, offer, group_id, blocks, pages, placement, left, overwritten, is_late
                )
                copies += row_copies
        return copies

    def state_copies(
        self,
        step: int,
        offer: Offer,
        num_tokens: int,
        states: Sequence[StatePage],
        placement: Placement,
        left: list[int],
        overwritten: Collection[int] = (),
    ) -> tuple[list[PageCopies], int]:
        """Reserve slots for a request's recurrent states, and return the copies to make in this step.

        Only states at the end of a block of the request's first *num_tokens* tokens are copied. See `copies` for *left*
        and *overwritten*.

        Returns:
            The copies, and the number of states that got no slot. They are not stored, because vLLM may change their
            pages in this step.
        """
        copies, num_lost = list[PageCopies](), 0
        for state in states:
            size = self._groups[state.group_id].block_size
            end = state.num_tokens // size
            if state.num_tokens % size or end > min(num_tokens // size, offer.names.num_blocks(size)):
                continue
            blocks = range(end - 1, end)
            row_copies, next_block = self._copies(
                step, offer, state.group_id, blocks, [state.page], placement, left, overwritten, is_late=False
            )
            copies += row_copies
            num_lost += next_block != end
        return copies, num_lost

    def must_end(self, staying: Collection[Placement], overwritten: Collection[int] = ()) -> bool:
        """Return whether late copies of earlier steps must end before vLLM writes to a page in the step that begins.

        They must end unless all requests whose pages are copied late are in *staying*, the placements of the requests
        that keep their pages in the step. *overwritten* has the pages that vLLM may already have changed. Rows of late
        copies from these pages are discarded.
        """
        leaving = [
            row for rows in self._copying.values() for row in rows if row.is_late and row.placement not in staying
        ]
        for row in leaving:
            if not row.is_discarded and any(page in overwritten for page in row.pages):
                row.is_discarded = True
                self._on_failed(len(row.names))
        return bool(leaving)

    def num_left(self, offer: Offer, num_tokens: int) -> int:
        """Return how many blocks of the request's first *num_tokens* tokens still have to be stored.

        Recurrent states are not counted.
        """
        return sum(
            max(0, min(num_tokens // group.block_size, offer.names.num_blocks(group.block_size)) - num_offered)
            for group, num_offered in zip(self._groups, offer.num_offered, strict=True)
            if group.resumes_inside
        )

    def discard(self, placement: Placement) -> None:
        """Discard blocks that are being copied from a request's pages, if they depend on a page whose load failed.

        Their host slots are given back once the workers have ended the copies. The blocks are stored later, when vLLM
        has computed them anew.
        """
        for row in (row for rows in self._copying.values() for row in rows if row.placement is placement):
            end = (row.first + len(row.names)) * self._groups[row.group_id].block_size
            if placement.limit(end) < end:
                row.is_discarded = True
                row.offer.num_offered[row.group_id] = min(row.offer.num_offered[row.group_id], row.first)

    def on_copied(self, step: int, has_stored: bool) -> None:
        """Record that one worker has ended its copies of a step. *has_stored* is False if some of them failed.

        When all workers have ended theirs, call `on_step_done`.
        """
        if step in self._copying:
            ends = self._ends.setdefault(step, [])
            ends.append(has_stored)
            if len(ends) == self._num_workers:
                self.on_step_done(step, all(ends))

    def on_step_done(self, step: int, has_stored: bool) -> None:
        """Start to compute the digests of the blocks that the workers have copied in a step.

        If *has_stored* is False, the copies failed, and the blocks are given up instead.
        """
        self._ends.pop(step, None)
        done = self._copying.pop(step, [])
        self._give_back([row for row in done if row.is_discarded])
        rows = [row for row in done if not row.is_discarded]
        if not has_stored:
            self._fail(rows)
            return
        for group_id in range(len(self._groups)):
            if of_group := [row for row in rows if row.group_id == group_id]:
                self._take_digests(group_id, of_group)

    def discard_all(self) -> None:
        """Discard all blocks that are being copied or digested, so that none of them is published."""
        for rows in (*self._copying.values(), *self._digesting):
            for row in rows:
                row.is_discarded = True

    def _copies(
        self,
        step: int,
        offer: Offer,
        group_id: int,
        blocks: range,
        pages: Sequence[int],
        placement: Placement,
        left: list[int],
        overwritten: Collection[int],
        is_late: bool,
    ) -> tuple[list[PageCopies], int]:
        """Reserve slots for *blocks*, which are in *pages*.

        Returns:
            The copies, and the first block that needs another attempt, or the end of *blocks* if there is none.
        """
        size = self._groups[group_id].block_size
        names = offer.names.of(size, blocks.start, blocks.stop)
        places = self._tiers.find(group_id, names)
        wanted = [
            place
            for place in np.flatnonzero(~are_kept(places)).tolist()
            if pages[place] != NULL_PAGE and (group_id, names[place]) not in self._under_way
        ]
        if lost := [place for place in wanted if pages[place] in overwritten]:
            self._on_failed(len(lost))
            wanted = [place for place in wanted if place not in lost]
        slots = self._tiers.reserve(group_id, min(len(wanted), left[group_id]))
        left[group_id] -= len(slots)
        next_block = blocks.stop if len(slots) == len(wanted) else blocks[wanted[len(slots)]]
        if not slots:
            return [], next_block
        taken = wanted[: len(slots)]
        for start, end in _runs(taken):
            first = blocks[taken[start]]
            parent = offer.names.of(size, first - 1, first)[0] if first else None
            row_names = [names[place] for place in taken[start:end]][::-1]
            row_slots, owner = slots[start:end][::-1], number_of(offer.tenant)
            row_pages = [pages[place] for place in taken[start:end]]
            row = _Copied(offer, placement, group_id, first, row_slots, row_names, parent, owner, row_pages, is_late)
            self._copying.setdefault(step, []).append(row)
            self._under_way.update((group_id, name) for name in row_names)
        return [PageCopies(group_id, [pages[place] for place in taken], slots, is_late)], next_block

    def _take_digests(self, group_id: int, rows: Sequence[_Copied]) -> None:
        """Compute the digests of one step's blocks, then publish all of these blocks in one message.

        Several messages would bring more answers from the sidecar. Each answer wakes a thread of this process, which
        takes the GIL from vLLM's current step.
        """
        slots = [slot for row in rows for slot in row.slots]
        digested = _Digested(rows, slots, [b""] * len(slots))
        self._digesting.append(rows)

        def on_taken(places: range, digests: Sequence[bytes] | None) -> None:
            if digests is not None:
                digested.digests[places.start : places.stop] = digests
            digested.num_taken += len(places)
            if digested.num_taken == len(slots):
                self._digesting.remove(rows)
                self._publish(group_id, digested)

        self._digests.take(self._memories[group_id], slots, on_taken)

    def _publish(self, group_id: int, digested: _Digested) -> None:
        if any(row.is_discarded for row in digested.rows):
            self._give_back(digested.rows)
            return
        if not all(digested.digests):
            self._fail(digested.rows)
            return
        rows, owners, start = list[NamedSpan](), list[int](), 0
        for row in digested.rows:
            self._end(row)
            rows.append(NamedSpan(start, start + len(row.names), row.names, row.parent))
            owners += [row.owner] * len(row.names)
            start += len(row.names)
        slots = np.array(digested.slots, np.intp)
        self._tiers.publish(group_id, slots, rows, digested.digests, np.array(owners, np.uint64))
        self._on_stored(len(slots))

    def _fail(self, rows: Sequence[_Copied]) -> None:
        self._on_failed(sum(len(row.names) for row in rows))
        self._give_back(rows)

    def _give_back(self, rows: Sequence[_Copied]) -> None:
        for row in rows:
            self._end(row)
            self._tiers.abandon(row.group_id, np.array(row.slots, np.intp))

    def _end(self, row: _Copied) -> None:
        self._under_way.difference_update((row.group_id, name) for name in row.names)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and the end index of each run of consecutive numbers."""
    cuts = [0, *(i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places)]
    return list(pairwise(cuts))
