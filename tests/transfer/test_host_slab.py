"""HostSlab: memory that is in no file system, is prepared in the background, and can be used at once."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from waiting import DEADLINE_S, is_in, join, wait_for

from kvtier.transfer import host_slab, pages
from kvtier.transfer.cuda import memory as cuda_memory
from kvtier.transfer.cuda.memory import cuda_pin, node_of_gpu
from kvtier.transfer.host_slab import HostSlab

PAGE = 4096


def wait_for_event(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def mapped_file(address: int) -> str:
    """The file that is mapped at the address, as the kernel names it; empty for ordinary memory and for none."""
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
    """A function that pins as CUDA's registering does, as a slab sees it."""

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

    wait_for(lambda: slab.prepared)

    slab.close()
    assert slab.blocks.shape == (num_slots, block_bytes)


def test_a_slab_is_not_prepared_before_its_pieces_are() -> None:
    may_go_on = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for_event(may_go_on)))

    prepared_before = slab.prepared
    may_go_on.set()

    assert not prepared_before
    wait_for(lambda: slab.prepared)
    slab.close()


def test_bytes_written_while_a_slab_is_being_prepared_stay() -> None:
    written = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for_event(written)))
    slab.blocks[:] = 7

    written.set()
    wait_for(lambda: slab.prepared)

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

    wait_for(lambda: slab.prepared)

    slab.close()
    base = slab.blocks.ctypes.data
    ends = [min(start + 3 * PAGE, slab.num_bytes) for start in range(0, slab.num_bytes, 3 * PAGE)]
    assert registered == [(base + start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def test_a_piece_counts_as_prepared_after_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", PAGE)
    may_begin = threading.Event()
    prepared_before: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        wait_for_event(may_begin)
        prepared_before.append(slab.prepared_bytes)

    slab = HostSlab(3, PAGE, pinning(register))
    may_begin.set()

    wait_for(lambda: slab.prepared)
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
        wait_for_event(failing)
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
        wait_for(lambda: slab.prepared)
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
    wait_for(lambda: slab.prepared)
    assert len(pinned) == 3

    slab.close()

    assert not pinned


def test_waiting_for_a_slab_ends_when_it_is_prepared_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    slab = HostSlab(4, PAGE, pin=pinning(lambda address, num_bytes: wait_for_event(may_go_on)))

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


def test_a_slab_that_is_dropped_leaves_no_file() -> None:
    gc.collect()  # other tests' slabs
    before = memory_files()
    slab = HostSlab(2, PAGE)
    assert slab.wait_prepared(DEADLINE_S)

    del slab
    gc.collect()

    assert memory_files() == before


# --- pieces


@pytest.mark.parametrize(
    ("block_bytes", "num_slots"),
    [
        (PAGE, 8192),  # 32 MiB
        (512 << 10, 64),
        (5 << 20, 6),
        (48 << 20, 1),  # larger than a piece should be
        (PAGE // 2, 16384),
        (24_576 + 512, 1336),  # eight of them are whole pages
        (5003, 4096),  # no page divides it
    ],
)
def test_a_piece_has_whole_slots_and_whole_pages(block_bytes: int, num_slots: int) -> None:
    slots = host_slab.slots_per_piece(block_bytes, 32 << 20)

    assert slots == num_slots
    assert slots * block_bytes % PAGE == 0


def test_slots_count_as_pinned_from_the_first_on_as_pieces_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 2 * PAGE)
    may_begin = threading.Event()
    seen: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        wait_for_event(may_begin)
        seen.append(slab.num_pinned_slots)

    slab = HostSlab(5, PAGE, pinning(register))
    may_begin.set()

    wait_for(lambda: slab.prepared)
    slab.close()
    assert seen == [0, 2, 4]
    assert slab.num_pinned_slots == 5


def test_a_slab_without_a_pin_has_no_pinned_slots() -> None:
    slab = HostSlab(5, PAGE)

    assert slab.wait_prepared(DEADLINE_S)

    slab.close()
    assert slab.num_pinned_slots == 0


def test_pinning_rests_as_long_as_a_piece_took_while_blocks_are_copied() -> None:
    assert host_slab.pause_s(0.5, copied=True) == 0.5
    assert host_slab.pause_s(0.5, copied=False) == host_slab.YIELD_S


def test_the_next_piece_waits_while_blocks_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", PAGE)
    may_begin, pinned = threading.Event(), threading.Event()
    asked: list[bool] = []
    num_calls: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        wait_for_event(may_begin)
        num_calls.append(num_bytes)

    def pause_s(took_s: float, copied: bool) -> float:
        asked.append(copied)
        pinned.set()
        return 60.0

    monkeypatch.setattr(host_slab, "pause_s", pause_s)
    slab = HostSlab(3, PAGE, pinning(register))
    slab.copied = True
    may_begin.set()
    wait_for_event(pinned)

    slab.close()  # ends the pause

    assert asked == [True]
    assert len(num_calls) == 1


# --- slots in another process's file


@pytest.fixture
def segment() -> Iterator[int]:
    """The descriptor of a file of ten pages, of which none is backed."""
    file = os.memfd_create("segment")
    os.ftruncate(file, 10 * PAGE)
    yield file
    os.close(file)


def test_slots_of_a_file_are_its_bytes_from_the_beginning(segment: int) -> None:
    slab = HostSlab(3, 1000, file=segment)
    slab.blocks[2] = 7
    os.pwrite(segment, b"\x05" * 1000, 1000)

    content = os.pread(segment, 10 * PAGE, 0)

    assert content[2000:3000] == b"\x07" * 1000
    assert not any(content[:1000])
    assert not any(content[3000:])
    assert set(slab.blocks[1].tolist()) == {5}
    slab.close()


def test_a_slab_has_a_descriptor_of_its_own_to_a_file(segment: int) -> None:
    os.posix_fallocate(segment, 0, 10 * PAGE)
    slab = HostSlab(10, PAGE, file=segment)
    assert slab.wait_prepared(DEADLINE_S)

    file, _, num_bytes = slab.span
    slab.close()

    assert file != segment
    assert num_bytes == 10 * PAGE
    assert os.fstat(segment).st_size == 10 * PAGE  # the caller's is open
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_file_is_prepared_as_far_as_its_process_has_backed_it(
    segment: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 2 * PAGE)
    os.posix_fallocate(segment, 0, 5 * PAGE)
    slab = HostSlab(9, PAGE, pin=pinning(lambda address, num_bytes: None), file=segment)

    wait_for(lambda: slab.prepared_bytes == 4 * PAGE)
    slab.blocks[8] = 7  # which touches a page behind the hole, as slots that are not prepared may be used
    os.posix_fallocate(segment, 0, 10 * PAGE)

    assert slab.wait_prepared(DEADLINE_S)
    assert slab.num_pinned_slots == 9
    assert set(slab.blocks[8].tolist()) == {7}
    slab.close()
    assert not caplog.records


def test_a_slab_backs_no_page_of_another_process(segment: int) -> None:
    slab = HostSlab(10, PAGE, file=segment)
    [thread] = slab_threads()
    wait_for(lambda: slab.prepared or is_in(thread.ident or 0, threading.Event.wait))

    slab.close()

    assert os.fstat(segment).st_blocks == 0
    assert not slab.prepared


def test_a_slab_whose_file_is_not_backed_can_be_closed(segment: int) -> None:
    slab = HostSlab(10, PAGE, file=segment)

    slab.close()

    assert not slab_threads()


def test_a_file_that_is_too_short_is_refused(segment: int) -> None:
    with pytest.raises(OSError, match="the file has 40960"):
        HostSlab(11, PAGE, file=segment)


# --- where pages lie


def test_memory_is_asked_for_from_the_node_given(caplog: pytest.LogCaptureFixture) -> None:
    slab = HostSlab(64, PAGE, node=0)
    assert slab.wait_prepared(DEADLINE_S)
    if caplog.records:
        pytest.skip("the kernel, or a sandbox, forbids mbind")

    [line] = [
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if line.startswith(f"{slab.blocks.ctypes.data:x} ")
    ]

    slab.close()
    assert "prefer" in line.split()[1]
    assert "N0=64" in line


def test_a_node_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    slab = HostSlab(4, PAGE, node=63)

    assert slab.wait_prepared(DEADLINE_S)

    slab.close()
    assert "refuses to place memory on node 63" in caplog.text


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="Linux before 5.14 cannot")
def test_pages_are_entered_in_the_page_table() -> None:
    slab = HostSlab(64, PAGE)
    assert slab.wait_prepared(DEADLINE_S)
    start = f"{slab.blocks.ctypes.data:x}-"
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags")

    [entry] = [entry for entry in smaps if f"\n{start}" in entry]

    slab.close()
    assert "Rss:                 256 kB" in entry


@pytest.mark.parametrize(
    ("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)], ids=repr
)
def test_the_node_of_a_device_is_what_the_kernel_says(tmp_path: Path, content: str | None, node: int | None) -> None:
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    if content is not None:
        (device / "numa_node").write_text(content)

    assert pages.node_of_device("0000:1B:00.0", tmp_path) == node


def test_a_machine_with_one_node_has_nothing_to_choose(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("0\n")

    assert pages.node_of_device("0000:1b:00.0", tmp_path) is None


def test_without_a_known_call_memory_lies_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.platform, "machine", lambda: "vax")

    assert not pages.prefer_node(0, PAGE, 0)


# --- pinning


class FakeCudart:
    """Stands for torch's CUDA runtime; `refuse` is the error of the next registration."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.refuse = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append((address, num_bytes, flags))
        return self.refuse

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return cudart


def test_registering_pins_the_given_bytes_for_every_gpu(cudart: FakeCudart) -> None:
    unpin = cuda_pin(torch.device("cuda", 0))(4096, 8192)
    unpin()

    assert cudart.calls == [(4096, 8192, 1), (4096,)]


def test_a_refused_registration_raises_with_its_error(cudart: FakeCudart) -> None:
    cudart.refuse = 2

    with pytest.raises(RuntimeError, match="of 8192 bytes failed with CUDA error 2"):
        cuda_pin(torch.device("cuda", 0))(4096, 8192)


def test_one_piece_of_the_process_is_registered_at_a_time(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = [cuda_pin(torch.device("cuda", 0)) for _ in range(2)]  # as two slabs do
    threads = [threading.Thread(target=pin, args=(0, 1)) for pin in pins]
    num_inside = 0
    seen: list[int] = []

    def has_ended(thread: threading.Thread) -> bool:
        return thread.ident is not None and not thread.is_alive()

    def register(address: int, num_bytes: int, flags: int) -> int:
        nonlocal num_inside
        num_inside += 1
        wait_for(lambda: all(is_in(thread.ident or 0, pins[0]) or has_ended(thread) for thread in threads))
        seen.append(num_inside)
        num_inside -= 1
        return 0

    monkeypatch.setattr(cudart, "cudaHostRegister", register)
    for thread in threads:
        thread.start()
    join(*threads)

    assert seen == [1, 1]


def test_the_node_of_a_gpu_is_looked_up_under_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cuda_memory, "node_of_device", lambda address: {"0000:1b:00.0": 1}[address])

    assert node_of_gpu(torch.device("cuda", 0)) == 1
