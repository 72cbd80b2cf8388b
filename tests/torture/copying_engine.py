"""Engines of two processes on a sidecar: one leases slots, as a scheduler does, and one copies, as a worker does.

Every block's bytes tell which block it is, and each copy is compared with them. A worker that gets SIGUSR1 stops itself
in the middle of its next copy, unless SIGUSR2 comes first. Started by `test_stopped_engines`, as a scheduler, a worker,
or both for LMCache's endpoint.
"""

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import numpy as np

from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.step_work import Segment
from kvtier.engine.attached.attachment import Attachment
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.transfer.attached_memory import AttachedMemory
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.lane import Finished, ThreadLane
from kvtier.transfer.transfer_engine import TransferEngine

BLOCK_BYTES = 2048
BLOCKS = 64  # of a document
NUM_DOCUMENTS = 200
NAMESPACE = b"of stopped engine"[:16]
OPERATIONS, WRONG, NUM_COUNTS = 0, 1, 2  # counts of an engine
ANSWER_MS = 2000


def names_of(document: int) -> list[BlockName]:
    """Names of a document's blocks."""
    rng = random.Random(document)
    return [BlockName(rng.randbytes(32)) for _ in range(BLOCKS)]


def content(name: bytes, num_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """The bytes of the block of that name."""
    return np.resize(np.frombuffer(name, np.uint8), num_bytes)


class Counts:
    """What one engine has done, for the process that started it."""

    def __init__(self, path: str, number: int) -> None:
        with open(path, "r+b") as file:
            counts = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        self._own = counts[number * NUM_COUNTS : (number + 1) * NUM_COUNTS]

    def add(self, what: int, number: int = 1) -> None:
        """Count it."""
        self._own[what] += number


class Copier:
    """Copies in two halves, and stops between them when it is told to."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._is_to_stop = False
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGUSR2, self._on_signal)

    def write(self, slot: np.ndarray, own: np.ndarray) -> None:
        """Fill the slot."""
        half = len(own) // 2
        slot[:half] = own[:half]
        self._may_stop()
        slot[half:] = own[half:]

    def read(self, slot: np.ndarray, own: np.ndarray) -> None:
        """Copy the slot out, and count it if it has other bytes than it must have."""
        found, half = np.empty_like(own), len(own) // 2
        found[:half] = slot[:half]
        self._may_stop()
        found[half:] = slot[half:]
        self._counts.add(WRONG, not np.array_equal(found, own))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_to_stop = number == signal.SIGUSR1

    def _may_stop(self) -> None:
        if self._is_to_stop:
            self._is_to_stop = False
            os.kill(os.getpid(), signal.SIGSTOP)


def work(link: Connection, counts: Counts) -> None:
    """Copy what the scheduler says, until it has gone."""
    copier, mapped = Copier(counts), MappedSegment([BLOCK_BYTES])
    while True:
        try:
            segment, is_load, copies = link.recv()
        except (EOFError, ConnectionError):
            return
        mapped.want(segment)
        is_mapped = mapped.boot == segment.boot
        for slot, name in copies if is_mapped else ():
            (copier.read if is_load else copier.write)(mapped.slots(0)[slot], content(name))
        try:
            link.send(is_mapped)
        except ConnectionError:
            return


class Scheduler:
    """Stores and loads documents, one after another."""

    def __init__(self, path: str, seed: int, link: Connection, counts: Counts) -> None:
        self._path = path
        self._rng = random.Random(seed)
        self._link = link
        self._counts = counts
        finished = Finished()
        self._transfers = TransferEngine({}, finished)
        self._memory = AttachedMemory(_host_slots)
        self._hello = Hello(VERSION, "torture", "torture", NAMESPACE, [GroupShape(16, False, BLOCK_BYTES)])
        attachment = Attachment(path, self._hello, [self._memory])
        self._tiers = SidecarTiers(
            attachment, [FullAttention(16)], [self._memory], self._transfers, ThreadLane(finished, "answers")
        )

    def run(self) -> None:
        """Go on until the worker has gone."""
        while True:
            self._poll()
            if not self._tiers.is_attached:
                time.sleep(0.002)
                continue
            names = names_of(self._rng.randrange(NUM_DOCUMENTS))
            is_there = np.count_nonzero(self._tiers.find(0, names) >= 0) > BLOCKS // 2
            if self._load(names) if is_there else self._store(names):
                self._counts.add(OPERATIONS)

    def _load(self, names: list[BlockName]) -> bool:
        blocks = NamedBlocks(names, [None, *names[:-1]], b"")
        fetch = self._tiers.fetch(0, blocks, lambda fetch, place, failure: None)
        while fetch.is_waiting:
            self._poll()
        copies = []
        for place in np.flatnonzero(fetch.slots != ABSENT).tolist():
            slot = int(fetch.slots[place])
            if digest(self._memory.host_block(slot)) == fetch.digest(place):
                copies.append((slot, names[place]))
            else:
                self._counts.add(WRONG)
        is_done = bool(copies) and self._ask(True, copies)
        fetch.release(range(len(names))[::-1])
        return is_done

    def _store(self, names: list[BlockName]) -> bool:
        slots = self._tiers.reserve(0, len(names))
        own = names[: len(slots)][::-1]
        if not slots:
            self._poll()
            return False
        ids = np.array(slots, np.intp)
        if not self._ask(False, list(zip(slots, own, strict=True))):
            self._tiers.abandon(0, ids)
            return False
        digests = [digest(self._memory.host_block(slot)) for slot in slots]
        self._tiers.publish(0, ids, [NamedSpan(0, len(own), own, None)], digests, np.zeros(len(slots), np.uint64))
        return True

    def _ask(self, is_load: bool, copies: Sequence[tuple[int, bytes]]) -> bool:
        """Have the worker copy; whether it has. Listens to the sidecar meanwhile."""
        boot = self._tiers.boot
        assert boot is not None
        self._link.send((Segment(boot, self._path, self._hello), is_load, copies))
        while not self._link.poll(0.005):
            self._poll()
        return bool(self._link.recv())

    def _poll(self) -> None:
        self._transfers.poll()
        self._tiers.poll()


def _host_slots(num_host_slots: int, file: int | None) -> BlockMemory:
    return CpuMemory(np.empty((0, BLOCK_BYTES), np.uint8), num_host_slots, file=file)


def speak_lmcache(endpoint: str, seed: int, counts: Counts) -> None:
    """Store and load documents as LMCache's client does, in one process."""
    from raw_engine import NUM_CHUNKS, Engine

    rng, copier = random.Random(seed), Copier(counts)
    engine: Engine | None = None
    num_requests = 0
    while True:
        num_requests += 1
        request = f"r{os.getpid()} {num_requests}"
        try:
            engine = engine or Engine(endpoint, ANSWER_MS)
            engine.salt = f"document {rng.randrange(NUM_DOCUMENTS)}"
            if engine.lookup(request) == NUM_CHUNKS:
                answer = engine.ask("prepare_retrieve", engine.key(request), 1)
                slots = answer["context"]["slots"] if answer["success"] else []
                for index, slot in enumerate(slots):
                    copier.read(_bytes_of(engine, slot), _chunk(engine.salt, index, slot["length"]))
                engine.ask("commit_retrieve", engine.key(request), 1)
            else:
                context = engine.ask("prepare_store", engine.key(request), 1)["context"]
                for index, slot in zip(context["chunk_indices"], context["slots"], strict=True):
                    copier.write(_bytes_of(engine, slot), _chunk(engine.salt, index, slot["length"]))
                engine.ask("commit_store", engine.key(request), 1, b"")
            engine.ask("end_session", request)
            counts.add(OPERATIONS)
        except TimeoutError:  # the sidecar has gone, or does not know this engine any more
            if engine is not None:
                engine.close()
            engine = None


def _chunk(salt: str, index: int, num_bytes: int) -> np.ndarray:
    return content(random.Random(f"{salt} {index}").randbytes(32), num_bytes)


def _bytes_of(engine: object, slot: object) -> np.ndarray:
    return np.frombuffer(engine.bytes_of(slot), np.uint8)  # type: ignore[attr-defined]


if __name__ == "__main__":
    kind, where, seed_text, counts_path, number_text, file_text = sys.argv[1:]
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    own_counts = Counts(counts_path, int(number_text))
    try:
        if kind == "lmcache":
            speak_lmcache(where, int(seed_text), own_counts)
        elif kind == "worker":
            work(Connection(int(file_text)), own_counts)
        else:
            Scheduler(where, int(seed_text), Connection(int(file_text)), own_counts).run()
    except (EOFError, ConnectionError):
        os._exit(0)  # the other process of this engine has gone
