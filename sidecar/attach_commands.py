"""The shell commands that attach engines to a sidecar, as `kvtier sidecar` and its dashboard show them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.sidecar.config import SidecarConfig
from kvtier.sidecar.endpoints import socket_path
from kvtier.sidecar.lmcache.wire import NEEDED_CLIENT


@dataclass(frozen=True, slots=True)
class AttachCommand:
    """The commands that start one kind of engine. *lines* are run in the engine's environment, in order."""

    engine: str
    lines: tuple[str, ...]


def attach_commands(config: SidecarConfig) -> tuple[AttachCommand, ...]:
    """Return the commands for each kind of engine that the sidecar serves, kvtier's own connector first."""
    commands = []
    path = socket_path(config.socket)
    if path is not None:
        path = os.path.abspath(path)
        commands.append(AttachCommand("vLLM, with kvtier's connector", (connector_command(path),)))
        commands.append(AttachCommand("kvtier's own engine", (f"kvtier serve --sidecar unix://{path}",)))
    if config.lmcache is not None:
        lines = (f"pip install '{NEEDED_CLIENT}'", lmcache_command(config))
        commands.append(AttachCommand("vLLM 0.32 or 0.33, with LMCache's client", lines))
    return tuple(commands)


def connector_command(path: str) -> str:
    """Return the command that starts vLLM with kvtier's connector, attached to the sidecar's socket at *path*."""
    return _vllm_command(
        {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"sidecar": path},
        }
    )


def lmcache_command(config: SidecarConfig) -> str:
    """Return the command that starts vLLM with LMCache's client, attached to the sidecar."""
    assert config.lmcache is not None, "no endpoint for LMCache's client"
    extra: dict[str, object] = {}
    scheme, _, address = config.lmcache.listen.partition("://")
    if scheme == "ipc":  # a path has no host and port, which the client would join with a colon
        extra["lmcache.mp.server_urls"] = [config.lmcache.listen]
    else:
        host, _, port = address.rpartition(":")
        extra |= {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": int(port)}
    # If the sidecar is gone, an engine stalls for mq_timeout seconds. The client's default is five minutes.
    extra |= {"lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.mq_timeout": 5}
    extra["lmcache.mp.heartbeat_interval"] = 2
    return _vllm_command(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )


def _vllm_command(transfer: Mapping[str, object]) -> str:
    return f"vllm serve MODEL --kv-transfer-config '{json.dumps(transfer, separators=(',', ':'))}'"
