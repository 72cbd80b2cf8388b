"""A tier that is larger than the machine's memory or disk is refused in one line, also by the library."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from small_models import build, byte_tokenizer

from kvtier import LLM
from kvtier.engine.config import DiskConfig
from kvtier.engine.machine_limits import refuse_more_than_disk, refuse_more_than_memory


def llm_of(config: dict[str, Any]) -> LLM:
    return LLM(build("llama"), {"device": {"capacity": "1MiB"}, **config}, byte_tokenizer())


def test_the_library_refuses_more_host_memory_than_the_machine_has() -> None:
    with pytest.raises(ValueError, match=r"^host.capacity 999.0 TiB: is more than the memory of this machine, .*"):
        llm_of({"host": {"capacity": "999TiB"}})


def test_what_the_machine_has_is_let_through() -> None:
    refuse_more_than_memory("host.capacity", 1 << 20)


def test_the_library_refuses_a_disk_tier_larger_than_its_file_system_and_makes_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"

    with pytest.raises(
        ValueError, match=rf"^disk.capacity 999,999.0 TiB: is more than the whole file system of {folder}"
    ):
        llm_of({"host": {"capacity": "1MiB"}, "disk": {"path": str(folder), "capacity": "999999TiB"}})

    assert list(tmp_path.iterdir()) == []


def test_a_disk_tier_may_be_as_large_as_its_file_system(tmp_path: Path) -> None:
    total = shutil.disk_usage(tmp_path).total

    refuse_more_than_disk(DiskConfig(path=str(tmp_path / "store"), capacity=total))
    with pytest.raises(ValueError, match="give a smaller size, or a folder on a larger disk"):
        refuse_more_than_disk(DiskConfig(path=str(tmp_path / "store"), capacity=total + 1))


@pytest.mark.parametrize("answer", [OSError("no such call"), (0, 0, 0)], ids=["refused", "unknown"])
def test_a_file_system_that_does_not_tell_its_size_is_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: OSError | tuple[int, int, int]
) -> None:
    def disk_usage(path: Path) -> Any:
        if isinstance(answer, OSError):
            raise answer
        return type("Usage", (), dict(zip(("total", "used", "free"), answer, strict=True)))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)

    refuse_more_than_disk(DiskConfig(path=str(tmp_path), capacity=999 << 50))
