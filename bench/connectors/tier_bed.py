"""vLLM's own offloading with a disk below its host memory: kvtier's, or vLLM's own, a file for each block."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from foreign.offloading import fs_tier, kvtier_tier, offloading_vllm
from foreign.running import Vllm

HOST_BYTES = 384 << 20
KV_BYTES = 256 << 20
TIERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {"kvtier": kvtier_tier, "fs": fs_tier}


def started(python: str, model: Path, name: str, folder: Path, **options: Any) -> AbstractContextManager[Vllm]:
    """vLLM with the tier of that name, whose files are in a folder of that name."""
    tier = TIERS[name](folder / name)
    return offloading_vllm(python, model, [tier], HOST_BYTES, kv_cache_memory_bytes=KV_BYTES, **options)


def forget_pages(folder: Path) -> None:
    """Have the kernel forget what it has of the files in *folder*: what is read next comes from the medium."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def taken_bytes(folder: Path) -> int:
    """What the files in *folder* take on the medium. Files that go while it looks count nothing."""
    taken = 0
    for path in folder.rglob("*"):
        try:
            taken += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return taken
