"""What a process of its own changes: shared memory, a process that dies or hangs, a caller that is interrupted, an
owner that is killed or forks."""

import contextlib
import errno
import gc
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import store_cases
from open_files import open_files
from store_cases import blob_of, key_of, kv_bytes
from waiting import DEADLINE_S, has_ended, interrupted_once, is_in, join, state_of, stop, wait_for

from kvtier.store.blob_store import Blob
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.owner_lock import FolderInUse
from kvtier.store.process.channel import Channel, SharedMemory
from kvtier.store.process.store_process import NUM_READERS, NUM_WRITERS, StoreDied, StoreProcess
from kvtier.store.record import Fault, digest
from kvtier.store.store_settings import StoreSettings

CAPACITY_BYTES = 10 << 20
BLOCK_BYTES = 50_000
NUM_SLOTS = 16

# Opens a store, puts block 1, says so, and is killed.
OWNER = """
import multiprocessing, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_cases import blob_of
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.store_settings import StoreSettings

store = StoreProcess(StoreSettings(Path(sys.argv[1]), 10 << 20))
store.put_many([blob_of(1)])
if "fork" in sys.argv:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
print(store.pid, flush=True)
time.sleep(60)
"""

# A store whose opening takes ten minutes once it has its folder.
SLOW_START = """
import time
from kvtier.store import owner_lock

acquire = owner_lock.OwnerLock.__init__

def acquire_and_wait(*arguments):
    acquire(*arguments)
    time.sleep(600)

owner_lock.OwnerLock.__init__ = acquire_and_wait
"""


class Unsendable(Exception):
    """Can be pickled, not unpickled."""

    def __init__(self, what: str, when: str) -> None:
        super().__init__(f"{what} {when}")


class RaisingCodec:
    """A codec that raises *error* in the store's process."""

    codec_id = 0
    name = "none"
    is_lossless = True
    is_fixed_length = True

    def __init__(self, error: str) -> None:
        self._error = error

    def encode(self, raw: memoryview) -> memoryview:
        raise eval(self._error)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        raise NotImplementedError


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
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES), [slab.shared], DEADLINE_S) as opened:
        yield opened


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProcess]:
    """A store that waits two seconds for a process that was stopped, and as long as it takes for one that is slow."""
    ask = Channel.ask

    def ask_and_wait(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        process = Path(f"/proc/{opened.pid}")
        return ask(channel, question, timeout_s if process.exists() and state_of(process) == "T" else DEADLINE_S)

    opened = StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES), timeout_s=2.0)
    monkeypatch.setattr(Channel, "ask", ask_and_wait)
    with opened:
        yield opened


def pid_of(store: StoreProcess) -> int:
    assert store.pid is not None
    return store.pid


