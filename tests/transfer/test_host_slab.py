"""HostSlab: memory without a name in any file system, prepared in the background, usable at once."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kvtier.transfer import host_slab
from kvtier.transfer.host_slab import HostSlab
from kvtier.transfer.pinning import cuda_pin

DEADLINE_S = 10.0
PAGE = 4096


def wait_until(condition: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.001)
    return condition()


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def mapped_file(address: int) -> str:
    """What the kernel says is mapped at the address; empty for ordinary memory and for none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return "".join(path)
    return ""


def memory_files() -> list[str]:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor, or another thread's
            targets.append(os.readlink(link))
    return [target for target in targets if "kvtier-host-slab" in target]


def pinning(do: Callable[[int, int], object], undo: Callable[[int], object] = lambda address: None) -> host_slab.Pin:
    """What CUDA's registering looks like to a slab."""

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        do(address, num_bytes)
        return lambda: undo(address) and None

    return pin


def slab_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtier-host-slab"]


# --- slots


def test_slots_hold_their_own_bytes() -> None:
    slab = HostSlab(5, 1000)
    for slot in range(5):
        slab.blocks[slot] = slot + 1

    sums = slab.blocks.sum(axis=1, dtype=int)

    slab.close()
    assert slab.blocks.shape == (5, 1000)
    assert slab.num_bytes == 5000
    assert sums.tolist() == [1000, 2000, 3000, 4000, 5000]


def test_slots_begin_as_zeros() -> None:
    slab = HostSlab(3, 5000)

    assert not slab.blocks.any()

    slab.close()


@pytest.mark.parametrize(("num_slots", "block_bytes"), [(0, PAGE), (1, 1), (3, PAGE + 1)])
def test_any_size_is_prepared(num_slots: int, block_bytes: int) -> None:
    slab = HostSlab(num_slots, block_bytes)

    assert wait_until(lambda: slab.prepared)

    slab.close()
    assert slab.blocks.shape == (num_slots, block_bytes)


def test_a_slab_is_not_prepared_before_its_pieces_are() -> None:
    may_go_on = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for(may_go_on)))

    prepared_before = slab.prepared
    may_go_on.set()

    assert not prepared_before
    assert wait_until(lambda: slab.prepared)
    slab.close()


def test_bytes_written_while_a_slab_is_being_prepared_stay() -> None:
    written = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for(written)))
    slab.blocks[:] = 7

    written.set()
    assert wait_until(lambda: slab.prepared)

    assert (slab.blocks == 7).all()
    slab.close()


# --- nothing is left behind


def test_the_slots_are_in_a_memory_file() -> None:
    slab = HostSlab(4, PAGE)

    where = {mapped_file(slab.blocks[slot].ctypes.data) for slot in range(4)}

    slab.close()
    assert where == {"/memfd:kvtier-host-slab (deleted)"}


def test_close_and_the_last_view_give_the_memory_back() -> None:
    slab = HostSlab(4, PAGE)
    address = slab.blocks.ctypes.data
    num_files = len(memory_files())
    view = slab.blocks[2]
    view[:] = 9

    slab.close()
    del slab

    assert len(memory_files()) == num_files - 1
    assert (view == 9).all()
    assert "kvtier-host-slab" in mapped_file(address)
    del view
    assert "kvtier-host-slab" not in mapped_file(address)


