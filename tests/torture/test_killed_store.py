"""Killed at random points under full load, a store opens at once and holds every block it said it has, bit for bit."""

import itertools
import random
import signal
import time
from pathlib import Path

import pytest
from fork_server import DEADLINE_S
from forks import ForkServer
from kill_book import Book
from torture_blocks import KINDS, blob_of, chain, number_of, numbers_in, open_store, read_numbers

from kvtier.store.codec.codec import CODECS
from kvtier.store.durability import Durability

verify_file = pytest.importorskip("lmdb.verify", reason="lmdb before 2.0 cannot verify a file").verify

CAPACITY_BYTES = 3 << 20  # some hundred blocks: a turnover takes a fraction of a second
OPENS_WITHIN_S = 1.0  # of processor time, at any size of the file; it takes some 10 ms
CODEC_NAMES = [name for name in CODECS if name in ("none", "zstd-plane-2")]


def fill(folder: Path, durability: str, book: Book) -> tuple[list[int], int]:
    """Make a store that is full; returns its blocks, and the number of the next chain."""
    with open_store(folder, CAPACITY_BYTES, "none", durability) as store:
        for chain_id in itertools.count():
            numbers = chain(KINDS[chain_id % 4], chain_id)[::-1]
            evicted = store.put_many([blob_of(number) for number in numbers])
            book.put(numbers, [number_of(key) for key in evicted], time.monotonic_ns())
            if evicted:
                return numbers_in(store), chain_id + 1
    raise AssertionError("never full")


def kill_many(forks: ForkServer, folder: Path, durability: str, num_kills: int, seed: int) -> None:
    """Load and kill one store, check it and use it on, *num_kills* times."""
    rng = random.Random(f"{seed} {durability}")
    book, num_under_way, num_calls, num_full, slowest_s = Book(), 0, 0, 0, 0.0
    present, first_chain = fill(folder, durability, book)
    for kill_id in range(num_kills):
        codec, kind = rng.choice(CODEC_NAMES), rng.choice(KINDS)
        context = f"TORTURE_SEED={seed} {durability} kill {kill_id} ({codec}, {kind})"

        child = forks.start(
            "killed_store",
            folder=str(folder),
            capacity_bytes=CAPACITY_BYTES,
            codec=codec,
            durability=durability,
            kind=kind,
            seed=rng.randrange(1 << 32),
            first_chain=first_chain,
            known=rng.sample(present, min(len(present), 400)),
        )
        if rng.random() < 0.8:  # else it may still be opening
            child.listen(DEADLINE_S, "begin")
        child.listen(rng.choice([0.02, 0.3, 0.8]) * rng.random())
        ended = child.kill()
        ended.assert_fine(context, status=-signal.SIGKILL)

        began = time.process_time()
        try:
            with open_store(folder, CAPACITY_BYTES, codec, durability) as store:
                slowest_s = max(slowest_s, time.process_time() - began)
                store.check()
                faults = {number_of(key): fault for key, fault in store.verify() if fault is not None}
                present = numbers_in(store)
                good, unread = read_numbers(store, present)
            assert (faults, unread, good) == ({}, {}, present)
            num_under_way += book.judge(ended.lines, present, time.monotonic_ns())
            assert verify_file(str(folder)) == []
        except AssertionError as error:
            raise AssertionError(f"{context}: {error}") from error
        first_chain = max([first_chain, *(max(numbers, default=0) // 32 + 1 for numbers in ended.of("numbers"))])
        num_calls += len(ended.of("done"))
        num_full += len(ended.of("full"))
        if kill_id % 20 == 19:
            calls = f"{num_under_way} of {num_calls} calls under way, {num_full} refused"
            print(f"{durability}: {kill_id + 1} kills, {calls}", flush=True)
    assert slowest_s < OPENS_WITHIN_S
    assert num_full < num_calls / 20
    assert num_under_way > num_kills / 4  # else the kills did not hit a store at work


@pytest.mark.long
@pytest.mark.parametrize("durability", list(Durability))
def test_a_store_killed_under_load_holds_every_block_it_acknowledged(
    forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    kill_many(forks, tmp_path / "store", durability, 5, seed)


@pytest.mark.slow
@pytest.mark.parametrize("durability", list(Durability))
def test_a_store_killed_hundreds_of_times_holds_every_block_it_acknowledged(
    forks: ForkServer, tmp_path: Path, durability: str, seed: int, num_kills: int
) -> None:
    kill_many(forks, tmp_path / "store", durability, num_kills, seed)
