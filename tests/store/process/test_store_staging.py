"""Blocks that lie in memory of the asker alone go through shared memory of the store's own, whatever their size."""

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_cases import key_of

from kvtier.store.blob_store import Blob
from kvtier.store.process import store_process
from kvtier.store.process.channel import Channel
from kvtier.store.process.staging import Staging
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.record import Fault, digest
from kvtier.store.store_settings import StoreSettings

PLACE_BYTES = 100_000
SIZES = [40_000, 40_000, 40_000, 250_000, 1, 99_999, 100_000, 100_001, 30_000]  # larger than a place, and as large


def bytes_of(number: int, num_bytes: int) -> bytes:
    return random.Random(number).randbytes(num_bytes)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProcess]:
    monkeypatch.setattr(store_process, "_PLACE_BYTES", PLACE_BYTES)
    with StoreProcess(StoreSettings(tmp_path / "store", 16 << 20)) as store:
        yield store


def blobs() -> list[Blob]:
    raws = [bytes_of(number, size) for number, size in enumerate(SIZES)]
    return [Blob(key_of(number), digest(raw), memoryview(raw)) for number, raw in enumerate(raws)]


def is_right(store: StoreProcess, numbers: list[int]) -> bool:
    outs = [bytearray(SIZES[number]) for number in numbers]
    results = store.read_many([key_of(number) for number in numbers], [memoryview(out) for out in outs])
    return all(
        result == digest(out) and out == bytes_of(number, SIZES[number])
        for number, out, result in zip(numbers, outs, results, strict=True)
    )


def test_blocks_of_all_sizes_come_back_in_one_call_in_any_order(store: StoreProcess) -> None:
    store.put_many(blobs())
    assert is_right(store, list(range(len(SIZES))))
    assert is_right(store, [3, 0, 8, 8, 6, 5, 1, 7, 2, 4])


def test_no_block_that_fits_goes_over_the_socket(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    ask = Channel.ask

    def measure(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        answer = ask(channel, question, timeout_s)
        sent.append(len(question) + len(answer))
        return answer

    monkeypatch.setattr(Channel, "ask", measure)
    fitting = [blob for blob in blobs() if blob.raw.nbytes <= PLACE_BYTES]
    for blob in fitting:
        store.put_many([blob])
    assert is_right(store, [0, 1, 2, 4, 5, 6, 8])
    assert max(sent) < 2_000


def test_a_missing_block_among_others_leaves_those_right(store: StoreProcess) -> None:
    store.put_many(blobs()[:3])
    outs = [bytearray(40_000) for _ in range(4)]
    results = store.read_many([key_of(number) for number in (0, 99, 1, 2)], [memoryview(out) for out in outs])
    assert results[1] is Fault.MISSING
    assert [bytes(outs[i]) for i in (0, 2, 3)] == [bytes_of(number, 40_000) for number in (0, 1, 2)]


def test_many_calls_at_a_time_keep_their_blocks_apart(store: StoreProcess) -> None:
    store.put_many(blobs())
    with ThreadPoolExecutor(12) as threads:  # more than there are places
        assert all(threads.map(lambda i: is_right(store, [i % 9, (i + 3) % 9, (i + 5) % 9]), range(200)))


def test_without_a_free_place_a_call_goes_on_by_itself() -> None:
    staging = Staging(1, 10)
    with staging.place() as first, staging.place() as second:
        assert (first.nbytes, second.nbytes) == (10, 0)
    with staging.place() as again:
        assert again.nbytes == 10
    staging.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_place_for_which_there_is_no_memory_is_not_touched(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    staging = Staging(2, PLACE_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with staging.place() as place:
        assert not len(place)
    monkeypatch.undo()

    for _ in range(3):
        with staging.place() as place:
            place[:] = bytes(PLACE_BYTES)
