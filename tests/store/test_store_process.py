"""What a process of its own changes: shared memory, a process that dies or hangs, an owner that is killed."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from store_cases import blob_of, key_of, kv_bytes

from kvtier.store.blob_store import Blob
from kvtier.store.channel import SharedMemory
from kvtier.store.lmdb_store import LmdbStore
from kvtier.store.owner_lock import StoreInUse
from kvtier.store.record import Fault, digest
from kvtier.store.store_process import StoreDied, StoreProcess
from kvtier.store.store_settings import StoreSettings

CAPACITY_BYTES = 10 << 20
BLOCK_BYTES = 50_000
NUM_SLOTS = 16

# Opens a store, puts block 1, says so, and is killed.
OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_cases import blob_of
from kvtier.store.store_process import StoreProcess
from kvtier.store.store_settings import StoreSettings

store = StoreProcess(StoreSettings(Path(sys.argv[1]), 10 << 20))
store.put_many([blob_of(1)])
print(store._worker._process.pid, flush=True)
time.sleep(60)
"""


@dataclass
class Slab:
    """Host slots in a memory file."""

    shared: SharedMemory
    slots: np.ndarray

    def fill(self, slot: int, number: int) -> Blob:
        self.slots[slot] = np.frombuffer(kv_bytes(number, BLOCK_BYTES), np.uint8)
        raw = memoryview(self.slots[slot])
        return Blob(key_of(number), digest(raw), raw)


@pytest.fixture
def slab() -> Iterator[Slab]:
    file = os.memfd_create("slab")
    os.ftruncate(file, NUM_SLOTS * BLOCK_BYTES)
    slots = np.frombuffer(mmap.mmap(file, NUM_SLOTS * BLOCK_BYTES), np.uint8).reshape(NUM_SLOTS, BLOCK_BYTES)
    yield Slab(SharedMemory(file, slots.ctypes.data, slots.nbytes), slots)
    os.close(file)


@pytest.fixture
def store(tmp_path: Path, slab: Slab) -> Iterator[StoreProcess]:
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES), [slab.shared], timeout_s=2.0) as opened:
        yield opened


def pid_of(store: StoreProcess) -> int:
    assert store._worker is not None
    return store._worker._process.pid


def read(store: StoreProcess, number: int) -> bytes | Fault:
    out = bytearray(BLOCK_BYTES)
    (result,) = store.read_many([key_of(number)], [memoryview(out)])
    assert isinstance(result, Fault) or (result == digest(out) and out == kv_bytes(number, BLOCK_BYTES))
    return result


def test_blocks_go_from_slot_to_slot(store: StoreProcess, slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [slab.fill(slot, slot) for slot in range(8)]
    sent: list[int] = []
    send = type(store._worker._channels[0]).ask  # type: ignore[union-attr]

    def measure(channel: object, timeout_s: float, method: str, *arguments: object) -> object:
        sent.append(len(repr(arguments)))
        return send(channel, timeout_s, method, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store._worker._channels[0]), "ask", measure)  # type: ignore[union-attr]
    store.put_many(blobs)
    outs = [memoryview(slab.slots[8 + i]) for i in range(8)]

    assert store.read_many([key_of(i) for i in reversed(range(8))], outs) == [blob.digest for blob in reversed(blobs)]
    assert all((slab.slots[8 + i] == slab.slots[7 - i]).all() for i in range(8))
    assert sum(sent) < BLOCK_BYTES  # no block went over the socket


def test_shared_and_other_memory_in_one_call(store: StoreProcess, slab: Slab) -> None:
    store.put_many([slab.fill(0, 1), blob_of(2, BLOCK_BYTES)])
    other = bytearray(BLOCK_BYTES)

    results = store.read_many(
        [key_of(1), key_of(9), key_of(2)], [memoryview(other), slab.slots[4].data, slab.slots[5].data]
    )

    assert results == [digest(kv_bytes(1, BLOCK_BYTES)), Fault.MISSING, digest(kv_bytes(2, BLOCK_BYTES))]
    assert other == kv_bytes(1, BLOCK_BYTES)
    assert slab.slots[5].tobytes() == kv_bytes(2, BLOCK_BYTES)


