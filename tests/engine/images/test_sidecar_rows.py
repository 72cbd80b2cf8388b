"""Rows of images in a sidecar: verified, shared by engines of one model, kept on disk, and lost without harm."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_sidecar import started_sidecar
from foreign.running import Sidecar
from waiting import wait_for

from kvtier.engine.images.sidecar_rows import SidecarRows

SHAPE = (3, 50, 700)  # four blocks, of which the last one is not full
KEY, TENANT = b"k" * 32, b"tenant-a"
WAIT_S = 60.0


@contextmanager
def rows_at(socket: str, namespace: bytes = b"n" * 16, width: int = SHAPE[2]) -> Iterator[SidecarRows]:
    rows = SidecarRows(socket, "a test", "a model (images)", namespace, SHAPE[0] * width * 4, WAIT_S)
    try:
        yield rows
    finally:
        rows.close()


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "own.sock")


@pytest.fixture
def sidecar(tmp_path: Path, socket: str) -> Iterator[Sidecar]:
    with started_sidecar(tmp_path, socket) as sidecar:
        yield sidecar


def read(rows: SidecarRows, key: bytes = KEY) -> torch.Tensor | None:
    return rows.read(key, SHAPE, torch.float32, TENANT)


def test_rows_are_read_as_they_were_written_by_engines_of_one_model(sidecar: Sidecar, socket: str) -> None:
    written = torch.randn(SHAPE)
    with rows_at(socket) as own, rows_at(socket) as same, rows_at(socket, b"o" * 16) as other:
        assert all(each.wait_told(WAIT_S) for each in (own, same, other))
        own.write(KEY, written, TENANT)
        own.flush()
        found = read(own)
        elsewhere = read(other), read(own, b"l" * 32)
    with rows_at(socket) as later:
        assert later.wait_told(WAIT_S)
        found_later = read(later)

    assert found is not None
    assert found_later is not None
    assert torch.equal(found, written)
    assert torch.equal(found_later, written)
    assert elsewhere == (None, None)


def test_rows_are_on_the_sidecars_disk_after_it_was_started_again(sidecar: Sidecar, socket: str) -> None:
    written = torch.randn(SHAPE)
    with rows_at(socket) as rows:
        assert rows.wait_told(WAIT_S)
        rows.write(KEY, written, TENANT)
        rows.flush()
    assert sidecar.stop() == 0
    sidecar.start()
    with rows_at(socket) as rows:
        assert rows.wait_told(WAIT_S)
        found = read(rows)

    assert found is not None
    assert torch.equal(found, written)


def test_damaged_rows_are_not_read(sidecar: Sidecar, socket: str, caplog: pytest.LogCaptureFixture) -> None:
    written = torch.randn(SHAPE)
    with rows_at(socket) as rows:
        assert rows.wait_told(WAIT_S)
        rows.write(KEY, written, TENANT)
        rows.flush()
        before = read(rows)
        sidecar.flip_host_memory()

        assert read(rows) is None
    assert before is not None
    assert "are damaged in the sidecar" in caplog.text


def test_cleared_rows_are_not_found_and_later_ones_are(sidecar: Sidecar, socket: str) -> None:
    written = torch.randn(SHAPE)
    with rows_at(socket) as rows:
        assert rows.wait_told(WAIT_S)
        rows.write(KEY, torch.randn(SHAPE), TENANT)
        rows.flush()
        rows.clear()
        assert read(rows) is None
        rows.flush()
        assert read(rows) is None

        rows.write(KEY, written, TENANT)
        rows.flush()
        found = read(rows)

    assert found is not None
    assert torch.equal(found, written)


def test_without_a_sidecar_rows_are_lost_and_nothing_waits(socket: str, caplog: pytest.LogCaptureFixture) -> None:
    with rows_at(socket) as rows:
        assert read(rows) is None
        rows.write(KEY, torch.randn(SHAPE), TENANT)
        rows.flush()
        rows.clear()
        rows.flush()
        assert read(rows) is None

    assert caplog.text.count("an image encoder's result is not stored in the sidecar (it is not attached)") == 1


def test_a_sidecar_that_dies_loses_rows_and_is_used_again_when_it_is_back(sidecar: Sidecar, socket: str) -> None:
    with rows_at(socket) as rows:
        assert rows.wait_told(WAIT_S)
        rows.write(KEY, torch.randn(SHAPE), TENANT)
        rows.flush()
        sidecar.kill()
        assert read(rows) is None

        def is_used_again() -> bool:
            rows.write(KEY, torch.ones(SHAPE), TENANT)
            rows.flush()
            return read(rows) is not None

        sidecar.start()
        wait_for(is_used_again)


def test_rows_too_large_for_the_sidecars_extents_are_refused_with_one_sentence(
    sidecar: Sidecar, socket: str, caplog: pytest.LogCaptureFixture
) -> None:
    with rows_at(socket, width=30_000) as rows:
        assert not rows.wait_told(WAIT_S)
        assert rows.read(KEY, (3, 50, 30_000), torch.float32, TENANT) is None

    assert "the sidecar does not keep the image encoder's results (" in caplog.text