def kill_when_asked(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process killed under the next call: it was there when that call looked."""
    ask = Channel.ask

    def kill_and_ask(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        monkeypatch.setattr(Channel, "ask", ask)
        os.kill(pid_of(store), signal.SIGKILL)
        return ask(channel, question, timeout_s)

    monkeypatch.setattr(Channel, "ask", kill_and_ask)


def read(store: StoreProcess, number: int) -> bytes | Fault:
    out = bytearray(BLOCK_BYTES)
    (result,) = store.read_many([key_of(number)], [memoryview(out)])
    assert isinstance(result, Fault) or (result == digest(out) and out == kv_bytes(number, BLOCK_BYTES))
    return result


def test_blocks_go_from_slot_to_slot(store: StoreProcess, slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [slab.fill(slot, slot) for slot in range(8)]
    sent: list[int] = []
    ask = Channel.ask

    def measure(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        answer = ask(channel, question, timeout_s)
        sent.append(len(question) + len(answer))
        return answer

    monkeypatch.setattr(Channel, "ask", measure)
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


def test_a_process_that_is_killed_costs_the_call_and_nothing_else(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_many([blob_of(1, BLOCK_BYTES)])
    kill_when_asked(store, monkeypatch)

    with pytest.raises(StoreDied, match="process ended"):
        store.put_many([blob_of(2, BLOCK_BYTES)])

    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
    store.put_many([blob_of(2, BLOCK_BYTES)])
    assert read(store, 2) == digest(kv_bytes(2, BLOCK_BYTES))
    store.check()
    assert store.num_starts == 2


def test_reads_of_a_killed_process_are_faults(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_when_asked(store, monkeypatch)

    assert store.read_many([key_of(1), key_of(2)], [memoryview(bytearray(10))] * 2) == [Fault.IO_ERROR] * 2


@pytest.mark.long
def test_a_process_that_hangs_is_ended_and_the_call_returns_when_it_is_gone(impatient: StoreProcess) -> None:
    impatient.put_many([blob_of(1, BLOCK_BYTES)])
    pid = pid_of(impatient)
    stop(pid)
    started = time.monotonic()

    assert read(impatient, 1) is Fault.IO_ERROR

    assert time.monotonic() - started >= 2.0
    assert has_ended(pid)
    assert read(impatient, 1) == digest(kv_bytes(1, BLOCK_BYTES))


def test_a_process_that_ended_between_two_calls_costs_none(store: StoreProcess) -> None:
    store.put_many([blob_of(1, BLOCK_BYTES)])
    pid = pid_of(store)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_ended(pid))

    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))

    assert store.num_starts == 2


@pytest.mark.parametrize("end_of_service", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda each: each.name)
def test_signals_that_end_a_whole_service_leave_the_process_to_its_owner_which_still_writes(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch, end_of_service: signal.Signals
) -> None:
    store.put_many([blob_of(1, BLOCK_BYTES)])
    pid = pid_of(store)
    ask = Channel.ask

    def signal_and_ask(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        os.kill(pid, end_of_service)
        return ask(channel, question, timeout_s)

    monkeypatch.setattr(Channel, "ask", signal_and_ask)
    store.put_many([blob_of(n, BLOCK_BYTES) for n in range(2, 6)])

    assert [read(store, n) for n in range(1, 6)] == [digest(kv_bytes(n, BLOCK_BYTES)) for n in range(1, 6)]
    assert (store.num_starts, store.num_ended) == (1, 0)
    store.close()
    assert has_ended(pid)


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

    threads = [threading.Thread(target=read_on, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        wait_for(lambda: read(store, 1) is not Fault.IO_ERROR)
        num_more = len(results) + 2 * len(threads)
        wait_for(lambda minimum=num_more: len(results) > minimum)  # type: ignore[misc]
        os.kill(pid_of(store), signal.SIGKILL)
    wait_for(lambda: not isinstance(read(store, 1), Fault))
    num_before = len(results)
    wait_for(lambda: any(not isinstance(result, Fault) for result in results[num_before:]))
    done.set()
    join(*threads)
    assert {result for result in results if isinstance(result, Fault)} <= {Fault.IO_ERROR}


def test_others_are_told_the_owner_and_may_open_once_it_has_closed(store: StoreProcess, tmp_path: Path) -> None:
    with pytest.raises(FolderInUse, match=f"open in process {os.getpid()};"):
        StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)).open()
    store.put_many([blob_of(1)])
    store.close()
    with LmdbStore(tmp_path / "store") as opened:
        assert opened.contains(key_of(1))


@pytest.mark.long
@pytest.mark.parametrize("has_forked", [False, True])
def test_after_kill_9_of_the_owner_the_next_start_takes_over(tmp_path: Path, has_forked: bool) -> None:
    arguments = [sys.executable, "-c", OWNER, str(tmp_path / "store"), str(Path(store_cases.__file__).parent)]
    with subprocess.Popen(arguments + ["fork"] * has_forked, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)) as store:
        assert store.contains(key_of(1))
        store.check()
    wait_for(lambda: not Path(f"/proc/{child}").exists())


def test_after_kill_9_of_an_owner_whose_store_is_still_opening_the_next_start_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    arguments = [sys.executable, "-c", OWNER, str(tmp_path / "store"), str(Path(store_cases.__file__).parent)]
    with subprocess.Popen(arguments) as owner:
        lock = tmp_path / "store" / "owner.lock"
        wait_for(lambda: lock.exists() and lock.read_text().strip() == str(owner.pid))
        owner.kill()

    monkeypatch.undo()
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)) as store:
        assert not store.contains(key_of(1))


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProcess]:
    """A store that a thread is opening and whose opening hangs, with the folder's lock held."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    with monkeypatch.context() as slow:
        slow.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        opened = StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES))

        def open_it() -> None:
            with contextlib.suppress(StoreDied):
                opened.open()

        opening = threading.Thread(target=open_it, daemon=True)
        opening.start()
        lock = tmp_path / "store" / "owner.lock"
        wait_for(lambda: lock.exists() and lock.read_text().strip() == str(os.getpid()))
    yield opened
    opened.close()
    join(opening)


def test_a_store_that_hangs_while_opening_holds_up_no_other_call(hanging: StoreProcess) -> None:
    def ask() -> None:
        with pytest.raises(StoreDied, match="still opening"):
            hanging.statistics()

    for _ in range(2 * NUM_READERS):
        finish(ask)
        assert read(hanging, 1) is Fault.IO_ERROR


