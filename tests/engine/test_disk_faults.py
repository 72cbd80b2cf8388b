"""A disk that fails while an engine serves, or before it starts: right answers, what fits is cached, a line for each.

Real parts: models, processes, file systems. What takes its time is waited for, up to a deadline that is never reached.
"""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mounts import Mount
from small_models import VOCAB, build, byte_tokenizer

from kvtier import LLM, SamplingParams
from kvtier.engine import build_core as engine_build
from kvtier.engine.config import ConfigError
from kvtier.engine.llm import Completion
from kvtier.engine.observability.metrics.collector import EngineCollector
from kvtier.store.lmdb.lmdb_store import LmdbStore

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024
FOUND = 192  # of a prompt's tokens, on whole blocks
DEADLINE_S = 120.0
PROMPTS = [[(first * 31 + 7 * i + 3) % VOCAB for i in range(200)] for first in range(24)]

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


def llm_of(store: Path, **disk: Any) -> LLM:
    """An engine whose host memory has room for four prompts."""
    settings = {
        "device": {"capacity": 30 * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": 48 * BLOCK_BYTES},
        "disk": {"path": str(store), "capacity": "64MiB", **disk},
        "scheduler": {"load": "always"},
    }
    return LLM(build("llama"), settings, byte_tokenizer())


def ask(llm: LLM, prompt: Sequence[int]) -> Completion:
    (completion,) = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    return completion


@pytest.fixture(scope="module")
def right() -> list[Sequence[int]]:
    """The right answers: those of an engine without a cache below the device."""
    settings = {"device": {"capacity": 30 * BLOCK_BYTES, "block_size": BLOCK_SIZE}, "host": {"capacity": 0}}
    with LLM(build("llama"), settings, byte_tokenizer()) as llm:
        return [ask(llm, prompt).token_ids for prompt in PROMPTS]


def answers(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Sequence[int]]:
    return [ask(llm, prompt).token_ids for prompt in prompts]


def metrics_of(llm: LLM) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in EngineCollector(llm.statistics).collect()
        for sample in metric.samples
    }


