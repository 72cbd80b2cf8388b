"""Digests of LoRA adapters' weights, for the names of blocks: vLLM's hashes have an adapter's name and path only."""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from kvtier.connectors.vllm_connector.vllm_request import VllmAdapter
from kvtier.engine.attached.model_files import weight_files, weights_digest

log = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Known:
    stamp: Stamp
    digest: "Future[bytes]"
    is_usable: bool = True


class Adapters:
    """Each adapter's digest is taken once, when it is first asked for, about when vLLM loads it. If its files are
    others later nobody can tell which ones vLLM computes with, so nothing of it is named any more. Owned by the
    scheduler's thread; the digests are taken by *threads*."""

    def __init__(self, threads: Executor, digest: Callable[[Path], str] = weights_digest) -> None:
        self._threads = threads
        self._digest = digest
        self._known: dict[tuple[int, str], _Known] = {}

    def is_pending(self, adapter: VllmAdapter) -> bool:
        """Whether its digest is still being taken; that begins with the first question."""
        known = self._of(adapter)
        return known.is_usable and not known.digest.done()

    def digest(self, adapter: VllmAdapter) -> bytes | None:
        """32 bytes that stand for its weights; None if they cannot be known, or not yet."""
        known = self._of(adapter)
        if not known.is_usable or not known.digest.done():
            return None
        if known.digest.exception() is not None or _stamp(adapter) != known.stamp:
            known.is_usable = False
            log.warning(
                "adapter %r: its blocks are not kept (%s); give it under a new number once its files are in place",
                adapter.lora_name,
                known.digest.exception() or "its files have changed since it was loaded",
            )
            return None
        return known.digest.result()

    def _of(self, adapter: VllmAdapter) -> _Known:
        key = (adapter.lora_int_id, adapter.lora_path)
        if key not in self._known:
            path = Path(adapter.lora_path)
            taken = self._threads.submit(lambda: hashlib.sha256(self._digest(path).encode()).digest())
            self._known[key] = _Known(_stamp(adapter), taken)
        return self._known[key]


def _stamp(adapter: VllmAdapter) -> Stamp:
    """What changes when an adapter's files do; empty where there are none, as for the id of a hub."""
    try:
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in _files(adapter))
    except OSError:
        return ()


def _files(adapter: VllmAdapter) -> list[Path]:
    return weight_files(Path(adapter.lora_path))
