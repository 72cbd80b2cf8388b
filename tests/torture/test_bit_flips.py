"""One flipped bit in a store's files costs no wrong byte, no hang, and two restarts of its process at most.

The short form of `bench/store/store_bit_flips.py`, which has the long one.
"""

from collections.abc import Iterator

import pytest
from flipped_store import NAMESPACE, PAGE_BYTES, Flip, Table, Template, flip_all, judge_alone, templates
from lmdb_pages import map_pages, rows_in

from kvtier.store.lmdb.boot_mark import BootMark

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Template]:
    return templates(tmp_path_factory.mktemp("flips"))


def assert_survived(table: Table, seed: int) -> None:
    assert (table.num_wrong, table.num_hangs, table.num_lost) == (0, 0, 0), f"seed {seed}: {table.remarkable}"


def test_some_hundred_flips_anywhere_are_survived(stores: list[Template], seed: int) -> None:
    tables = flip_all(stores, 360, seed)

    for table in tables.values():
        assert_survived(table, seed)


def test_no_flip_of_a_mark_costs_a_block(stores: list[Template], seed: int) -> None:
    for template in stores:
        template.restore()
        mark = BootMark.read(template.settings.folder)
        for flip in template.small_files():
            flip.make(template.settings.folder)
            assert BootMark.read(template.settings.folder) == mark, flip
            flip.make(template.settings.folder)  # back
    table = Table()

    judge_alone(stores[0], Flip("boot_mark", 3, 1), table)

    assert_survived(table, seed)
    assert table.num_emptied == 0


def test_new_blocks_that_a_page_sends_astray_are_damage(stores: list[Template], seed: int) -> None:
    """A branch page with one key that is far too high makes sense to LMDB, and so do the rows below it: lookups that
    begin there miss them."""
    template, table = stores[0], Table()
    index = template.files["data.mdb"]
    branches = [page for page in range(template.num_index_pages) if index[page * PAGE_BYTES + 10] & 1]
    keys = [list(places_of(NAMESPACE, index, page * PAGE_BYTES)) for page in branches]

    for places in keys:
        if len(places) > 4:
            judge_alone(template, Flip("data.mdb", places[len(places) // 2] + len(NAMESPACE) + 16, 5), table)

    assert table.num_harmless < table.num_flips
    assert_survived(table, seed)


def places_of(what: bytes, data: bytes, page_at: int) -> Iterator[int]:
    """Offset of *what* in a page."""
    place = data.find(what, page_at, page_at + PAGE_BYTES)
    while place >= 0:
        yield place
        place = data.find(what, place + 1, page_at + PAGE_BYTES)


def test_rows_that_claim_more_room_than_the_map_has_are_damage(stores: list[Template], seed: int) -> None:
    """LMDB says that the map is full, when it moves such a row: only the store can tell that it is not."""
    template, table = stores[1], Table()
    index = template.files["data.mdb"]
    leaves = [page for page in map_pages(index).index if rows_in(index, page)]

    for page in leaves[::3]:
        rows = rows_in(index, page)
        judge_alone(template, Flip("data.mdb", rows[len(rows) // 2] + 3, 3), table)  # 128 MiB

    assert_survived(table, seed)
    assert table.num_emptied > 0


def test_flips_in_every_page_of_the_index_are_survived(stores: list[Template], seed: int) -> None:
    """In the head of the page, where LMDB believes what it reads."""
    table = Table()

    for template in stores[:1]:
        for page in range(0, template.num_index_pages, 7):
            judge_alone(template, Flip("data.mdb", page * 4096 + 14, 3), table)

    assert_survived(table, seed)