@pytest.mark.parametrize("end", [StoreProcess.close, StoreProcess.stop_opening, StoreProcess.kill])
def test_closing_a_store_that_hangs_while_opening_gives_its_lock_back(
    hanging: StoreProcess, tmp_path: Path, end: Callable[[StoreProcess], None]
) -> None:
    finish(lambda: end(hanging))

    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as store:
        assert not store.contains(key_of(1))


def test_a_store_that_was_told_to_open_no_more_still_answers_until_its_process_ends(store: StoreProcess) -> None:
    fill(store)
    store.stop_opening()

    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
    os.kill(pid_of(store), signal.SIGKILL)

    assert [read(store, 1) for _ in range(2)] == [Fault.IO_ERROR] * 2
    assert (store.num_starts, store.num_ended) == (1, 1)


@pytest.mark.long
def test_it_is_known_what_a_process_has_ended_of(impatient: StoreProcess) -> None:
    pid = pid_of(impatient)
    os.kill(pid, signal.SIGSEGV)
    wait_for(lambda: has_ended(pid))
    assert (impatient.num_ended, impatient.why_ended) == (1, "signal SIGSEGV")
    stop(pid_of_next(impatient))
    assert read(impatient, 1) is Fault.IO_ERROR

    assert (impatient.num_starts, impatient.num_ended) == (2, 2)
    assert impatient.why_ended == "no answer in 2 s, signal SIGKILL"


def pid_of_next(store: StoreProcess) -> int:
    """The process that is started in place of one that has ended."""
    assert read(store, 1) is Fault.MISSING
    return pid_of(store)


def test_what_opening_raises_is_raised_here(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)).open()


def test_an_iteration_given_up_halfway_leaves_its_channel_in_order(store: StoreProcess) -> None:
    store.put_many([blob_of(n, 100) for n in range(50)])
    for _ in range(20):
        assert next(iter(store.keys())) == key_of(49)
    assert list(store.keys()) == [key_of(n) for n in reversed(range(50))]
    assert read_small(store) == digest(kv_bytes(3, 100))


def read_small(store: StoreProcess) -> bytes | Fault:
    return store.read_many([key_of(3)], [memoryview(bytearray(100))])[0]


def fill(store: StoreProcess) -> None:
    store.put_many([blob_of(n, BLOCK_BYTES) for n in range(8)])


def interrupted(call: Callable[[], object]) -> None:
    """Run *call* until Ctrl-C, which comes when its question is asked."""
    main = threading.get_ident()
    with interrupted_once(lambda: is_in(main, Channel.ask)), pytest.raises(KeyboardInterrupt):
        call()


def finish(call: Callable[[], object]) -> None:
    """Run *call*, which must come to its end, whatever that is."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result(DEADLINE_S)


def let_go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("method", ["read_many", "statistics", "keys", "touch"])
def test_an_interrupted_call_leaves_no_answer_to_another(store: StoreProcess, method: str) -> None:
    fill(store)
    pid = pid_of(store)
    calls: dict[str, Callable[[], object]] = {
        "read_many": lambda: read(store, 7),
        "statistics": store.statistics,
        "keys": lambda: list(store.keys()),
        "touch": lambda: store.touch([key_of(7)]),
    }
    stop(pid)

    interrupted(calls[method])

    let_go_on(pid)
    wait_for(lambda: has_ended(pid))  # no answer comes any more
    for _ in range(2):
        assert [read(store, n) for n in range(7)] == [digest(kv_bytes(n, BLOCK_BYTES)) for n in range(7)]
        assert store.delete([key_of(9), key_of(99)]) == 0
    assert store.statistics().num_records == 8


def test_memory_is_not_written_to_once_an_interrupted_read_has_returned(store: StoreProcess, slab: Slab) -> None:
    fill(store)
    pid = pid_of(store)
    slab.slots[3] = 0
    stop(pid)

    interrupted(lambda: store.read_many([key_of(7)], [memoryview(slab.slots[3])]))

    assert has_ended(pid)
    let_go_on(pid)
    assert not slab.slots[3].any()


def test_calls_beside_an_interrupted_one_end_as_with_a_process_that_died(store: StoreProcess) -> None:
    fill(store)
    results: list[bytes | Fault] = []
    stop(pid_of(store))
    threads = [threading.Thread(target=lambda: results.append(read(store, 1))) for _ in range(2 * NUM_READERS)]
    for thread in threads:
        thread.start()

    interrupted(store.sync)

    join(*threads)
    assert len(results) == 2 * NUM_READERS
    assert set(results) <= {Fault.IO_ERROR, digest(kv_bytes(1, BLOCK_BYTES))}
    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))


@pytest.mark.long
def test_an_interruption_between_any_two_lines_costs_no_channel_and_no_right_answer(store: StoreProcess) -> None:
    fill(store)
    num_lines = 0

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal num_lines
        if frame.f_code.co_name in ("_ask", "ask"):
            num_lines += event == "line"
            if num_lines == interrupted_line:
                raise KeyboardInterrupt
        return count

    for interrupted_line in range(1, 100):
        num_lines = 0
        for _ in range(2):  # one may get away
            sys.settrace(count)
            try:
                read(store, 7)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        finish(lambda: [store.contains(key_of(1)) for _ in range(2 * NUM_READERS)])
        assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
        if num_lines < interrupted_line:
            break
    assert interrupted_line > 10


def sockets() -> set[int]:
    """Descriptors of this process's sockets."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {int(link.name) for link in links if link.is_symlink() and os.readlink(link).startswith("socket:")}


