"""A sidecar with kvtier's own socket, and the real vLLM attached to it with `KVTierConnector`."""

import os
import random
from pathlib import Path
from typing import Any

from foreign.running import Sidecar, Vllm, connector_config, free_endpoint

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
NUM_TOKENS = 1026  # eight blocks of vLLM's on CPUs, and two tokens


class OwnSidecar(Sidecar):
    """A sidecar, and where engines attach to it."""

    def __init__(self, folder: Path, *remote: str, **running: Any) -> None:
        self.socket = str(folder / "own.sock")
        self.store = folder / "store"
        config = folder / "sidecar.toml"
        config.write_text('extent = "4MiB"\n')  # a hybrid has six groups, each in extents of its own
        options = ["--config", str(config), "--host", "256MiB", "--disk", f"{self.store}:512MiB"]
        super().__init__(free_endpoint(), *options, "--socket", self.socket, *remote, **running)


def engine(model: Path, sidecar: OwnSidecar, policy: str = "fail", before: str = "", **options: Any) -> Vllm:
    """Start vLLM with a model. *before* is Python that its process runs first."""
    return Vllm(
        PYTHON,
        model,
        connector_config(sidecar.socket, policy, deadline_ms=20_000),  # far: a busy machine is no test of it
        before=before,
        disable_hybrid_kv_cache_manager=False,
        **options,
    )


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return tokens that the seed decides."""
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(num_tokens)]
