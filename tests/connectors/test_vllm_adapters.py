"""Digests of adapters' weights: each taken once, and none believed once its files are others."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_connector_bed import FakeAdapter, InlineThreads
from waiting import join

from kvtier.connectors.vllm_connector.adapters import Adapters

NAME = "adapter_model.safetensors"


def adapter_at(folder: Path, number: int = 1, content: bytes = b"one") -> FakeAdapter:
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(content)
    return FakeAdapter("legal", number, str(folder))


@pytest.fixture
def adapters() -> Adapters:
    return Adapters(InlineThreads())


def test_weights_decide_and_neither_number_nor_place_do(adapters: Adapters, tmp_path: Path) -> None:
    first = adapter_at(tmp_path / "a")
    moved = adapter_at(tmp_path / "b", number=2)
    other = adapter_at(tmp_path / "c", content=b"two")  # under the number of the first

    digests = [adapters.digest(adapter) for adapter in (first, moved, other)]

    assert digests[0] == digests[1] != digests[2]
    assert None not in digests


def test_files_that_are_replaced_count_under_a_new_number(adapters: Adapters, tmp_path: Path) -> None:
    before = adapters.digest(adapter_at(tmp_path / "a"))
    adapter = adapter_at(tmp_path / "a", content=b"another")

    assert adapters.digest(adapter) is None
    assert adapters.digest(FakeAdapter("legal", 2, str(tmp_path / "a"))) not in (None, before)


def written_later(file: Path) -> None:
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))


def longer(file: Path) -> None:
    modified = file.stat().st_mtime_ns
    file.write_bytes(b"longer")
    os.utime(file, ns=(1, modified))


def renamed(file: Path) -> None:
    file.rename(file.with_name("model.safetensors"))


@pytest.mark.parametrize("change", [written_later, longer, renamed])
def test_a_changed_file_is_seen_by_its_time_its_size_or_its_name(
    change: Callable[[Path], None], adapters: Adapters, tmp_path: Path
) -> None:
    adapter = adapter_at(tmp_path / "a")
    assert adapters.digest(adapter) is not None

    change(tmp_path / "a" / NAME)

    assert adapters.digest(adapter) is None


def test_files_that_are_put_back_are_not_believed_again(adapters: Adapters, tmp_path: Path) -> None:
    adapter, file = adapter_at(tmp_path / "a"), tmp_path / "a" / NAME
    adapters.digest(adapter)
    modified = file.stat().st_mtime_ns
    written_later(file)
    assert adapters.digest(adapter) is None

    os.utime(file, ns=(1, modified))

    assert adapters.digest(adapter) is None
    assert not adapters.is_pending(adapter)


def test_a_digest_that_cannot_be_taken_is_none_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def damaged(folder: Path) -> str:
        raise ValueError("not a checkpoint")

    adapters, adapter = Adapters(InlineThreads(), damaged), adapter_at(tmp_path / "a")

    assert [adapters.digest(adapter), adapters.digest(adapter)] == [None, None]
    assert not adapters.is_pending(adapter)
    (told,) = caplog.messages
    assert "'legal'" in told
    assert "not a checkpoint" in told


def test_nobody_waits_for_a_digest_that_is_being_taken(tmp_path: Path) -> None:
    threads = InlineThreads()
    threads.is_held = True
    adapters, adapter = Adapters(threads), adapter_at(tmp_path / "a")
    assert adapters.is_pending(adapter)

    asking = threading.Thread(target=adapters.digest, args=[adapter], daemon=True)
    asking.start()
    join(asking)

    assert adapters.digest(adapter) is None
    threads.go_on()
    assert adapters.digest(adapter) is not None
