"""A sidecar, and the real vLLM that is attached to it by our own connector."""

import random
from pathlib import Path
from typing import Any

from foreign.running import Sidecar, Vllm, connector_config, free_endpoint

HOST, DISK = "1GiB", "2GiB"


def started_sidecar(folder: Path, disk: str | None = DISK) -> tuple[Sidecar, str]:
    """A sidecar with host memory and a disk of that size, or without a disk, and its socket."""
    socket = str(folder / "own.sock")
    of_disk = [] if disk is None else ["--disk", f"{folder / 'store'}:{disk}"]
    return Sidecar(free_endpoint(), "--host", HOST, *of_disk, "--socket", socket), socket


def started_vllm(python: str, model: Path, socket: str | None, policy: str = "fail", **options: Any) -> Vllm:
    """vLLM on the connector; without one if there is no *socket*."""
    transfer = {} if socket is None else connector_config(socket, policy)
    return Vllm(python, model, transfer, disable_hybrid_kv_cache_manager=False, **options)


class Prompts:
    """Prompts of random letters, none of which comes twice."""

    def __init__(self, num_tokens: int, seed: int = 1) -> None:
        self._num_tokens = num_tokens
        self._rng = random.Random(seed)

    def next(self) -> list[int]:
        """Another one."""
        return [self._rng.randrange(3, 259) for _ in range(self._num_tokens)]
