"""`kvtier sidecar`: what belongs to the process: configuration, signals, the log, what engines are told to do."""

import json
import logging
import os
import signal
from collections.abc import Mapping
from types import FrameType

from kvtier.engine.byte_size import size_text
from kvtier.engine.server.log_lines import write_log
from kvtier.engine.sidecar.build import build_sidecar
from kvtier.engine.sidecar.config import SidecarConfig, sidecar_config
from kvtier.engine.sidecar.doors import doors_of
from kvtier.engine.sidecar.model_weights import weights_of

log = logging.getLogger(__name__)

LEAST_LMCACHE = "0.5.5"


def run_sidecar(source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Serve engines until a signal; the exit status. *given* are tables that replace the file's, key by key.

    ValueError, OSError: what cannot be used, before an engine is let in. With *checks_only* nothing is served: the
    configuration is checked, and what it comes to is printed.
    """
    config = sidecar_config(source, given)
    for line in _plan(config):
        print(line, flush=True)
    if checks_only:
        return 0
    write_log(config.log_format)
    return _serve(config)


def attach_command(config: SidecarConfig) -> str:
    """What an engine's operator types, to be pasted into a shell."""
    assert config.lmcache is not None, "no door for LMCache's client"
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
    if config.lmcache is not None:
        lines.append(f"engines      {config.lmcache.listen}, chunks of {config.lmcache.chunk_tokens} tokens")
        lines.append(f"\nAttach vLLM 0.32 or 0.33, with lmcache {LEAST_LMCACHE} or later in its environment:\n")
        lines.append(f"  {attach_command(config)}\n")
    return lines


def _serve(config: SidecarConfig) -> int:
    weights = weights_of(config.models, log.info)
    sidecar = build_sidecar(config, doors_of(config, weights), log.info)
    signals: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:  # at once: what was written already is whole, and the next start removes the segment
            os._exit(128 + number)
        sidecar.stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        log.info("engines may attach")
        sidecar.run()
        if config.disk is not None:
            log.info("writing what is in host memory only; a second signal ends at once")
            num_left = sidecar.flush(config.drain_s)
            if num_left:
                log.warning("%d chunks were not written to disk within %.0f s", num_left, config.drain_s)
    finally:
        sidecar.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
