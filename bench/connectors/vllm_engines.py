"""`VllmEngines`: starts vLLM with the same options without a connector, with ours, or with another one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign.lmcache_server import lmcache_server
from foreign.offloading import offloading_vllm
from foreign.running import Vllm, transfer_config

from bench.connectors.connector_bed import DISK, started_sidecar, started_vllm

HOST_BYTES = 512 << 20  # of vLLM's own offloading

Started = Callable[[str, Path, Path], AbstractContextManager[Vllm]]
"""Starts vLLM for the given *python* and model, with files of its own in the given folder."""


@dataclass(frozen=True, slots=True)
class VllmEngines:
    """Starts vLLM with *options*. *disk* is the capacity of the sidecar's disk tier, or None for no disk tier."""

    options: dict[str, Any]
    disk: str | None = DISK

    @contextmanager
    def alone(self, python: str, model: Path, folder: Path) -> Iterator[Vllm]:
        """Start vLLM without a connector."""
        with started_vllm(python, model, None, **self.options) as engine:
            yield engine

    @contextmanager
    def ours(self, python: str, model: Path, folder: Path) -> Iterator[Vllm]:
        """Start vLLM with our connector, and a sidecar."""
        sidecar, socket = started_sidecar(folder, disk=self.disk)
        with sidecar, started_vllm(python, model, socket, **self.options) as engine:
            yield engine

    @contextmanager
    def native(self, python: str, model: Path, folder: Path) -> Iterator[Vllm]:
        """Start vLLM with its own offloading to host memory."""
        with offloading_vllm(python, model, [], HOST_BYTES, **self.options) as engine:
            yield engine

    @contextmanager
    def lmcache(self, python: str, model: Path, folder: Path) -> Iterator[Vllm]:
        """Start vLLM with LMCache's connector, and LMCache's server."""
        with lmcache_server(python) as url, Vllm(python, model, transfer_config(url), **self.options) as engine:
            yield engine
