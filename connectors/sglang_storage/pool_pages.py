"""`PoolPages` and `hit_of`: the pages of SGLang's host pools on disk, and which prefixes of a prompt all pools have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang_storage.page_runs import PageRuns
from kvtier.connectors.staged_disk import Rows, StagedDisk
from kvtier.tiers.naming.block_hash import BlockName


class PoolPages:
    """The pages of one host pool on disk. They form a group of blocks of their own.

    A page is found only under its own name: the hash of all tokens before its end. So the states after a prompt are
    never those of another prompt, or of another position.
    """

    def __init__(self, disk: StagedDisk, group_id: int, runs: PageRuns) -> None:
        self._disk = disk
        self._group_id = group_id
        self._runs = runs

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a page."""
        return self._runs.row_bytes

    def num_held(self, names: Sequence[BlockName]) -> int:
        """Return the length of the longest prefix of *names* whose pages are all on disk, without waiting."""
        return self._disk.num_held(names, self._group_id)

    def are_held(self, names: Sequence[BlockName]) -> list[bool]:
        """Return for each of *names* whether its page is on disk, without waiting."""
        return self._disk.are_held(names, self._group_id)

    def load(self, names: Sequence[BlockName], host_indices: Any) -> list[bool]:
        """Read pages into the host pool. Return for each page whether it was read.

        Reading stops at the first page that cannot be read. *host_indices* is a tensor with the indices in the pool of
        all tokens of the pages. Nothing is read if their number is wrong.
        """
        if not self._fit(names, host_indices):
            return [False] * len(names)
        pages = self._runs.addresses(host_indices)

        def take(places: range, rows: Rows) -> None:
            self._runs.read(rows, pages[places.start : places.stop])

        num_read = self._disk.load(names, take, self._group_id)
        return [place < num_read for place in range(len(names))]

    def store(self, names: Sequence[BlockName], parent: BlockName | None, host_indices: Any) -> list[bool]:
        """Write pages of the host pool to disk. Return for each page whether it is on disk.

        *parent* is the name of the page that precedes *names*, if known. For *host_indices*, see `load`.
        """
        if not self._fit(names, host_indices):
            return [False] * len(names)
        pages = self._runs.addresses(host_indices)

        def fill(places: range, rows: Rows) -> None:
            self._runs.write(rows, pages[places.start : places.stop])

        return self._disk.store(names, parent, fill, self._group_id)

    def _fit(self, names: Sequence[BlockName], host_indices: Any) -> bool:
        return host_indices is not None and len(host_indices) == len(names) * self._runs.page_size


@dataclass(frozen=True, slots=True)
class Needed:
    """The pages of a pool that a hit needs, in addition to the keys and values of all its tokens.

    *num_last* counts pages before the hit's end, for example one state, or the pages of a sliding window. None means
    all pages of the hit.
    """

    pool: str
    num_last: int | None


@dataclass(frozen=True, slots=True)
class Hit:
    """The prefixes of a prompt that are on disk. All lengths are numbers of pages."""

    ends: Sequence[int]  # lengths of all prefixes that every pool has, in ascending order
    by_pool: Mapping[str, int]  # length of the longest prefix that each pool has, if it has one

    @property
    def num_pages(self) -> int:
        """Length of the longest prefix that every pool has."""
        return max(self.ends, default=0)


def hit_of(names: Sequence[BlockName], pools: Mapping[str, PoolPages], base: str, needed: Sequence[Needed]) -> Hit:
    """Return the prefixes of *names* that can be loaded from all pools, without waiting.

    Args:
        names: The names of a prompt's pages, in order.
        pools: The pools by name.
        base: The name of the pool with keys and values, of which a prefix needs all pages.
        needed: What a prefix needs of other pools. If one of them is not in *pools*, there is no hit.
    """
    num_held = pools[base].num_held(names)
    names = names[:num_held]
    ends = list(range(1, num_held + 1))
    by_pool = {base: num_held}
    for need in needed:
        pool = pools.get(need.pool)
        of_pool = [] if pool is None else ends_of(pool.are_held(names), need.num_last)
        by_pool[need.pool] = max(of_pool, default=0)
        ends = sorted(set(ends) & set(of_pool))
    return Hit(ends, {pool: length for pool, length in by_pool.items() if length})


def ends_of(is_held: Sequence[bool], num_last: int | None) -> list[int]:
    """Return the lengths of the prefixes whose last *num_last* pages are held, or all pages if *num_last* is None.

    A prefix that is shorter than *num_last* needs all of its pages.
    """
    ends: list[int] = []
    num_in_row = 0
    for length, held in enumerate(is_held, 1):
        num_in_row = num_in_row + 1 if held else 0
        if num_in_row >= (length if num_last is None else min(num_last, length)):
            ends.append(length)
    return ends
