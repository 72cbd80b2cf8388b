"""A store whose I/O calls fail, are cut short or take long (`io_shim.c`), then work again; run by `fork_server.py`."""

import ctypes
import errno
import itertools
import logging
import os
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from fork_server import DEADLINE_S, Say
from model_store import ModelStore
from torture_blocks import read_numbers

from kvtier.store.record import Fault

CAPACITY_BYTES = 2 << 20
CALLS_PER_ROUND = 25


class Call(IntEnum):
    """I/O calls; the order is that of `enum call` in `io_shim.c`."""

    READ = 0
    WRITE = 1
    SYNC = 2
    MSYNC = 3
    TRUNCATE = 4
    ALLOCATE = 5
    MMAP = 6


class Kind(IntEnum):
    """What a fault does to an I/O call."""

    NOTHING = 0
    FAIL = 1
    SHORT = 2
    SLEEP = 3


@dataclass(frozen=True)
class Rule:
    """Applies *kind* to a *share* of the calls after the first *after* of them, *limit* times at most."""

    kind: Kind
    error: int = errno.EIO
    share: float = 1.0
    after: int = 0
    limit: int = 1 << 40
    sleep_s: float = 0.0


class Shim:
    """The library `io_shim.c`, preloaded into this process."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._library = ctypes.CDLL(None)
        self._library.torture_hits.restype = ctypes.c_long
        self._library.torture_watch(str(folder).encode(), ctypes.c_uint64(seed))

    def set(self, call: Call, rule: Rule) -> None:
        """Apply a rule to *call* from now on."""
        self._library.torture_rule(
            int(call),
            int(rule.kind),
            rule.error,
            int(rule.share * 1e6),
            ctypes.c_long(rule.after),
            ctypes.c_long(rule.limit),
            int(rule.sleep_s * 1e6),
        )

    def end(self) -> None:
        """Drop all rules: every call works again."""
        for call in Call:
            self.set(call, Rule(Kind.NOTHING))

    def num_hits(self) -> int:
        return sum(self._library.torture_hits(int(call)) for call in Call)


def run(say: Say, act: str, **arguments: Any) -> None:
    """Run the function that *act* names."""
    acts = {
        "rounds": fail_and_recover,
        "open": fail_to_open,
        "change": fail_to_change,
        "read": fail_to_read,
        "slow": read_while_syncing,
    }
    acts[act](say, **arguments)


def fail_and_recover(say: Say, folder: str, codec: str, durability: str, seed: int, num_rounds: int) -> None:
    """Run rounds of faults over one store. A wrong result is an AssertionError that names its round."""
    watch = Watch()
    logging.getLogger("kvtier").addHandler(watch)
    rng = random.Random(seed)
    model = ModelStore(Path(folder), CAPACITY_BYTES, codec, durability, rng)
    shim = Shim(Path(folder), seed)
    model.open()
    for _ in range(6):
        model.put()
    for round_id in range(num_rounds):
        rules = _draw_rules(rng)
        # LMDB takes a short read of its first page for another program's file.
        watch.is_fair = Call.READ in rules and rules[Call.READ].kind is Kind.SHORT
        what = f"round {round_id}: {rules}"
        say(round=what)
        reader = Reader(model)
        try:
            with_reopening = rng.random() < 0.6
            for call, rule in rules.items():
                shim.set(call, rule)
            _work(model, with_reopening, shim, watch, say)
            shim.end()
            _recover(model, watch, say)
        finally:
            shim.end()
            reader.stop()
        assert reader.problems == [], f"{what}: {reader.problems}"
    model.close()
    num_errors = sum(count for outcome, count in model.outcomes.items() if outcome.endswith("Error"))
    say(hits=shim.num_hits(), num_errors=num_errors, slowest_s=model.slowest_s)


class Watch(logging.Handler):
    """A log handler that keeps the reason for which the store last started empty."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.is_fair = False  # whether the store may start empty just now

    def emit(self, record: logging.LogRecord) -> None:
        if "starts empty: " in record.getMessage():
            self.reason = record.getMessage().partition("starts empty: ")[2]


