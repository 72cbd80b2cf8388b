"""Pages of SGLang's pools on a disk: a hit ends where all pools have what it needs, and a page is its own name's."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from damaged_files import damage

from kvtier.connectors.sglang_storage.identity import names_of
from kvtier.connectors.sglang_storage.page_runs import PageRuns
from kvtier.connectors.sglang_storage.pool_pages import Hit, Needed, PoolPages, ends_of, hit_of
from kvtier.connectors.staged_disk import StagedDisk
from kvtier.engine.config import DiskConfig, parse_bytes

DEADLINE_S = 60.0
KV, STATES, WINDOW = "kv", "mamba", "swa"
KEYS_BYTES, STATE_BYTES = 96, 40
NUM_PAGES = 10


class HostPool:
    """A host pool as SGLang's, whose pages have two parts each, in tensors of their own."""

    def __init__(self, page_size: int, part_bytes: int, seed: int) -> None:
        self.page_size = page_size
        noise = torch.Generator().manual_seed(seed)
        self.parts = [
            torch.randint(0, 256, (NUM_PAGES * 3, part_bytes), dtype=torch.uint8, generator=noise) for _ in range(2)
        ]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the addresses and the sizes of the parts of some pages."""
        pages = indices[:: self.page_size].tolist()
        places = [part[page // self.page_size].data_ptr() for page in pages for part in self.parts]
        return places, [part.shape[1] for _ in pages for part in self.parts]

    def page(self, number: int) -> bytes:
        return b"".join(part[number].numpy().tobytes() for part in self.parts)

    def indices(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor([number * self.page_size + token for number in numbers for token in range(self.page_size)])


POOLS = {KV: HostPool(4, KEYS_BYTES, 1), STATES: HostPool(1, STATE_BYTES, 2), WINDOW: HostPool(4, KEYS_BYTES, 3)}
PROMPT = names_of([f"prompt {page}" for page in range(NUM_PAGES)])
OTHER = names_of([f"other {page}" for page in range(NUM_PAGES)])
ALL = list(range(NUM_PAGES))


@pytest.fixture
def reopened(tmp_path: Path) -> Iterator[Callable[[], dict[str, PoolPages]]]:
    """Opens the disk, and again after it was closed."""
    disks: list[StagedDisk] = []

    def open_disk() -> dict[str, PoolPages]:
        for disk in disks:
            disk.close()
        runs = {name: PageRuns(pool) for name, pool in POOLS.items()}
        config = DiskConfig(path=str(tmp_path / "store"), capacity=parse_bytes("16MiB"), read_timeout_s=DEADLINE_S)
        disks.append(StagedDisk(config, b"n" * 16, [each.row_bytes for each in runs.values()]))
        assert disks[-1].wait_indexed(DEADLINE_S)
        return {name: PoolPages(disks[-1], group_id, each) for group_id, (name, each) in enumerate(runs.items())}

    yield open_disk
    for disk in disks:
        disk.close()


@pytest.mark.parametrize(
    ("held", "num_last", "ends"),
    [
        ("", None, []),
        ("1101", None, [1, 2]),
        ("0111", None, []),
        ("0101", 1, [2, 4]),
        ("0000", 1, []),
        ("1110111", 3, [1, 2, 3, 7]),
        ("0111", 3, [4]),
        ("1011", 3, [1]),
        ("11", 3, [1, 2]),
    ],
)
def test_a_prefix_ends_where_its_last_pages_are_held(held: str, num_last: int | None, ends: list[int]) -> None:
    assert ends_of([page == "1" for page in held], num_last) == ends


def test_a_hit_ends_where_every_pool_has_what_it_needs(reopened: Callable[[], dict[str, PoolPages]]) -> None:
    pools = reopened()
    pools[KV].store(PROMPT[:9], None, POOLS[KV].indices(ALL[:9]))
    for place in (2, 6, 9):  # states after 3, 7 and 10 pages, the last beyond the keys and values
        pools[STATES].store([PROMPT[place]], None, POOLS[STATES].indices([place]))
    pools[WINDOW].store(PROMPT[4:9], None, POOLS[WINDOW].indices(ALL[4:9]))
    state, window = Needed(STATES, 1), Needed(WINDOW, 2)

    assert hit_of(PROMPT, pools, KV, []) == Hit(list(range(1, 10)), {KV: 9})
    assert hit_of(PROMPT, pools, KV, [state]) == Hit([3, 7], {KV: 9, STATES: 7})
    assert hit_of(PROMPT, pools, KV, [window]) == Hit([6, 7, 8, 9], {KV: 9, WINDOW: 9})
    assert hit_of(PROMPT, pools, KV, [state, window]) == Hit([7], {KV: 9, STATES: 7, WINDOW: 9})
    assert hit_of(PROMPT[:6], pools, KV, [state, window]).num_pages == 0
    assert hit_of(PROMPT, pools, KV, [Needed(WINDOW, None)]).num_pages == 0
    assert hit_of(PROMPT, pools, KV, [Needed("unknown", 1)]).num_pages == 0
    assert hit_of(OTHER, pools, KV, [state]) == Hit([], {})


def test_pages_of_all_pools_come_back_under_their_names(reopened: Callable[[], dict[str, PoolPages]]) -> None:
    """Two prompts, each with a state: after a restart, each gets its own, in other places of the pools."""
    pools = reopened()
    expected = {}
    for prompt, first in ((PROMPT, 0), (OTHER, NUM_PAGES)):
        for name in (KV, WINDOW, STATES):
            names, numbers = (prompt, [first + page for page in ALL]) if name != STATES else (prompt[-1:], [first])
            assert pools[name].store(names, None, POOLS[name].indices(numbers)) == [True] * len(names)
            expected[prompt[0], name] = [POOLS[name].page(number) for number in numbers]

    pools = reopened()
    for prompt in (OTHER, PROMPT):
        for name in (KV, WINDOW, STATES):
            names = prompt if name != STATES else prompt[-1:]
            targets = [2 * NUM_PAGES + page for page in ALL[: len(names)]][::-1]
            assert pools[name].load(names, POOLS[name].indices(targets)) == [True] * len(names)
            assert [POOLS[name].page(number) for number in targets] == expected[prompt[0], name]


def test_a_state_is_not_found_one_page_earlier_or_later(reopened: Callable[[], dict[str, PoolPages]]) -> None:
    pools = reopened()
    pools[STATES].store([PROMPT[4]], None, POOLS[STATES].indices([1]))

    assert pools[STATES].are_held(PROMPT) == [page == 4 for page in ALL]
    assert pools[STATES].load([PROMPT[3]], POOLS[STATES].indices([2])) == [False]
    assert pools[STATES].load([PROMPT[5]], POOLS[STATES].indices([2])) == [False]
    assert not pools[WINDOW].are_held([PROMPT[4]])[0]


def test_a_damaged_state_leaves_its_place_in_the_pool_as_it_was(
    reopened: Callable[[], dict[str, PoolPages]], tmp_path: Path
) -> None:
    pools = reopened()
    pools[STATES].store([PROMPT[4]], None, POOLS[STATES].indices([1]))
    before = POOLS[STATES].page(5)
    pools = reopened()
    damage(tmp_path / "store", POOLS[STATES].page(1))

    assert pools[STATES].load([PROMPT[4]], POOLS[STATES].indices([5])) == [False]
    assert POOLS[STATES].page(5) == before
    assert not pools[STATES].are_held([PROMPT[4]])[0]


@pytest.mark.parametrize("indices", [None, torch.arange(7), torch.arange(2)])
def test_nothing_is_stored_or_loaded_with_a_wrong_number_of_indices(
    reopened: Callable[[], dict[str, PoolPages]], indices: torch.Tensor | None
) -> None:
    pools = reopened()
    pools[KV].store(PROMPT[:2], None, POOLS[KV].indices([0, 1]))

    assert pools[KV].store(OTHER[:2], None, indices) == [False, False]
    assert pools[KV].load(PROMPT[:2], indices) == [False, False]
    assert not any(pools[KV].are_held(OTHER[:2]))
