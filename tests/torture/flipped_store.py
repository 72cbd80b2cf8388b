"""Stores with one flipped bit in their files, judged by what an engine that opens them sees.

Each store is opened in a process of its own, as an engine does: all blocks are read, new ones put and read, keys
listed, deleted and touched, until all of that works. Flips of payloads are judged together, at most one in each slot,
by the bytes of that slot's block; every other flip has a store of its own.

Each start of the store's process after the first counts as a restart. So does opening the store anew, where calls fail
again and again without the process ending.
"""

import random
import shutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.durability import Durability
from kvtier.store.lmdb.boot_mark import BootMark, FileState
from kvtier.store.process.store_process import StoreDied, StoreProcess
from kvtier.store.record import Fault, digest
from kvtier.store.store_settings import StoreSettings

CAPACITY_BYTES = 4 << 20
NUM_BLOCKS = 300
NEW_BLOCKS = 40  # put into a store with a flipped bit: as many again leave it for them
MAX_RESTARTS = 2
TIMEOUT_S = 120.0  # a call that takes longer hangs
NAMESPACE = b"flips-0123456789"
SIZES = (4096, 5000, 12_288, 20_480)
PAGE_BYTES = 4096
_LAST_PAGE_AT = (16 + 24 + 2 * 48, PAGE_BYTES + 16 + 24 + 2 * 48)  # of LMDB's two roots
_INDEX, _SLABS, _OTHERS = "index", "slabs", "marks, locks, checkpoints"


def key_of(number: int) -> bytes:
    return NAMESPACE + number.to_bytes(32, "big")


@cache
def raw_of(number: int) -> bytes:
    return np.random.default_rng(number + 1).bytes(SIZES[number % len(SIZES)])


def blob_of(number: int) -> Blob:
    """The block *number*; each of ten in a row continues the one before."""
    raw = raw_of(number)
    parent = key_of(number - 1) if number % 10 else b""
    return Blob(key_of(number), digest(raw), memoryview(raw), parent, b"tenant-%d" % (number % 2))


@dataclass(frozen=True)
class Flip:
    """The flip of one bit of a file."""

    file: str
    place: int
    bit: int

    def make(self, folder: Path) -> None:
        with open(folder / self.file, "r+b") as file:
            file.seek(self.place)
            (byte,) = file.read(1)
            file.seek(self.place)
            file.write(bytes([byte ^ 1 << self.bit]))

    @property
    def kind(self) -> str:
        return _INDEX if self.file == "data.mdb" else _SLABS if self.file.startswith("slab-") else _OTHERS

    def __str__(self) -> str:
        return f"{self.file} {self.place} {self.bit}"


@dataclass
class Outcome:
    """The outcome of using a store with a flipped bit."""

    num_right: int = 0  # blocks of the store that were read at the first try
    num_wrong: int = 0  # reads of other bytes than were put: must be 0
    num_hangs: int = 0  # calls that the deadline ended
    num_restarts: int = 0
    works: bool = False  # whether it works again
    faults: Counter[str] = field(default_factory=Counter)


class Template:
    """The files of a store that is not open."""

    def __init__(self, settings: StoreSettings, is_after_crash: bool = False) -> None:
        self.settings = settings
        self.name = f"{settings.durability}{', encrypted' if settings.cipher else ''}"
        folder = settings.folder
        with StoreProcess(settings) as store:
            for first in range(0, NUM_BLOCKS, 10):
                store.put_many([blob_of(number) for number in range(first, first + 10)])
            store.touch([key_of(number) for number in range(0, NUM_BLOCKS, 7)])
            store.delete([key_of(number) for number in range(0, 60, 3)])
            store.sync()
            self.there = sorted(int.from_bytes(key[len(NAMESPACE) :], "big") for key in list(store.keys()))
            open_files = {path.name: path.read_bytes() for path in folder.iterdir()}
        if is_after_crash:
            self.files = open_files
            self.name += ", machine went down"
            self.restore()
            BootMark("an earlier boot", FileState(settings.durability.value)).write(folder)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        index = self.files["data.mdb"]
        last_page = max(struct.unpack_from("<Q", index, place)[0] for place in _LAST_PAGE_AT)
        self.num_index_pages = last_page + 1  # in use
        self._num_bytes = {name: len(data) for name, data in self.files.items()}
        self._num_bytes["data.mdb"] = self.num_index_pages * PAGE_BYTES

    def restore(self) -> None:
        """Write the files to the folder again, as they were."""
        shutil.rmtree(self.settings.folder, ignore_errors=True)
        self.settings.folder.mkdir(0o700)
        for name, data in self.files.items():
            (self.settings.folder / name).write_bytes(data)

    def flip(self, kind: str, rng: random.Random) -> Flip:
        """A random flip in the files of *kind*."""
        files = {name: num for name, num in self._num_bytes.items() if Flip(name, 0, 0).kind == kind and num}
        name = rng.choice(list(files)) if kind == _OTHERS else rng.choices(list(files), list(files.values()))[0]
        return Flip(name, rng.randrange(files[name]), rng.randrange(8))

    def small_files(self) -> Iterator[Flip]:
        """A flip of every bit of the boot mark's text."""
        for place in (*range(96), *range(PAGE_BYTES, PAGE_BYTES + 96)):
            for bit in range(8):
                yield Flip("boot_mark", place, bit)


