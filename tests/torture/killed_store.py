"""A store under full load, to be killed: writers tell each call's begin and result, readers check bytes."""

import itertools
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from fork_server import Say
from torture_blocks import KINDS, blob_of, chain, key_of, number_of, open_store, read_numbers

from kvtier.store.blob_store import StoreFull
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault

NUM_WRITERS = 2
NUM_READERS = 2


def run(
    say: Say,
    folder: str,
    capacity_bytes: int,
    codec: str,
    durability: str,
    kind: str,
    seed: int,
    first_chain: int,
    known: list[int],
) -> None:
    """Open, load and close a store for ever. New chains are numbered from *first_chain* on; it has *known* already."""
    rng = random.Random(seed)
    load = Load(say, kind, first_chain, known)
    while True:
        with open_store(folder, capacity_bytes, codec, durability) as store:
            say(opened=time.monotonic_ns())
            load.go_on(store, rng, rng.uniform(0.05, 0.6))
        say(closed=time.monotonic_ns())


class Load:
    """The store and the state that all threads share."""

    def __init__(self, say: Say, kind: str, first_chain: int, known: list[int]) -> None:
        self._say = say
        self._kind = kind
        self._chain_ids = itertools.count(first_chain)
        self._call_ids = itertools.count()
        self._recent = known[-400:]  # numbers put lately; every thread appends and cuts
        self._known_chains = sorted({number // len(KINDS) // 8 for number in known if KINDS[number % 4] == kind})

    def go_on(self, store: LmdbStore, rng: random.Random, seconds: float) -> None:
        """Write and read from many threads for *seconds*."""
        stop = threading.Event()

        def repeat(act: Callable[[LmdbStore, random.Random], None], own: random.Random) -> None:
            try:
                while not stop.is_set():
                    act(store, own)
            except BaseException:  # a thread's top: the error goes to the test
                self._say(error=traceback.format_exc())
                stop.set()

        acts = [self._write] * NUM_WRITERS + [self._read] * NUM_READERS
        threads = [threading.Thread(target=repeat, args=(act, random.Random(rng.random()))) for act in acts]
        for thread in threads:
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join()

    def _write(self, store: LmdbStore, rng: random.Random) -> None:
        dice = rng.random()
        if dice < 0.08:
            self._call("delete", self._some(rng), store.delete)
        elif dice < 0.25:
            self._call("touch", self._some(rng), store.touch)
        elif dice < 0.32:
            self._call("put", self._some(rng), store.put_many)
        else:
            self._put_chain(store, rng)

    def _put_chain(self, store: LmdbStore, rng: random.Random) -> None:
        """Put a new chain, or one known from before: its first part, then the blocks that continue it, tails first."""
        chain_id = next(self._chain_ids)
        if self._known_chains and rng.random() < 0.15:
            chain_id = rng.choice(self._known_chains)
        left = chain(self._kind, chain_id)
        while left:
            num_blocks = rng.randint(1, len(left))
            part, left = left[:num_blocks], left[num_blocks:]
            self._call("put", part[::-1], store.put_many)
        self._known_chains.append(chain_id)

    def _call(self, act: str, numbers: list[int], method: Callable[[Any], Any]) -> None:
        """Make a call, telling it before and its result afterwards."""
        call_id = next(self._call_ids)
        blobs_or_keys = [blob_of(number) if act == "put" else key_of(number) for number in numbers]
        self._say(call=call_id, act=act, begin=time.monotonic_ns(), numbers=numbers)
        try:
            result = method(blobs_or_keys)
        except StoreFull as error:  # a reader that sleeps holds back the pages that all writers free meanwhile
            evicted = [number_of(key) for key in error.evicted]
            self._say(done=call_id, end=time.monotonic_ns(), evicted=evicted, full=act)
            return
        evicted = [number_of(key) for key in result] if act == "put" else []
        self._say(done=call_id, end=time.monotonic_ns(), evicted=evicted)
        if act == "put":
            self._recent = (self._recent + numbers)[-400:]

    def _read(self, store: LmdbStore, rng: random.Random) -> None:
        dice = rng.random()
        if dice < 0.02:
            faults = [fault for _, fault in _some_of(store.verify(), rng) if fault is not None]
        elif dice < 0.04:
            faults = []
            assert len(set(store.keys())) <= store.statistics().num_records + 10_000
        else:
            faults = list(read_numbers(store, self._some(rng))[1].values())
        assert set(faults) <= {Fault.MISSING}, f"a reader met {faults}"

    def _some(self, rng: random.Random) -> list[int]:
        recent = self._recent
        return rng.sample(recent, min(len(recent), rng.randint(1, 12)))


def _some_of(records: Iterator[Any], rng: random.Random) -> Iterator[Any]:
    return itertools.islice(records, rng.randint(1, 50))
