"""The ledger of extents in which engines may be copying, as a successor finds it beside the segment."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from layout_bed import EXTENT_BYTES, LayoutBed, layout

from kvtier.sidecar.extents import Extents
from kvtier.sidecar.lease_ledger import LeaseLedger, ledger_bytes, why_not_taken_over
from kvtier.transfer.segment import Segment, discard_handover, handover_error, leftovers, name_of

SHM = Path("/dev/shm")
NUM_EXTENTS = 8
NUM_BYTES = NUM_EXTENTS * EXTENT_BYTES


@pytest.fixture
def left() -> Iterator[int]:
    """The lock of a segment whose process has left it, with a mark in it."""
    segment = Segment(NUM_BYTES, SHM, ledger_bytes(NUM_EXTENTS))
    segment.wait_backed(60)
    LeaseLedger(segment.beside, EXTENT_BYTES, NUM_EXTENTS)
    segment.memory[5] = 77
    file = os.dup(segment.lock_file)
    segment.leave()
    name = segment.name
    segment.close()
    yield file
    list(leftovers(SHM))
    (SHM / name).unlink(missing_ok=True)


def ledger_of(segment: Segment) -> LeaseLedger:
    return LeaseLedger(segment.beside, EXTENT_BYTES, NUM_EXTENTS)


def test_a_segment_that_was_left_is_the_same_file_by_the_same_name(left: int) -> None:
    name = name_of(left)
    assert handover_error(left) == ""
    assert why_not_taken_over(left, EXTENT_BYTES, NUM_EXTENTS) == ""
    assert list(leftovers(SHM)) == [], "it was removed as if nobody had it"

    with Segment(NUM_BYTES, SHM, ledger_bytes(NUM_EXTENTS), left) as taken:
        assert (taken.name, taken.memory[5]) == (name, 77)
        assert taken.wait_backed(60)
        assert ledger_of(taken).left_out == frozenset()

    assert not (SHM / name).exists()


def test_extents_with_leases_at_the_end_are_left_out_for_good(left: int) -> None:
    with Segment(NUM_BYTES, SHM, ledger_bytes(NUM_EXTENTS), left) as segment:
        bed = LayoutBed(SHM, NUM_EXTENTS)
        memory = bed.layouts.open(layout()).memories[0]
        ledger = ledger_of(segment)
        slots = np.array([0, 1, memory.slots_per_extent, 3 * memory.slots_per_extent])
        ledger.lease(memory, slots)
        ledger.release(memory, slots[2:3])
        assert ledger.num_leased == 2
        ledger.freeze()
        ledger.release(memory, slots[:2])
        ledger.lease(memory, np.array([5 * memory.slots_per_extent]))  # of one that comes while the process ends
        bed.close()

        successor = ledger_of(segment)
        assert successor.left_out == {0, 3}
        assert segment.wait_backed(60)
        extents = Extents(segment, EXTENT_BYTES, lambda: 0.0, successor.left_out)
        holder = Holder()
        while extents.acquire(holder):
            extents.check()
        assert holder.extents == [1, 2, 4, 5, 6, 7]
        assert ledger_of(segment).left_out == {0, 3}


class Holder:
    """Takes what it gets, and gives nothing back."""

    num_blank = 0

    def __init__(self) -> None:
        self.extents: list[int] = []

    def give(self, extent: int) -> None:
        self.extents.append(extent)

    def take_back(self, extent: int) -> bool:
        return False

    def oldest_extent(self) -> int | None:
        return None

    def num_leased(self, extent: int) -> int:
        return 0

    def drain(self, extent: int) -> bool:
        return False

    def end_drain(self, extent: int) -> None:
        raise AssertionError("there is one holder")


def test_what_clients_have_leased_is_in_the_ledger_and_pins_are_not() -> None:
    bed = LayoutBed(SHM, NUM_EXTENTS)
    tiers, client = bed.layouts.open(layout()), Holder()
    slots = np.array(tiers.reserve(0, 20))
    share = bed.layouts.shares.of(client)

    share.lease(tiers.memories[0], slots)
    share.lease(tiers.memories[0], slots)
    assert bed.layouts.ledger.num_leased == 2
    share.release(tiers.memories[0], slots)
    assert bed.layouts.ledger.num_leased == 2
    share.release(tiers.memories[0], slots)
    assert bed.layouts.ledger.num_leased == 0

    tiers.tiers.abandon(0, slots)
    bed.close()


@pytest.mark.parametrize(
    ("extent_bytes", "num_extents", "why"),
    [
        (EXTENT_BYTES, 4, "its size differs"),
        (EXTENT_BYTES // 2, 2 * NUM_EXTENTS, "its size differs"),
        (EXTENT_BYTES + 4096, NUM_EXTENTS, "its size differs"),
    ],
)
def test_a_segment_of_another_size_is_not_taken_over(left: int, extent_bytes: int, num_extents: int, why: str) -> None:
    assert why in why_not_taken_over(left, extent_bytes, num_extents)
    discard_handover(left)


def test_a_segment_of_another_version_is_not_taken_over(left: int) -> None:
    os.pwrite(left, b"kvtier ledger 0\0", NUM_BYTES)

    why = why_not_taken_over(left, EXTENT_BYTES, NUM_EXTENTS)
    assert why == "another version of kvtier made it, or its extents have another size"
    name = name_of(left)
    discard_handover(left)
    assert not (SHM / name).exists()


def test_a_segment_of_which_most_is_left_out_is_not_taken_over(left: int) -> None:
    os.pwrite(left, np.ones(5, np.uint32).tobytes(), NUM_BYTES + 32)

    assert "more than half" in why_not_taken_over(left, EXTENT_BYTES, NUM_EXTENTS)
    discard_handover(left)


def test_what_is_no_segment_of_ours_is_closed_and_stays_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    for opened in (os.open(file, os.O_RDWR), os.open(tmp_path, os.O_RDONLY), os.memfd_create("x")):
        assert handover_error(opened)
        discard_handover(opened)

    assert file.read_text() == "mine"
