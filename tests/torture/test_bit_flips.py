"""One flipped bit in a store's files costs no wrong byte, no hang, and two restarts of its process at most.

The short form of `bench/store_bit_flips.py`, which has the long one: its stores, each opened as an engine opens it.
"""

import pytest
from store_bit_flips import Flip, Table, Template, flip_all, judge_alone, templates

from kvtier.store.boot_mark import BootMark


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
            template.restore()
            flip.make(template.settings.folder)
            assert BootMark.read(template.settings.folder) == mark, flip
    table = Table()

    judge_alone(stores[0], Flip("boot_mark", 3, 1), table)

    assert_survived(table, seed)
    assert table.num_emptied == 0


def test_flips_in_every_page_of_the_index_are_survived(stores: list[Template], seed: int) -> None:
    """In the head of the page, where LMDB believes what it reads."""
    table = Table()

    for template in stores[:1]:
        for page in range(0, template.num_index_pages, 7):
            judge_alone(template, Flip("data.mdb", page * 4096 + 14, 3), table)

    assert_survived(table, seed)
