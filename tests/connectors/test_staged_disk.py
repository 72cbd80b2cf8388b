"""A disk whose rows pass through shared ones: all parts in order, threads side by side, copies that fail."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from damaged_files import damage

from kvtier.connectors.staged_disk import NUM_PARTS, PART_BYTES, Rows, StagedDisk
from kvtier.engine.config import DiskConfig, parse_bytes
from kvtier.tiers.naming.block_hash import BlockName

pytestmark = pytest.mark.long

ROW_BYTES = (3 << 20) + 100  # five to a part, and no whole pages
PART_ROWS = PART_BYTES // ROW_BYTES
DEADLINE_S = 60.0


def names(numbers: Sequence[int]) -> list[BlockName]:
    return [BlockName(sha256(b"%d" % number).digest()) for number in numbers]


def row_of(number: int) -> bytes:
    return random.Random(number).randbytes(ROW_BYTES)


class Engine:
    """Copies rows of its own, and notes in which order it is asked for them."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.rows = [row_of(number) for number in numbers]
        self.taken: dict[int, bytes] = {}
        self.asked: list[int] = []

    def fill(self, places: range, rows: Rows) -> None:
        for place, row in zip(places, rows, strict=True):
            self.asked.append(place)
            row[:] = np.frombuffer(self.rows[place], np.uint8)

    def take(self, places: range, rows: Rows) -> None:
        for place, row in zip(places, rows, strict=True):
            self.asked.append(place)
            self.taken[place] = row.tobytes()


@contextmanager
def opened(folder: Path) -> Iterator[StagedDisk]:
    config = DiskConfig(path=str(folder / "store"), capacity=parse_bytes("512MiB"), read_timeout_s=DEADLINE_S)
    disk = StagedDisk(config, b"n" * 16, [ROW_BYTES])
    try:
        assert disk.wait_indexed(DEADLINE_S)
        yield disk
    finally:
        disk.close()


def test_more_rows_than_all_parts_have_come_back_in_order(tmp_path: Path) -> None:
    engine = Engine(range(NUM_PARTS * PART_ROWS + 3))
    all_of_them = list(range(len(engine.rows)))
    with opened(tmp_path) as disk:
        assert disk.store(names(engine.numbers), None, engine.fill) == [True] * len(engine.rows)
        assert engine.asked == all_of_them
    with opened(tmp_path) as disk:
        engine.asked.clear()
        assert disk.num_held(names([*engine.numbers, 1000])) == len(engine.rows)
        assert disk.load(names(engine.numbers), engine.take) == len(engine.rows)
    assert engine.asked == all_of_them
    assert [engine.taken[place] for place in all_of_them] == engine.rows


def test_blocks_of_two_groups_with_equal_names_are_apart_and_have_their_own_sizes(tmp_path: Path) -> None:
    """Also if a block of a group is larger than a part usually is."""
    sizes = [1000, PART_BYTES + 5]
    config = DiskConfig(path=str(tmp_path / "store"), capacity=parse_bytes("512MiB"), read_timeout_s=DEADLINE_S)
    rows = [random.Random(group_id).randbytes(3 * size) for group_id, size in enumerate(sizes)]
    found: list[dict[int, bytes]] = [{}, {}]
    disk = StagedDisk(config, b"n" * 16, sizes)
    try:
        assert disk.wait_indexed(DEADLINE_S)
        for group_id, size in enumerate(sizes):
            assert disk.num_held(names(range(3)), group_id) == 0

            def fill(places: range, to: Rows, group_id: int = group_id, size: int = size) -> None:
                for place, row in zip(places, to, strict=True):
                    row[:] = np.frombuffer(rows[group_id][place * size : (place + 1) * size], np.uint8)

            assert disk.store(names(range(3)), None, fill, group_id) == [True] * 3
        for group_id in range(2):

            def take(places: range, of: Rows, group_id: int = group_id) -> None:
                found[group_id] |= {place: row.tobytes() for place, row in zip(places, of, strict=True)}

            assert disk.load(names(range(3)), take, group_id) == 3
    finally:
        disk.close()

    assert [b"".join(found[group_id][place] for place in range(3)) for group_id in range(2)] == rows


def test_nothing_behind_a_damaged_row_is_taken(tmp_path: Path) -> None:
    engine = Engine(range(3 * PART_ROWS))
    bad = PART_ROWS + 2
    with opened(tmp_path) as disk:
        disk.store(names(engine.numbers), None, engine.fill)
    damage(tmp_path / "store", engine.rows[bad])

    with opened(tmp_path) as disk:
        assert disk.load(names(engine.numbers), engine.take) == bad
        assert sorted(engine.taken) == list(range(bad))
        assert disk.are_held(names([bad - 1, bad])) == [True, False]


def test_a_copy_that_fails_is_raised_and_leaves_all_parts_free(tmp_path: Path) -> None:
    engine = Engine(range(3 * PART_ROWS))

    def broken(places: range, rows: Rows) -> None:
        raise MemoryError(f"{places}")

    with opened(tmp_path) as disk:
        for _ in range(NUM_PARTS + 1):
            with pytest.raises(MemoryError):
                disk.store(names(engine.numbers), None, broken)
        assert disk.num_held(names(engine.numbers)) == 0
        assert all(disk.store(names(engine.numbers), None, engine.fill))
        for _ in range(NUM_PARTS + 1):
            with pytest.raises(MemoryError):
                disk.load(names(engine.numbers), broken)
        assert disk.load(names(engine.numbers), engine.take) == len(engine.rows)
    assert [engine.taken[place] for place in range(len(engine.rows))] == engine.rows


def test_more_threads_than_parts_get_their_own_rows(tmp_path: Path) -> None:
    engines = [Engine(range(100 * thread, 100 * thread + 2 * PART_ROWS)) for thread in range(2 * NUM_PARTS)]
    with opened(tmp_path) as disk:

        def work(engine: Engine) -> None:
            for _ in range(3):
                disk.store(names(engine.numbers), None, engine.fill)
                disk.load(names(engine.numbers), engine.take)

        threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
    for engine in engines:
        assert engine.taken
        assert all(row == engine.rows[place] for place, row in engine.taken.items())


def test_a_closed_disk_holds_nothing_and_takes_nothing(tmp_path: Path) -> None:
    engine = Engine(range(2))
    with opened(tmp_path) as disk:
        disk.store(names(engine.numbers), None, engine.fill)

    assert disk.load(names(engine.numbers), engine.take) == 0
    assert disk.store(names([5]), None, engine.fill) == [False]