def test_a_killed_process_leaves_no_file_anywhere(tmp_path: Path) -> None:
    num_bytes = 3 * 1_234_567  # a size that no other file has
    program = """
import sys
from kvtier.transfer.host_slab import HostSlab
slab = HostSlab(3, 1_234_567)
slab.blocks[:] = 1
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    with process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()

    assert said == b"ready\n"
    assert list(tmp_path.iterdir()) == []
    in_shared_memory = [entry for entry in os.scandir("/dev/shm") if entry.is_file()]
    assert not [entry for entry in in_shared_memory if num_bytes <= entry.stat().st_size < num_bytes + 2 * PAGE]


# --- the background work


@pytest.mark.parametrize("num_slots", [1, 5, 6, 7])
def test_every_piece_is_registered_once_and_in_order(monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 3 * PAGE)
    registered: list[tuple[int, int]] = []
    slab = HostSlab(num_slots, PAGE, pin=pinning(lambda address, num_bytes: registered.append((address, num_bytes))))

    assert wait_until(lambda: slab.prepared)

    slab.close()
    base = slab.blocks.ctypes.data
    ends = [min(start + 3 * PAGE, slab.num_bytes) for start in range(0, slab.num_bytes, 3 * PAGE)]
    assert registered == [(base + start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def test_a_piece_counts_as_prepared_after_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", PAGE)
    may_begin = threading.Event()
    prepared_before: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        wait_for(may_begin)
        prepared_before.append(slab.prepared_bytes)

    slab = HostSlab(3, PAGE, pinning(register))
    may_begin.set()

    assert wait_until(lambda: slab.prepared)
    slab.close()
    assert prepared_before == [0, PAGE, 2 * PAGE]


def test_a_failing_registration_leaves_the_slots_usable_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", PAGE)
    failing = threading.Event()
    num_calls: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        num_calls.append(num_bytes)
        if len(num_calls) == 2:
            failing.set()
            raise RuntimeError("cudaErrorMemoryAllocation")

    with caplog.at_level(logging.DEBUG, logger="kvtier"):
        slab = HostSlab(4, PAGE, pinning(register))
        wait_for(failing)
        slab.close()

    slab.blocks[:] = 7
    assert (slab.blocks == 7).all()
    assert not slab.prepared
    assert slab.prepared_bytes == PAGE
    assert len(num_calls) == 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "4096 of 16384 bytes" in record.getMessage()
    assert "cudaErrorMemoryAllocation" in record.getMessage()


def test_a_healthy_slab_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvtier"):
        slab = HostSlab(4, PAGE)
        assert wait_until(lambda: slab.prepared)
        slab.close()

    assert not caplog.records


def test_close_ends_the_thread_before_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 1)  # four million pieces: seconds of work
    registered: list[int] = []
    before = slab_threads()
    slab = HostSlab(1024, PAGE, pin=pinning(lambda address, num_bytes: registered.append(address)))
    num_more = len(slab_threads()) - len(before)

    slab.close()

    assert num_more == 1
    assert slab_threads() == before
    assert len(registered) < slab.num_bytes
    assert not slab.prepared


def test_close_unpins_every_piece_it_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", PAGE)
    pinned: set[int] = set()
    slab = HostSlab(3, PAGE, pin=pinning(lambda address, num_bytes: pinned.add(address), pinned.remove))
    assert wait_until(lambda: slab.prepared)
    assert len(pinned) == 3

    slab.close()

    assert not pinned


def test_waiting_for_a_slab_ends_when_it_is_prepared_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for(may_go_on)))

    too_early = slab.wait_prepared(0.01)
    may_go_on.set()
    in_time = slab.wait_prepared(DEADLINE_S)

    slab.close()
    assert not too_early
    assert in_time


def test_close_may_be_called_twice() -> None:
    slab = HostSlab(2, PAGE)
    slab.close()
    number_of_its_file = os.open(os.devnull, os.O_RDONLY)  # likely takes the number that the slab gave back

    slab.close()

    os.close(number_of_its_file)  # raises if the slab has closed it a second time


# --- pinning


def test_without_cupy_there_is_nothing_to_register_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)

    with pytest.raises(ImportError):
        cuda_pin()


def test_registering_pins_the_given_bytes_with_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = SimpleNamespace(
        hostRegister=lambda *arguments: calls.append(arguments),
        hostUnregister=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    blocks = np.zeros(PAGE, np.uint8)

    unpin = cuda_pin()(blocks.ctypes.data, PAGE)
    unpin()

    assert calls == [(blocks.ctypes.data, PAGE, 0), (blocks.ctypes.data,)]
