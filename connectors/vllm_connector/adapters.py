"""Digests of LoRA adapters' weights for block names, because vLLM's hashes cover only an adapter's name and path."""

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
    """The digests of the LoRA adapters in use, which become part of block names.

    An adapter's digest is computed once, at its first use, which is about when vLLM loads the adapter. If the adapter's
    files change later, it is unknown whether vLLM computes with the old or the new weights. So from then on, blocks of
    this adapter are neither stored nor found. Only the scheduler's thread may use the object.
    """

    def __init__(self, threads: Executor, digest: Callable[[Path], str] = weights_digest) -> None:
        """Create an empty collection. *digest* computes the digest of an adapter's folder, on *threads*."""
        self._threads = threads
        self._digest = digest
        self._known: dict[tuple[int, str], _Known] = {}

    def is_pending(self, adapter: VllmAdapter) -> bool:
        """Return whether the adapter's digest is being computed. The first call for an adapter starts to compute it."""
        known = self._of(adapter)
        return known.is_usable and not known.digest.done()

    def digest(self, adapter: VllmAdapter) -> bytes | None:
        """Return the 32-byte digest of the adapter's weights, or None if it is pending or cannot be determined."""
        known = self._of(adapter)
        if not known.is_usable or not known.digest.done():
            return None
        if known.digest.exception() is not None or _stamp(adapter) != known.stamp:
            known.is_usable = False
            log.warning(
                "kvtier: blocks of adapter %r are not stored (%s); fix its files and load it with a new lora_int_id",
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
    """Return a value that changes when the adapter's files change. It is empty if there are no local files."""
    try:
        return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in _files(adapter))
    except OSError:
        return ()


def _files(adapter: VllmAdapter) -> list[Path]:
    return weight_files(Path(adapter.lora_path))
