"""`NodeSidecar`: the one sidecar of a node, for all replicas of an application there."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.sidecar.config import sidecar_config

log = logging.getLogger(__name__)

NAMESPACE = "kvtier"
LOOK_S = 1.0  # pause between two checks whether the application is still deployed
AGAIN_S = 1.0  # pause between the unexpected end of a sidecar and its restart
READY_S = 120.0  # maximum time until a sidecar has its memory and its disk
ENDS_S = 10.0  # time after `drain_s` for a sidecar to end


class NodeSidecar:
    """An actor that keeps `kvtier sidecar` running while the application is deployed, then ends it and itself.

    The actor is detached, so that it outlives the replicas, which come and go. A thread of the actor owns the sidecar's
    process, which ends with the actor.
    """

    def __init__(self, app_name: str, tables: Mapping[str, object], path: str) -> None:
        self._app_name, self._tables, self._path = app_name, tables, path
        self._me = ray.get_runtime_context().current_actor
        self._thread = threading.Thread(target=self._keep, name="kvtier-node-sidecar", daemon=True)
        self._thread.start()

    def socket(self) -> str:
        """Wait until engines can attach, and return the socket's path. Raise TimeoutError if they cannot in time."""
        give_up_at = time.monotonic() + READY_S
        while not _is_listening(self._path):
            if time.monotonic() > give_up_at or not self._thread.is_alive():
                raise TimeoutError("the node's sidecar does not start; its log says why")
            time.sleep(0.05)
        return self._path

    def _keep(self) -> None:
        try:
            while self._app_is_there():
                process = self._start()
                while process.poll() is None and self._app_is_there():
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_S)
                if process.returncode is None:
                    self._end(process)
                    break
                log.warning("the node's sidecar has ended with status %d and is restarted", process.returncode)
                time.sleep(AGAIN_S)
        finally:
            ray.kill(self._me, no_restart=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the sidecar.

        Its tables may contain a token or a password. They go through a pipe, because every user of the machine can read
        a process's arguments.
        """
        command = [sys.executable, "-m", "kvtier.routing.ray_serve.sidecar_process", str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # a sidecar that has ended already is restarted
            pipe.write(json.dumps(self._tables).encode())
        return process

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(sidecar_config(None, self._tables).drain_s + ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        Path(self._path).unlink(missing_ok=True)

    def _app_is_there(self) -> bool:
        try:
            return self._app_name in serve.status().applications
        except ActorDiedError:  # Serve has been shut down
            return False
        except Exception:  # after an error of Ray's, nothing is known, and the sidecar keeps running
            log.warning("cannot determine whether the application is still deployed", exc_info=True)
            return True


async def sidecar_of_node(app_name: str, tables: Mapping[str, object]) -> str:
    """Return the socket of this node's sidecar, which is started if there is none yet."""
    node_id = ray.get_runtime_context().get_node_id()
    path = _socket_path(app_name, node_id)
    given: dict[str, object] = {"lmcache": None, "http": {"port": "none"}, **tables, "socket": {"path": path}}
    actor = (
        ray.remote(NodeSidecar)
        .options(
            name=f"sidecar of {app_name} at {node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(app_name, given, path)
    )
    return str(await actor.socket.remote())


def _socket_path(app_name: str, node_id: str) -> str:
    """Return a path that is short enough for a socket, in a private folder of this user."""
    folder = Path(tempfile.gettempdir()) / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: must be a private folder of this user; remove it")
    return str(folder / f"{blake2b(f'{node_id} {app_name}'.encode(), digest_size=8).hexdigest()}.sock")


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
    return True
