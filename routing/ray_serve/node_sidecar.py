"""`NodeSidecar`: runs the sidecar that all replicas of an application on one node share."""

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
READY_S = 120.0  # maximum time that a sidecar needs to allocate its memory and to open its disk
ENDS_S = 10.0  # time after `drain_s` for a sidecar to end


class NodeSidecar:
    """A Ray actor that keeps `kvtier sidecar` running on its node while the application is deployed.

    When the application is deleted, the actor ends the sidecar and itself. The actor is detached, so that it outlives
    the replicas, which come and go. If the actor's process dies, the sidecar ends too.
    """

    def __init__(self, app_name: str, tables: Mapping[str, object], path: str) -> None:
        self._app_name, self._tables, self._path = app_name, tables, path
        self._me = ray.get_runtime_context().current_actor
        self._thread = threading.Thread(target=self._keep, name="kvtier-node-sidecar", daemon=True)
        self._thread.start()

    def socket(self) -> str:
        """Wait until the sidecar accepts engines, and return the path of its socket.

        Raises TimeoutError if the sidecar does not accept engines within `READY_S` seconds.
        """
        give_up_at = time.monotonic() + READY_S
        while not _is_listening(self._path):
            if time.monotonic() > give_up_at or not self._thread.is_alive():
                raise TimeoutError("the node's sidecar did not start; look for the reason in its log")
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
                log.warning("the node's sidecar ended with status %d and will be restarted", process.returncode)
                time.sleep(AGAIN_S)
        finally:
            ray.kill(self._me, no_restart=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the sidecar's process.

        The sidecar's configuration may contain a token or a password, so it is sent through a pipe. As an
        argument of the process, it could be read by every user of the machine.
        """
        command = [sys.executable, "-m", "kvtier.routing.ray_serve.sidecar_process", str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # if the process has already ended, `_keep` restarts it
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
        except Exception:  # Ray does not know, so the sidecar keeps running
            log.warning("cannot check whether the application is deployed; the sidecar keeps running", exc_info=True)
            return True


async def sidecar_of_node(app_name: str, tables: Mapping[str, object]) -> str:
    """Return the path of the socket of this node's sidecar. Start the sidecar if it is not running yet."""
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
    """Return a path for the sidecar's socket in a private folder of this user, short enough for a Unix socket."""
    folder = Path(tempfile.gettempdir()) / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: is not a private folder of this user; remove it, and kvtier will create one")
    return str(folder / f"{blake2b(f'{node_id} {app_name}'.encode(), digest_size=8).hexdigest()}.sock")


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
    return True
