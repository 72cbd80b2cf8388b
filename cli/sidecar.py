"""The `kvtier sidecar` command: prints the settings and how to attach engines, then serves engines."""

import logging
from collections.abc import Mapping

from kvtier.cli.stages import show_stage
from kvtier.engine.config import size_text
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.web.log_lines import write_log

log = logging.getLogger(__name__)


def run_sidecar(source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Serve engines until a signal arrives, and return the exit status.

    Raises ValueError or OSError for unusable settings, before an engine can attach.

    Args:
        source: Configuration file, or None.
        given: Tables of settings from the command line, which override keys of *source*.
        checks_only: Whether to only check and print the resulting configuration.
    """
    config = sidecar_config(source, given)
    if checks_only:
        show_stage("checking the sidecar's configuration")
    else:
        write_log(config.log_format)
        log.info("starting the sidecar")
    from kvtier.sidecar.process import run_process, validate  # imported late, after the first line of output

    validate(config)
    for line in _plan(config):
        print(line, flush=True)
    return 0 if checks_only else run_process(config)


def _plan(config: SidecarConfig) -> list[str]:
    from kvtier.engine.stores.disk_division import division_text
    from kvtier.sidecar.attach_commands import attach_commands
    from kvtier.sidecar.endpoints import socket_path
    from kvtier.sidecar.process import url_of

    lines = [f"host memory  {size_text(config.host.capacity)}, allocated in extents of {size_text(config.extent)}"]
    if config.disk is None:
        lines.append("disk         none: blocks evicted from host memory are lost; give --disk PATH:SIZE to keep them")
    else:
        parts = division_text(config.disk.capacity)
        lines.append(f"disk         {config.disk.path}, at most {size_text(config.disk.capacity)}: {parts}")
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
    if config.lmcache is not None:
        lines.append(f"engines      {config.lmcache.listen}, chunks of {config.lmcache.chunk_tokens} tokens")
    for attach in attach_commands(config):
        commands = "\n".join(f"  {line}" for line in attach.lines)
        lines.append(f"\nAttach {attach.engine}:\n\n{commands}\n")
    return lines