class Trial:
    """One store with flipped bits, from its first start until it works."""

    def __init__(self, template: Template, flips: Sequence[Flip]) -> None:
        self._template = template
        self._store: StoreProcess | None = None
        self._num_starts = 0  # of processes
        self.outcome = Outcome()
        self.read: dict[int, bytes | Fault] = {}  # result of the first read of each block
        template.restore()
        for flip in flips:
            flip.make(template.settings.folder)

    def run(self) -> Outcome:
        """Use the store until it works."""
        for attempt in range(MAX_RESTARTS + 3):
            try:
                self._look(attempt)
            except OSError as error:
                self._note(error)
                if not isinstance(error, StoreDied):
                    self._close()
                continue
            self.outcome.works = True
            break
        self._close()
        self.outcome.num_restarts = max(0, self._num_starts - 1)
        return self.outcome

    def _look(self, attempt: int) -> None:
        """Call all methods that an engine calls; OSError if one does not work."""
        store = self._opened()
        there = self._template.there
        results = self._read(store, there)
        if not self.read:
            self.read = dict(zip(there, results, strict=True))
            self.outcome.num_right = sum(not isinstance(result, Fault) for result in results)
            self.outcome.faults.update(str(result) for result in results if isinstance(result, Fault))
        if Fault.IO_ERROR in results:
            raise OSError("blocks could not be read")
        first = NUM_BLOCKS + attempt * NEW_BLOCKS
        new = list(range(first, first + NEW_BLOCKS))
        store.put_many([blob_of(number) for number in new])
        if any(isinstance(result, Fault) for result in self._read(store, new)):
            raise OSError("new blocks are not there")
        store.touch([key_of(number) for number in there[::9]])
        store.delete([key_of(number) for number in there[::11]])
        limit = NUM_BLOCKS + NEW_BLOCKS * (attempt + 1)
        known = {key_of(number) for number in range(limit)}
        for place, key in enumerate(store.keys()):
            self.outcome.num_wrong += key not in known
            if place > limit:
                self.outcome.num_hangs += 1
                raise OSError("the list of keys does not end")
        store.put_many([blob_of(number) for number in there[::11]])
        store.statistics()
        store.sync()

    def _read(self, store: StoreProcess, numbers: Sequence[int]) -> list[bytes | Fault]:
        raws = [raw_of(number) for number in numbers]
        outs = [bytearray(len(raw)) for raw in raws]
        results = store.read_many([key_of(number) for number in numbers], [memoryview(out) for out in outs])
        for raw, out, result in zip(raws, outs, results, strict=True):
            self.outcome.num_wrong += not isinstance(result, Fault) and (out != raw or result != digest(raw))
        return results

    def _opened(self) -> StoreProcess:
        if self._store is None:
            self._store = StoreProcess(self._template.settings, timeout_s=TIMEOUT_S)
        self._store.open()
        return self._store

    def _close(self) -> None:
        if self._store is not None:
            self._num_starts += self._store.num_starts  # including processes that never answered
            store, self._store = self._store, None
            store.close()

    def _note(self, error: OSError) -> None:
        self.outcome.num_hangs += "no answer" in str(error)
        self.outcome.faults[str(error).rpartition(": ")[2]] += 1