def wait_for(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def is_open(llm: LLM) -> bool:
    """Whether the disk tier is open and knows what it has."""
    disk = llm.statistics().cache.disk
    return disk is not None and disk.is_open and disk.is_indexed


def is_written(llm: LLM) -> bool:
    """Whether nothing is left to write."""
    return llm.statistics().cache.routes["host_to_disk"].num_bytes > 0 and not llm.core.cache.num_in_flight


def lines_with(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]


def take_all_but(folder: Path, num_bytes: int) -> Path:
    """A file that leaves so many bytes of the file system."""
    hog, there = folder / "hog", os.statvfs(folder)
    with hog.open("wb", buffering=0) as file:
        for _ in range((there.f_bavail * there.f_frsize - num_bytes) // BLOCK_BYTES):
            file.write(b"\xff" * BLOCK_BYTES)
    return hog


@pytest.mark.long
def test_on_a_full_disk_answers_are_right_and_what_fits_is_kept(
    mount: Mount, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    point = mount(
        "-t", "tmpfs", "-o", "size=512m", "faults"
    )  # as much as the tier may take, most of it taken by others
    take_all_but(point, 48 << 20).rename(point / "others")
    with llm_of(point / "store", capacity="512MiB") as llm:
        take_all_but(point, 2 << 20)
        for _ in range(2):
            assert answers(llm) == right
        llm.check()

        assert len(lines_with(caplog, "is paused")) <= 1

    with llm_of(point / "store", capacity="512MiB") as llm:
        done = [ask(llm, prompt) for prompt in PROMPTS]

    assert [one.token_ids for one in done] == right
    assert sum(one.tokens.disk for one in done) >= FOUND
    assert not any("\n" in message for message in caplog.messages)


@pytest.mark.long
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_folder_removed_while_serving_is_told_of_once_and_opened_anew(
    tmp_path: Path, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture, is_made_anew: bool
) -> None:
    folder = tmp_path / "store"
    with llm_of(folder) as llm:
        assert answers(llm) == right
        wait_for(lambda: is_written(llm))
        shutil.rmtree(folder)
        if is_made_anew:
            folder.mkdir(mode=0o700)
            (folder / "letter").write_text("not the store's")
        assert answers(llm) == right
        wait_for(lambda: metrics_of(llm)["kvtier_disk_folder_gone_total",] == 1 and is_open(llm))

        assert answers(llm) == right
        llm.check()
        assert metrics_of(llm)["kvtier_disk_open",] == 1

    assert lines_with(caplog, "removed or replaced") == [
        f"disk: {folder} was removed or replaced while it was open; its blocks are lost, and it is reopened"
    ]
    if is_made_anew:
        assert (folder / "letter").read_text() == "not the store's"
    with llm_of(folder) as llm:
        done = ask(llm, PROMPTS[-1])
    assert (done.token_ids, done.tokens.disk) == (right[-1], FOUND)


@pytest.mark.long
def test_a_read_only_disk_is_joined_once_it_can_be_written_to(
    mount: Mount, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    point = mount("-t", "tmpfs", "-o", "size=64m", "faults")
    with llm_of(point / "store") as llm:
        ask(llm, PROMPTS[0])
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)

    with llm_of(point / "store") as llm:
        without = answers(llm)
        at_first = metrics_of(llm)
        said = list(caplog.messages)
        subprocess.run(["mount", "-o", "remount,rw", str(point)], check=True)
        wait_for(lambda: is_open(llm))
        joined = ask(llm, PROMPTS[0])

    assert without == right
    assert (at_first["kvtier_disk_open",], at_first["kvtier_disk_not_open", "read_only"]) == (0, 1)
    assert len(said) == 1
    assert said[0].startswith(f"disk: {point / 'store'} is not open ([Errno {errno.EROFS}] Read-only file system")
    assert said[0].endswith("); serving without it, trying again")
    assert (joined.token_ids, joined.tokens.disk) == (right[0], FOUND)


def test_a_file_system_that_becomes_read_only_while_serving_costs_the_disk_only(
    tmp_path: Path, mount: Mount, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    with (tmp_path / "image").open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(tmp_path / "image")], check=True)
    point = mount("-o", "loop", str(tmp_path / "image"))

    with llm_of(point / "store") as llm:
        assert answers(llm, PROMPTS[:12]) == right[:12]
        subprocess.run(["mount", "-o", "remount,abort", str(point)], check=True)  # as after an error of its own
        for _ in range(2):
            assert answers(llm) == right
        llm.check()
        wait_for(lambda: bool(lines_with(caplog, "is paused")) or not is_open(llm))

    assert len(lines_with(caplog, "writing failed")) <= 1
    assert len(lines_with(caplog, "reading failed")) <= 1
    assert len(lines_with(caplog, "flush:")) == 1
    assert not any("\n" in message for message in caplog.messages)


@pytest.mark.long
def test_a_store_that_another_has_open_is_joined_once_it_is_free(
    tmp_path: Path, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with llm_of(tmp_path / "store") as llm:
        ask(llm, PROMPTS[0])
    with LmdbStore(tmp_path / "store") as other, llm_of(tmp_path / "store") as llm:
        assert answers(llm) == right
        said = list(caplog.messages)
        other.close()
        wait_for(lambda: is_open(llm))
        joined = ask(llm, PROMPTS[0])

    why = f"folder {tmp_path / 'store'} is open in process {os.getpid()}; stop it, or give this one a folder of its own"
    assert said == [f"disk: {tmp_path / 'store'} is not open ({why}); serving without it, trying again"]
    assert (joined.token_ids, joined.tokens.disk) == (right[0], FOUND)


def test_a_folder_that_cannot_be_made_is_left_out_and_the_flush_says_so(
    tmp_path: Path, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / "file" / "store"

    with llm_of(folder) as llm:
        assert answers(llm, PROMPTS[:3]) == right[:3]
        assert llm.statistics().cache.tiers["disk"].num_blocks == 0

    why = f"[Errno {errno.EEXIST}] File exists: '{tmp_path / 'file'}'"
    opening, flush = caplog.messages
    assert opening == f"disk: {folder} is not open ({why}); serving without it, trying again"
    assert flush.startswith("flush: ")
    assert flush.endswith(f" blocks did not reach the disk ({folder} is not open: {why}); they will be recomputed")


def test_a_store_that_hangs_while_opening_holds_up_neither_start_nor_end(
    tmp_path: Path, right: list[Sequence[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    monkeypatch.setattr(engine_build, "OPENING_WAIT_S", 0.01)
    folder, lock = tmp_path / "store", tmp_path / "store" / "owner.lock"
    with monkeypatch.context() as slow:
        slow.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with llm_of(folder) as llm:
            assert answers(llm, PROMPTS[:3]) == right[:3]
            wait_for(lambda: lock.exists() and lock.read_text().strip() == str(os.getpid()))
            assert metrics_of(llm)["kvtier_disk_not_open", "opening"] == 1

    assert caplog.messages[0] == (
        f"disk: {folder} is not open (it is still being opened); serving without it, trying again"
    )
    with LmdbStore(folder, 64 << 20) as store:  # its lock was given back
        assert store.statistics().num_records == 0


@pytest.mark.long
def test_a_store_whose_process_is_killed_while_serving_is_started_again(
    tmp_path: Path, right: list[Sequence[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with llm_of(tmp_path / "store") as llm:
        assert answers(llm) == right
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                if "store_server" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(int(child), signal.SIGKILL)
        assert answers(llm) == right
        wait_for(lambda: bool(lines_with(caplog, "started again")) or answers(llm) != right)
        llm.check()
        assert metrics_of(llm)["kvtier_disk_process_ended_total",] == 1

    assert lines_with(caplog, "disk: the store's process") == [
        "disk: the store's process ended (signal SIGKILL)",
        "disk: the store's process was started again",
    ]


def test_what_the_configuration_has_wrong_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        llm_of(tmp_path / "store", capacty="1GiB")
    with pytest.raises(ValueError, match=r"disk capacity: .* use .* or more"):
        llm_of(tmp_path / "store", capacity="1KiB")
    with pytest.raises(ValueError, match="make one with: openssl"):
        llm_of(tmp_path / "store", encryption_key_file=str(tmp_path / "no key"))
