"""The `kvtier sidecar` command: prints the settings and how to attach engines, then serves engines."""

import json
import os
from collections.abc import Mapping

from kvtier.engine.config import size_text
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.sidecar.endpoints import socket_path
from kvtier.sidecar.lmcache.wire import NEEDED_CLIENT
from kvtier.sidecar.process import run_process, url_of, validate


def run_sidecar(source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Serve engines until a signal arrives, and return the exit status.

    Raises ValueError or OSError for unusable settings, before an engine can attach.

    Args:
        source: Configuration file, or None.
        given: Tables of settings from the command line, which override keys of *source*.
        checks_only: Whether to only check and print the resulting configuration.
    """
    config = sidecar_config(source, given)
    validate(config)
    for line in _plan(config):
        print(line, flush=True)
    return 0 if checks_only else run_process(config)


def attach_command(config: SidecarConfig) -> str:
    """Return the shell command that starts a vLLM engine attached to the sidecar."""
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
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return f"vllm serve MODEL --kv-transfer-config '{json.dumps(transfer, separators=(',', ':'))}'"


def _plan(config: SidecarConfig) -> list[str]:
    lines = [f"host memory  {size_text(config.host.capacity)}, allocated in extents of {size_text(config.extent)}"]
    if config.disk is None:
        lines.append("disk         none: blocks evicted from host memory are lost; give --disk PATH:SIZE to keep them")
    else:
        lines.append(f"disk         {config.disk.path}, at most {size_text(config.disk.capacity)}")
    if config.remote is not None:
        lines.append(f"remote       {config.remote.where}, shared with other machines")
    if config.http.port != "none":
        where = url_of(config.http.host, config.http.port) if config.http.port else "a free port"
        lines.append(f"http         {where}: /health, /metrics, kvtier top")
    path = socket_path(config.socket)
    if path is None and config.socket.path != "none":
        lines.append("kvtier       no socket: neither $XDG_RUNTIME_DIR nor /run is writable; give --socket PATH")
    if path is not None:
        lines.append(f"kvtier       {path}")
        lines.append(f"\nAttach kvtier's own engine:\n\n  kvtier serve --sidecar unix://{os.path.abspath(path)}\n")
    if config.lmcache is not None:
        lines.append(f"engines      {config.lmcache.listen}, chunks of {config.lmcache.chunk_tokens} tokens")
        lines.append("\nAttach vLLM 0.32 or 0.33. In its environment:\n")
        lines.append(f"  pip install '{NEEDED_CLIENT}'\n  {attach_command(config)}\n")
    return lines