def test_a_channel_that_is_lost_ends_the_process_and_no_call_waits_for_it(tmp_path: Path) -> None:
    before = sockets()
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)) as store:
        fill(store)
        pid = pid_of(store)

        with socket.socket(fileno=os.dup(max(sockets() - before))) as channel:
            channel.shutdown(socket.SHUT_RDWR)  # as when a call was interrupted before the channel had a name

        wait_for(lambda: has_ended(pid))
        assert [read(store, 1) for _ in range(2)] == 2 * [digest(kv_bytes(1, BLOCK_BYTES))]


def test_more_walks_than_channels_hold_up_nobody(store: StoreProcess) -> None:
    fill(store)

    walks = [store.keys() for _ in range(2 * NUM_READERS)]

    assert {next(walk) for walk in walks} == {key_of(7)}
    finish(lambda: read(store, 1))
    assert all(len(list(walk)) == 7 for walk in walks)
    assert store.num_starts == 1


def test_walks_that_ended_are_not_kept(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    lengths: list[int] = []
    ask = Channel.ask

    def measure(channel: Channel, question: bytes, timeout_s: float) -> memoryview:
        lengths.append(len(question))
        return ask(channel, question, timeout_s)

    monkeypatch.setattr(Channel, "ask", measure)
    for _ in range(100):
        next(store.keys())
        list(store.verify())

    assert max(lengths) < min(lengths) + 50  # each walk tells the process which ones have ended


def test_a_walk_ends_with_its_process(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    walk = store.keys()
    next(walk)
    kill_when_asked(store, monkeypatch)
    assert read(store, 1) is Fault.IO_ERROR

    with pytest.raises(StoreDied, match="ended"):
        list(walk)


@pytest.mark.parametrize("error", ["ConnectionAbortedError(103, 'oh')", "EOFError('oh')", "TimeoutError('oh')"])
def test_an_error_of_the_stores_is_no_end_of_its_process(tmp_path: Path, for_children: None, error: str) -> None:
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES, RaisingCodec(error))) as store:

        def put() -> None:
            with pytest.raises(type(eval(error)), match="oh") as raised:
                store.put_many([blob_of(1)])
            assert raised.value.args == eval(error).args

        finish(put)

        assert not store.contains(key_of(1))
        assert store.num_starts == 1


def test_an_error_that_cannot_be_sent_arrives_as_an_os_error_with_its_text(tmp_path: Path, for_children: None) -> None:
    codec = RaisingCodec("Unsendable('too much', 'at noon')")
    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES, codec)) as store:
        with pytest.raises(OSError, match="Unsendable: too much at noon") as raised:
            store.put_many([blob_of(1)])

        assert raised.value.errno == errno.EIO
        assert store.num_starts == 1


@pytest.mark.long
@pytest.mark.parametrize("method", ["delete", "put_many"])
def test_a_large_question_to_a_process_that_hangs_has_a_deadline(impatient: StoreProcess, method: str) -> None:
    many = {"delete": [key_of(n) for n in range(10_000)], "put_many": [blob_of(1, 1 << 20)]}[method]
    stop(pid_of(impatient))

    def ask() -> None:
        with pytest.raises(StoreDied, match="no answer in 2 s"):
            getattr(impatient, method)(many)

    finish(ask)

    assert impatient.num_starts == 1
    impatient.put_many([blob_of(1, 1 << 20)])
    assert impatient.num_starts == 2