def test_a_process_that_is_killed_costs_the_call_and_nothing_else(store: StoreProcess) -> None:
    store.put_many([blob_of(1, BLOCK_BYTES)])
    os.kill(pid_of(store), signal.SIGKILL)

    with pytest.raises(StoreDied, match="process ended"):
        store.put_many([blob_of(2, BLOCK_BYTES)])

    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
    store.put_many([blob_of(2, BLOCK_BYTES)])
    assert read(store, 2) == digest(kv_bytes(2, BLOCK_BYTES))
    store.check()
    assert store.num_starts == 2


def test_reads_of_a_killed_process_are_faults(store: StoreProcess) -> None:
    os.kill(pid_of(store), signal.SIGKILL)
    assert store.read_many([key_of(1), key_of(2)], [memoryview(bytearray(10))] * 2) == [Fault.IO_ERROR] * 2


def test_a_process_that_hangs_is_ended_and_the_call_returns_when_it_is_gone(store: StoreProcess) -> None:
    store.put_many([blob_of(1, BLOCK_BYTES)])
    pid = pid_of(store)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()

    assert read(store, 1) is Fault.IO_ERROR

    assert time.monotonic() - started >= 2.0
    assert _has_ended(pid)
    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_a_file_cut_short_under_the_process_ends_that_one_only(store: StoreProcess, tmp_path: Path) -> None:
    store.put_many([blob_of(n, BLOCK_BYTES) for n in range(20)])
    os.truncate(tmp_path / "store" / "data.mdb", 0)  # what a medium does that fails to read a mapped page: SIGBUS

    assert read(store, 1) is Fault.IO_ERROR

    store.put_many([blob_of(1, BLOCK_BYTES)])  # it starts again, empty
    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
    assert read(store, 2) is Fault.MISSING


def test_calls_under_way_when_the_process_dies_all_return(store: StoreProcess) -> None:
    store.put_many([blob_of(n, BLOCK_BYTES) for n in range(100)])
    results: list[bytes | Fault] = []
    done = threading.Event()

    def read_on(first: int) -> None:
        while not done.is_set():
            results.append(read(store, first))

    threads = [threading.Thread(target=read_on, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.2)
        os.kill(pid_of(store), signal.SIGKILL)
    time.sleep(0.3)
    done.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert {result for result in results if isinstance(result, Fault)} <= {Fault.IO_ERROR}
    assert any(not isinstance(result, Fault) for result in results[-50:])


def test_others_are_told_the_owner_and_may_open_once_it_has_closed(store: StoreProcess, tmp_path: Path) -> None:
    with pytest.raises(StoreInUse, match=f"open in process {os.getpid()};"):
        StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES))
    store.put_many([blob_of(1)])
    store.close()
    with LmdbStore(tmp_path / "store") as opened:
        assert opened.contains(key_of(1))


def test_after_kill_9_of_the_owner_the_next_start_takes_over(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", OWNER, str(tmp_path / "store"), str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)) as store:
        assert store.contains(key_of(1))
        store.check()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


def test_what_opening_raises_is_raised_here(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(FileExistsError):
        StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES))


def test_an_iteration_given_up_halfway_leaves_its_channel_in_order(store: StoreProcess) -> None:
    store.put_many([blob_of(n, 100) for n in range(50)])
    for _ in range(20):
        assert next(iter(store.keys())) == key_of(49)
    assert list(store.keys()) == [key_of(n) for n in reversed(range(50))]
    assert read_small(store) == digest(kv_bytes(3, 100))


def read_small(store: StoreProcess) -> bytes | Fault:
    return store.read_many([key_of(3)], [memoryview(bytearray(100))])[0]
