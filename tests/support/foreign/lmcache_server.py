"""LMCache's own server, beside which the sidecar is measured and tried, and above which our L2 adapter is."""

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foreign.running import ROOT, free_endpoint, free_port
from waiting import wait_for

CHUNK_TOKENS = 256  # as the sidecar has them by default
STARTING_S = 60.0
OUR_L2 = {"type": "plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KVTierL2"}


class LmcacheServer:
    """LMCache's own server in a process of its own, with memory of 3 GB in which engines of this machine write."""

    def __init__(self, python: str, *options: str) -> None:
        """*options*: beyond those of every server here, of two alike the last one counts."""
        self.url = free_endpoint()
        self._http_port = free_port()
        host, port = self.url.removeprefix("tcp://").split(":")
        command = [str(Path(python).parent / "lmcache"), "server", "--transport", "zmq", "--host", host, "--port", port]
        command += ["--http-port", str(self._http_port), "--prometheus-port", str(free_port())]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"]
        command += [
            "--shm-name",
            f"lmcache-bench-{os.getpid()}-{port}",
            "--l1-size-gb",
            "3",
            "--eviction-policy",
            "LRU",
        ]
        environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
        shown = None if "KVTIER_SHOW_ENGINES" in os.environ else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*command, *options], env=os.environ | environment, stdout=shown, stderr=shown, start_new_session=True
        )

    def wait_ready(self) -> None:
        """Return once it listens; RuntimeError if it has ended."""
        host, port = self.url.removeprefix("tcp://").split(":")

        def listens() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError("LMCache's server has ended")
            with suppress(OSError), socket.create_connection((host, int(port)), 1):
                return True
            return False

        wait_for(listens, 0.1)

    def status(self) -> Any:
        """What it says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status", timeout=STARTING_S) as answer:
            return json.load(answer)

    def wait_stored(self) -> None:
        """Return once all that engines have stored is in L2 too."""

        def has_stored() -> bool:
            storing = self.status()["storage_manager"]["store_controller"]
            return not storing["pending_keys_count"] and not storing["in_flight_task_count"]

        wait_for(has_stored, 0.05)

    def kill(self) -> None:
        """End it at once, with SIGKILL."""
        self._process.kill()
        self._process.wait(STARTING_S)

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


@contextmanager
def lmcache_server(python: str) -> Iterator[str]:
    """LMCache's own server; its URL."""
    with LmcacheServer(python) as server:
        yield server.url


def our_l2(folder: Path, capacity: str = "1GiB", **settings: object) -> str:
    """What `--l2-adapter` is given for our store in this folder."""
    return json.dumps({**OUR_L2, "adapter_params": {"path": str(folder), "capacity": capacity, **settings}})
