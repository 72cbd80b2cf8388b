"""LMCache's own server, beside which the sidecar is measured and tried."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foreign.running import free_endpoint

CHUNK_TOKENS = 256  # as the sidecar has them by default
STARTING_S = 60.0


@contextmanager
def lmcache_server(python: str) -> Iterator[str]:
    """LMCache's own server; its URL."""
    url = free_endpoint()
    host, port = url.removeprefix("tcp://").split(":")
    command = [str(Path(python).parent / "lmcache"), "server", "--transport", "zmq", "--host", host, "--port", port]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"]
    command += ["--shm-name", f"lmcache-bench-{os.getpid()}", "--l1-size-gb", "3", "--eviction-policy", "LRU"]
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            give_up_at = time.monotonic() + STARTING_S
            while time.monotonic() < give_up_at and process.poll() is None:
                with suppress(OSError), socket.create_connection((host, int(port)), 1):
                    break
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