class Reader:
    """A thread that reads the blocks that the owner has put; misses are fine while I/O fails, bad bytes never."""

    def __init__(self, model: ModelStore) -> None:
        self._model = model
        self._stop = threading.Event()
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        if self._thread.is_alive():
            self.problems.append("HANG: a read does not come back")

    def _read(self) -> None:
        rng = random.Random(1)
        while not self._stop.wait(0.001):
            with suppress(ValueError, RuntimeError):  # the store is closed, or the owner changes the set just now
                numbers = list(self._model.there)
                try:
                    _, faults = read_numbers(self._model.store, rng.sample(numbers, min(4, len(numbers))))
                    if not set(faults.values()) <= {Fault.MISSING, Fault.IO_ERROR}:
                        self.problems.append(f"bad records {faults}")
                except AssertionError as error:
                    if "not open" not in str(error):
                        self.problems.append(str(error))


def _draw_rules(rng: random.Random) -> dict[Call, Rule]:
    """One to three calls that go wrong together."""
    rules = {}
    for call in rng.sample(list(Call), rng.randint(1, 3)):
        rules[call] = Rule(
            rng.choice([Kind.FAIL, Kind.FAIL, Kind.SLEEP] + [Kind.SHORT] * (call in (Call.READ, Call.WRITE))),
            rng.choice([errno.EIO, errno.ENOSPC, errno.EROFS]),
            rng.choice([0.05, 0.3, 1.0]),
            rng.choice([0, 0, 1, 5]),
            rng.choice([1, 2, 1 << 40]),
            0.003,
        )
    return rules


def _work(model: ModelStore, with_reopening: bool, shim: Shim, watch: Watch, say: Say) -> None:
    for place in range(CALLS_PER_ROUND):
        if place % 5 == 0:
            drop_cache(model.folder)
        model.try_anything()
        with suppress(OSError):  # while I/O fails the store may not know
            model.assert_as_expected()
        if with_reopening and place % 8 == 7:
            with suppress(OSError):
                model.close()
            drop_cache(model.folder)
            try:
                _open(model, watch, say)
            except OSError:
                shim.end()
                _open(model, watch, say)


def _open(model: ModelStore, watch: Watch, say: Say) -> None:
    watch.reason = ""
    try:
        model.open()
    finally:
        if watch.reason:
            say(**{"emptied by a short read" if watch.is_fair else "emptied": watch.reason})
            model.there.clear()


def _recover(model: ModelStore, watch: Watch, say: Say) -> None:
    """Check that, with the faults over, the store works at once or once reopened, and is whole or said it is empty."""
    try:
        model.put()
        model.assert_whole()
    except OSError as error:
        say(unusable=f"{type(error).__name__}: {error}")
        with suppress(OSError):
            model.close()
        _open(model, watch, say)
    model.put()
    model.assert_whole()


def fail_to_open(say: Say, folder: str, durability: str, seed: int) -> None:
    """Let each I/O call of opening and closing fail, one at a time; the store must then open, whole."""
    model, shim, watch = _filled(folder, durability, seed)
    model.close()
    for call, limit in itertools.product(Call, (1, 1000)):
        for num_before in itertools.count():
            num_hits = shim.num_hits()
            shim.set(call, Rule(Kind.FAIL, after=num_before, limit=limit))
            with suppress(OSError):
                model.open()
                model.close()
            shim.end()
            if shim.num_hits() == num_hits:
                break  # there are no more such calls
            say(failed=f"{call.name} {num_before}, {limit} times")
            assert watch.reason == "", f"starts empty: {watch.reason}"
            model.open()
            assert watch.reason == "", f"starts empty: {watch.reason}"
            model.assert_whole()
            model.close()


