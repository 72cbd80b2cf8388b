"""`kvtier sidecar`: reads the configuration, prints what it comes to and how engines attach, and serves them."""

import json
import os
from collections.abc import Mapping

from kvtier.engine.config import size_text
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.sidecar.endpoints import socket_path
from kvtier.sidecar.lmcache.wire import NEEDED_CLIENT
from kvtier.sidecar.process import refuse_mistakes, run_process, url_of


def run_sidecar(source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Serve engines until a signal; the exit status. *given* are tables that replace the file's, key by key.

    ValueError, OSError: what cannot be used, before an engine is let in. With *checks_only* nothing is served: the
    configuration is checked, and what it comes to is printed.
    """
    config = sidecar_config(source, given)
    refuse_mistakes(config)
    for line in _plan(config):
        print(line, flush=True)
    return 0 if checks_only else run_process(config)


def attach_command(config: SidecarConfig) -> str:
    """What an engine's operator types, to be pasted into a shell."""
    assert config.lmcache is not None, "no endpoint for LMCache's client"
    extra: dict[str, object] = {}
    scheme, _, address = config.lmcache.listen.partition("://")
    if scheme == "ipc":  # host and port are joined with a colon
        extra["lmcache.mp.server_urls"] = [config.lmcache.listen]
    else:
        host, _, port = address.rpartition(":")
        extra |= {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": int(port)}
    # A server that is gone stalls an engine for mq_timeout, by default five minutes.
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
    lines = [f"host memory  {size_text(config.host.capacity)}, in extents of {size_text(config.extent)}"]
    if config.disk is None:
        lines.append("disk         none: what leaves host memory is gone; give --disk PATH:SIZE")
    else:
        lines.append(f"disk         {config.disk.path}, {size_text(config.disk.capacity)} at most")
    if config.remote is not None:
        lines.append(f"remote       {config.remote.where}, shared with other machines")
    if config.http.port != "none":
        where = url_of(config.http.host, config.http.port) if config.http.port else "a free port"
        lines.append(f"http         {where}: /health, /metrics, kvtier top")
    path = socket_path(config.socket)
    if path is None and config.socket.path != "none":
        lines.append("kvtier       nowhere: neither $XDG_RUNTIME_DIR nor /run can be written to; give --socket PATH")
    if path is not None:
        lines.append(f"kvtier       {path}")
        lines.append(f"\nAttach kvtier's own engine:\n\n  kvtier serve --sidecar unix://{os.path.abspath(path)}\n")
    if config.lmcache is not None:
        lines.append(f"engines      {config.lmcache.listen}, chunks of {config.lmcache.chunk_tokens} tokens")
        lines.append("\nAttach vLLM 0.32 or 0.33; in its environment:\n")
        lines.append(f"  pip install '{NEEDED_CLIENT}'\n  {attach_command(config)}\n")
    return lines
