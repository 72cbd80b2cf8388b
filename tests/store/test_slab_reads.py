"""Reads of slots into memory of any alignment and length, from the disk, the page cache, or both."""

import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.store.slab import PAGE_BYTES, Slabs, Slot, slot_bytes

NUM_SLOTS = 5


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Slabs]:
    opened = Slabs(tmp_path)
    yield opened
    opened.close()


def filled(slabs: Slabs, num_bytes: int) -> list[bytes]:
    """Write values of *num_bytes* to slots 0, 1, 2, ..., and return them."""
    values = [random.Random(number).randbytes(num_bytes) for number in range(NUM_SLOTS)]
    slabs.write(slots_of(num_bytes), [memoryview(value) for value in values])
    slabs.sync()
    return values


def slots_of(num_bytes: int) -> list[Slot]:
    return [Slot(slot_bytes(num_bytes), number) for number in range(NUM_SLOTS)]


def drop(slabs: Slabs, slots: Sequence[Slot]) -> None:
    """Drop the slots from the page cache. Skip the test where that is not possible."""
    path, *_ = slabs.place(slots[0])
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(map(slabs.is_cached, slots)):
        pytest.skip("this file system keeps its files in the page cache")


def buffers(num_bytes: int, offset: int) -> list[memoryview]:
    """Buffers of *num_bytes*, each *offset* bytes behind a page's beginning."""
    step = slot_bytes(num_bytes + offset)
    memory = memoryview(mmap.mmap(-1, NUM_SLOTS * step))
    return [memory[number * step + offset :][:num_bytes] for number in range(NUM_SLOTS)]


@pytest.mark.parametrize("offset", [0, 512, 64, 4, 1])
@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, 5000, 1, (1 << 20) + 8192, 300_001])
def test_a_read_from_the_disk_fills_any_buffer_and_leaves_the_page_cache_alone(
    slabs: Slabs, num_bytes: int, offset: int
) -> None:
    values, slots = filled(slabs, num_bytes), slots_of(num_bytes)
    drop(slabs, slots)
    outs = buffers(num_bytes, offset)

    slabs.read(slots[::-1], outs[::-1])

    assert [bytes(out) for out in outs] == values
    assert not any(map(slabs.is_cached, slots))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("num_bytes", [3 * PAGE_BYTES, 300_001])
def test_a_read_of_slots_that_are_partly_in_the_page_cache_is_right(slabs: Slabs, num_bytes: int, offset: int) -> None:
    values, slots = filled(slabs, num_bytes), slots_of(num_bytes)
    drop(slabs, slots)
    path, *_ = slabs.place(slots[0])
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # so that nothing is read ahead
        file.read(slots[0].num_bytes + PAGE_BYTES)
    outs = buffers(num_bytes, offset)

    slabs.read(slots, outs)

    assert [bytes(out) for out in outs] == values


def test_values_of_several_lengths_in_slots_of_one_size_are_read_together(slabs: Slabs) -> None:
    values, slots = filled(slabs, 2 * PAGE_BYTES), slots_of(2 * PAGE_BYTES)
    lengths = [2 * PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, 2 * PAGE_BYTES - 1, 2 * PAGE_BYTES]
    outs = [out[:length] for out, length in zip(buffers(2 * PAGE_BYTES, 0), lengths, strict=True)]
    drop(slabs, slots)

    slabs.read(slots, outs)

    assert [bytes(out) for out in outs] == [value[:length] for value, length in zip(values, lengths, strict=True)]


def test_a_read_beyond_the_end_of_the_file_gives_zeros(slabs: Slabs) -> None:
    values = filled(slabs, PAGE_BYTES)
    slots = [Slot(PAGE_BYTES, NUM_SLOTS - 1), Slot(PAGE_BYTES, NUM_SLOTS), Slot(PAGE_BYTES, NUM_SLOTS + 7)]
    for offset in (0, 1):
        outs = [out for out in buffers(PAGE_BYTES, offset)[:3] if out]
        for out in outs:
            out[:] = b"x" * PAGE_BYTES

        slabs.read(slots, outs)

        assert [bytes(out) for out in outs] == [values[-1], bytes(PAGE_BYTES), bytes(PAGE_BYTES)]