@dataclass
class Table:
    """Outcomes of the flips in files of one kind."""

    num_flips: int = 0
    num_wrong: int = 0
    num_hangs: int = 0
    num_lost: int = 0  # stores that did not work again
    num_emptied: int = 0  # that lost more than a tenth of their blocks
    num_harmless: int = 0  # all blocks were read
    restarts: Counter[int] = field(default_factory=Counter)
    remarkable: list[str] = field(default_factory=list)

    def add(self, flips: Sequence[Flip], outcome: Outcome, where: str, num_there: int) -> None:
        self.num_flips += len(flips)
        self.num_wrong += outcome.num_wrong
        self.num_hangs += outcome.num_hangs
        is_fine = outcome.works and outcome.num_restarts <= MAX_RESTARTS
        self.num_lost += 0 if is_fine else len(flips)
        self.num_emptied += outcome.num_right < num_there * 9 // 10
        self.num_harmless += outcome.num_right == num_there
        self.restarts[outcome.num_restarts] += len(flips)
        if outcome.num_wrong or outcome.num_hangs or not is_fine:
            self.remarkable.append(f"{where}: {', '.join(map(str, flips))}: {outcome}")


def judge_alone(template: Template, flip: Flip, table: Table) -> None:
    """Judge one flip in a store of its own."""
    outcome = Trial(template, [flip]).run()
    table.add([flip], outcome, template.name, len(template.there))


def judge_payloads(template: Template, flips: Sequence[Flip], table: Table) -> None:
    """Flips in slots of different blocks, each of which may cost its block and no other."""
    trial = Trial(template, flips)
    outcome = trial.run()
    num_right = outcome.num_right
    num_bad = sum(isinstance(result, Fault) for result in trial.read.values())
    if num_bad > len(flips) or set(trial.read.values()) & {Fault.MISSING, Fault.IO_ERROR}:
        outcome.works = False  # a block without a flip is gone
    outcome.num_right = len(template.there)
    table.add(flips, outcome, template.name, len(template.there))
    table.num_harmless += len(flips) - 1 - num_bad
    assert num_right + num_bad == len(template.there)


def slot_of(flip: Flip) -> tuple[str, int]:
    return flip.file, flip.place // int(flip.file.removeprefix("slab-"))


def templates(folder: Path) -> list[Template]:
    """Make the stores, in folders below *folder*."""
    cipher = Cipher(b"k" * 32)
    quotas = {b"tenant-0": CAPACITY_BYTES // 2}
    plain = StoreSettings(folder / "process", CAPACITY_BYTES, quotas=quotas)
    commit = replace(plain, folder=folder / "commit", durability=Durability.COMMIT, cipher=cipher)
    interval = replace(plain, folder=folder / "interval", durability=Durability.INTERVAL, interval_s=3600.0)
    return [Template(plain), Template(commit), Template(interval, is_after_crash=True)]


def flip_all(stores: Sequence[Template], num_flips: int, seed: int, say: bool = False) -> dict[str, Table]:
    """Judge *num_flips* flips; tables by kind of file."""
    rng = random.Random(seed)
    tables = {kind: Table() for kind in (_OTHERS, _INDEX, _SLABS)}
    counts = {_OTHERS: num_flips // 64, _INDEX: num_flips // 12}
    counts[_SLABS] = num_flips - sum(counts.values())
    began = time.monotonic()
    for kind in (_OTHERS, _INDEX):
        for number in range(counts[kind]):
            template = stores[number % len(stores)]
            judge_alone(template, template.flip(kind, rng), tables[kind])
            if say and number % 50 == 49:
                done = f"{kind}: {number + 1} of {counts[kind]} in {time.monotonic() - began:.0f} s"
                print(done, dict(tables[kind].restarts), *tables[kind].remarkable[-3:], file=sys.stderr, flush=True)
    round_ = 0
    while left := counts[_SLABS] - tables[_SLABS].num_flips:
        template = stores[round_ % len(stores)]
        drawn = (template.flip(_SLABS, rng) for _ in range(600))
        judge_payloads(template, list({slot_of(flip): flip for flip in drawn}.values())[:left], tables[_SLABS])
        round_ += 1
    return tables