def fail_to_change(say: Say, folder: str, durability: str, seed: int) -> None:
    """Let each I/O call of a change fail, one at a time; the next change must work, in the same store."""
    model, shim, watch = _filled(folder, durability, seed)
    for call, num_before, limit in itertools.product(Call, range(15), (1, 1000)):
        num_hits = shim.num_hits()
        shim.set(call, Rule(Kind.FAIL, after=num_before, limit=limit))
        with suppress(OSError):
            model.put("equal")
        shim.end()
        if shim.num_hits() == num_hits:
            continue
        say(failed=f"{call.name} {num_before}, {limit} times")
        model.assert_as_expected()
        model.put("equal")
        model.assert_whole()
    model.close()
    model.open()
    assert watch.reason == "", f"starts empty: {watch.reason}"
    model.assert_whole()
    model.close()


def fail_to_read(say: Say, folder: str, codec: str, durability: str, seed: int) -> None:
    """Let reads fail or be cut short: only blocks that cannot be read are `IO_ERROR`, and none is lost."""
    model, shim, _ = _filled(folder, durability, seed, codec)
    numbers = sorted(model.there)

    def read_cold(rule: Rule) -> dict[int, Fault]:
        model.close()
        drop_cache(model.folder)
        model.open()
        shim.set(Call.READ, rule)
        _, faults = model.read_any(numbers)
        shim.end()
        return faults

    assert read_cold(Rule(Kind.NOTHING)) == {}
    say(hits_short=shim.num_hits(), faults=read_cold(Rule(Kind.SHORT, share=0.5)))
    say(faults=read_cold(Rule(Kind.FAIL, limit=1)))  # the blocks of that call are read again, one by one
    num_hits = shim.num_hits()
    all_failed = read_cold(Rule(Kind.FAIL))
    assert set(all_failed) == set(numbers)
    assert set(all_failed.values()) == {Fault.IO_ERROR}
    some_failed = read_cold(Rule(Kind.FAIL, share=0.3))
    assert set(some_failed.values()) <= {Fault.IO_ERROR}
    say(hits=shim.num_hits() - num_hits, some=len(some_failed), of=len(numbers))
    model.assert_whole()
    model.close()


def drop_cache(folder: Path) -> None:
    """Drop payloads from the page cache, so that they are read from the medium; mapped pages stay in memory."""
    for path in folder.glob("slab-*"):
        with suppress(OSError), path.open("rb") as slab:
            os.fdatasync(slab.fileno())
            os.posix_fadvise(slab.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_while_syncing(say: Say, folder: str, durability: str, seed: int, sleep_s: float) -> None:
    """Count the reads that finish while a writer waits for syncs of *sleep_s* each."""
    model, shim, _ = _filled(folder, durability, seed)
    numbers = sorted(model.there)
    shim.set(Call.SYNC, Rule(Kind.SLEEP, sleep_s=sleep_s))
    shim.set(Call.MSYNC, Rule(Kind.SLEEP, sleep_s=sleep_s))
    writer = threading.Thread(target=lambda: (model.put("equal"), model.sync()))
    began = time.monotonic()
    writer.start()
    num_reads = 0
    while writer.is_alive():
        read_numbers(model.store, numbers[:4])
        num_reads += 1
        time.sleep(0.001)
    say(num_reads=num_reads, writing_s=time.monotonic() - began)
    shim.end()
    model.close()


def _filled(folder: str, durability: str, seed: int, codec: str = "none") -> tuple[ModelStore, Shim, Watch]:
    """An open store with some blocks."""
    watch = Watch()
    logging.getLogger("kvtier").addHandler(watch)
    model = ModelStore(Path(folder), CAPACITY_BYTES, codec, durability, random.Random(seed))
    shim = Shim(Path(folder), seed)
    model.open()
    for _ in range(6):
        model.put()
    return model, shim, watch