@pytest.mark.long
def test_close_of_a_store_that_hangs_has_a_deadline(impatient: StoreProcess) -> None:
    pid = pid_of(impatient)
    stop(pid)

    finish(impatient.close)

    assert has_ended(pid)


def test_a_forked_child_leaves_the_store_alone(store: StoreProcess) -> None:
    fill(store)
    walk = store.keys()
    next(walk)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            uses = (lambda: list(walk), lambda: read(store, 1), store.sync, store.keys, store.statistics, store.open)
            for use in uses:
                with pytest.raises(ValueError, match=f"open in process {os.getppid()}"):
                    use()
            store.close()
            os._exit(0)
        os._exit(1)

    assert os.waitpid(child, 0)[1] == 0
    assert len(list(walk)) == 7
    assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))
    assert store.num_starts == 1


def test_a_forked_child_holds_no_socket_open(store: StoreProcess) -> None:
    before = len(sockets())
    child = os.fork()
    if child == 0:
        os._exit(before - len(sockets()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) >= NUM_READERS


def test_a_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with StoreProcess(StoreSettings(Path("store"), CAPACITY_BYTES)) as store:
        store.put_many([blob_of(1, BLOCK_BYTES)])
        monkeypatch.chdir(tmp_path / "elsewhere")
        kill_when_asked(store, monkeypatch)
        assert read(store, 1) is Fault.IO_ERROR

        assert read(store, 1) == digest(kv_bytes(1, BLOCK_BYTES))

    assert not (tmp_path / "elsewhere" / "store").exists()


def test_a_file_in_the_working_directory_is_no_module_of_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not the queue you wanted')")
    monkeypatch.chdir(tmp_path)

    with StoreProcess(StoreSettings(tmp_path / "store", CAPACITY_BYTES)) as store:
        store.put_many([blob_of(1)])


def niceness_of_threads(pid: int) -> list[int]:
    """The niceness of each thread of a process, the kindest last."""
    stats = [task.read_text().rpartition(")")[2].split() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return sorted(int(fields[16]) for fields in stats)  # proc_pid_stat(5): field 19, and two are before the bracket


@pytest.mark.parametrize("more", [0, 15])
def test_writers_are_nicer_than_the_process_that_started_them_and_no_thread_is_less_nice(
    tmp_path: Path, more: int
) -> None:
    def start_and_put() -> tuple[int, list[int]]:
        inherited = os.nice(more)  # of this thread, and so of what it starts
        settings = StoreSettings(tmp_path / "store", CAPACITY_BYTES, writer_niceness=7)
        with StoreProcess(settings, timeout_s=DEADLINE_S) as store:
            for number in range(NUM_WRITERS):  # each by another thread there
                store.put_many([blob_of(number)])
            return inherited, niceness_of_threads(pid_of(store))

    with ThreadPoolExecutor(1) as thread:
        inherited, found = thread.submit(start_and_put).result(DEADLINE_S)

    assert found[0] == inherited
    assert found[-NUM_WRITERS:] == [min(inherited + 7, 19)] * NUM_WRITERS


def close_while_it_dies(folder: Path) -> None:
    """Close a store whose process is killed before it has answered."""
    store = StoreProcess(StoreSettings(folder, CAPACITY_BYTES))
    store.open()
    assert store.pid is not None
    stop(store.pid)
    closer = threading.Thread(target=store.close)
    closer.start()
    wait_for(lambda: is_in(closer.ident or 0, Channel.ask))
    os.kill(store.pid, signal.SIGKILL)
    join(closer)


def crash_where_it_cannot_be_counted(folder: Path) -> None:
    """Crash the process of a store whose folder is gone."""
    store = StoreProcess(StoreSettings(folder, CAPACITY_BYTES))
    store.open()
    assert store.pid is not None
    shutil.rmtree(folder)
    os.kill(store.pid, signal.SIGSEGV)
    wait_for(lambda: is_refused(store))
    store.close()


def is_refused(store: StoreProcess) -> bool:
    """Whether the store raises an error."""
    try:
        store.statistics()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("fail", "logged"),
    [(close_while_it_dies, "not closed cleanly"), (crash_where_it_cannot_be_counted, "could not be counted")],
)
def test_records_of_the_log_keep_no_socket_of_a_store_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fail: Callable[[Path], None], logged: str
) -> None:
    gc.collect()
    before = open_files()["socket"]

    fail(tmp_path / "store")

    gc.collect()
    assert logged in caplog.text
    assert open_files()["socket"] <= before
