"""The sidecar's process: checks the configuration, sets up logging, and serves engines until a signal."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvtier.engine.attached.model_files import weights_digest
from kvtier.engine.fault_log import FaultLog
from kvtier.engine.machine_limits import refuse_more_than_disk, refuse_more_than_memory
from kvtier.engine.observability.records.request_log import refuse_unusable
from kvtier.extras import extra
from kvtier.sidecar.build_sidecar import MakeEndpoints, build_sidecar
from kvtier.sidecar.config import ModelWeightsConfig, SidecarConfig
from kvtier.sidecar.endpoints import endpoints_of
from kvtier.sidecar.inherited import HTTP, Inherited
from kvtier.sidecar.kept_files import KeptFiles
from kvtier.sidecar.sidecar import Sidecar
from kvtier.sidecar.statistics import SidecarStatistics
from kvtier.sidecar.systemd import Systemd
from kvtier.web.log_lines import write_log
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators

if TYPE_CHECKING:
    from kvtier.sidecar.http.http_thread import HttpThread

log = logging.getLogger(__name__)

LEAVING = (signal.SIGUSR1,)  # end the process, and leave sockets and host memory to the next one
ENDING = (signal.SIGTERM, signal.SIGINT)  # end the process, and release sockets and host memory

Listener = Callable[[str, str], socket.socket]
"""Function that returns the listening socket for a name and a URL."""


def validate(config: SidecarConfig) -> None:
    """Raise ValueError or OSError for settings that would otherwise fail only after an engine has attached."""
    refuse_more_than_memory("host.capacity", config.host.capacity)
    if config.disk is not None:
        refuse_more_than_disk(config.disk)
    Operators.of(config.operators.tokens, os.environ)
    refuse_unusable(config.request_log)


def run_process(config: SidecarConfig) -> int:
    """Serve engines at all configured endpoints until a signal arrives, and return the exit status.

    Raises ValueError or OSError if a setting or resource cannot be used.
    """
    write_log(config.log_format)
    weights = weights_of(config.models, log.info)
    return serve_engines(config, lambda listener: endpoints_of(config, weights, listener))


def serve_engines(config: SidecarConfig, endpoints: Callable[[Listener], MakeEndpoints]) -> int:
    """Serve the engines that attach at the endpoints until a signal arrives, and return the exit status.

    A signal in `LEAVING` means that the service manager will start another sidecar process. Then the sockets and the
    host memory stay in place for that process. Any other signal releases them.
    """
    signals: list[int] = []
    with (
        Inherited(os.environ) as inherited,
        Systemd(os.environ, time.monotonic) as systemd,
        ExitStack() as running,
    ):
        kept = KeptFiles(systemd, inherited)
        sidecar = build_sidecar(config, endpoints(kept.listener), log.info, kept.left_segment)

        def end(number: int, _: FrameType | None) -> None:
            signals.append(number)
            if len(signals) > 1:  # exit at once: completed writes are intact, and the next start removes the segment
                os._exit(128 + number)
            sidecar.stop()

        for number in (*ENDING, *LEAVING):
            running.callback(signal.signal, number, signal.signal(number, end))
        running.callback(sidecar.close)
        kept.keep_segment(sidecar.layouts.segment)
        if config.http.port != "none":
            http = running.enter_context(_http(sidecar, config, kept))
            log.info("http: listening on %s", url_of(config.http.host, http.port))
        inherited.close()
        log.info("engines may attach")
        sidecar.run(_look(sidecar, systemd))
        systemd.stopping()
        if signals and signals[0] in LEAVING:
            log.info("leaving the sockets and the host memory to the next sidecar process")
            sidecar.leave()
        else:
            kept.let_go()
        if config.disk is not None:
            log.info("writing chunks that have no copy on disk yet; send a second signal to exit at once")
            num_left = sidecar.flush(config.drain_s, systemd.alive)
            if num_left:
                log.warning(
                    "%d chunks were not written to disk: a write failed, or writing took longer than drain_s (%.0f s)",
                    num_left,
                    config.drain_s,
                )
    log.info("ended")
    return 0


def url_of(host: str, port: int) -> str:
    """Return the URL of the sidecar's HTTP server, for `kvtier top` and browsers."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _look(sidecar: Sidecar, systemd: Systemd) -> Callable[[SidecarStatistics], None]:
    """Return a callback for `Sidecar.run` that logs faults, and tells the service manager that the sidecar is alive."""
    fault_log = FaultLog(time.monotonic)

    def look(statistics: SidecarStatistics) -> None:
        fault_log.look(statistics.store, statistics.disk, statistics.tiers, remote=statistics.remote)
        if not sidecar.why_not_ready:
            systemd.ready()
        systemd.alive()

    return look


def _http(sidecar: Sidecar, config: SidecarConfig, kept: KeptFiles) -> "HttpThread":
    host, port = config.http.host, config.http.port
    assert port != "none", "nothing to serve"
    with extra("sidecar", "HTTP of kvtier sidecar", 'or set port = "none" in [http]'):
        from kvtier.sidecar.http.access import token_of
        from kvtier.sidecar.http.serve_http import serve_http
        from kvtier.web.operating.routes import Operating

    operators = Operators.of(config.operators.tokens, os.environ)
    operating = None
    if operators is not None:
        operators.refuse_keys_of(token_of(config.http))
        operating = Operating(operators, AuditLog(config.operators.audit, config.operators.audit_bytes))
    given = kept.given_listener(HTTP, url_of(host, port).replace("http", "tcp", 1))
    http = serve_http(sidecar, config, bound=given, operating=operating)
    if given is None:
        kept.keep_listener(HTTP, http.file)
    return http


def weights_of(
    models: Mapping[str, ModelWeightsConfig], progress: Callable[[str], None] = lambda line: None
) -> dict[str, str]:
    """Return, by model name, a text that identifies the model's weights: its revision or a digest of its files.

    Computing a digest may take minutes, so *progress* is called with a log line before each one. Raises ValueError if
    there are no weights at a configured path.
    """
    found = {}
    for name, model in models.items():
        if model.path is None:
            found[name] = f"revision {model.revision}"
        else:
            progress(f"computing the digest of the weights in {model.path}")
            found[name] = weights_digest(Path(model.path).expanduser())
    return found
