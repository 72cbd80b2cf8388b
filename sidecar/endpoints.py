"""Functions that create the configured endpoints, at which engines attach."""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version

from kvtier.engine.attached.wire import Refused, frame_of
from kvtier.sidecar.build_sidecar import MakeEndpoints
from kvtier.sidecar.config import LmcacheConfig, SidecarConfig, SocketConfig, default_socket
from kvtier.sidecar.endpoint import Endpoint
from kvtier.sidecar.inherited import ENGINE, LMCACHE
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.endpoint import LmcacheEndpoint
from kvtier.sidecar.lmcache.zmtp import Zmtp
from kvtier.sidecar.own.endpoint import EngineEndpoint, EngineFrames
from kvtier.sidecar.port import Port, listen
from kvtier.sidecar.refusals import Refusals
from kvtier.transfer.transfer_engine import TransferEngine


def endpoints_of(
    config: SidecarConfig,
    weights: Mapping[str, str],
    listener: Callable[[str, str], socket.socket] = lambda name, url: listen(url),
) -> MakeEndpoints:
    """Return the function with which `build_sidecar` creates the configured endpoints.

    *weights* maps models to a digest or revision of their weights. *listener* opens a socket, given the name of its
    endpoint, such as `LMCACHE`, and the URL to listen at. If an address is not available, the returned function raises
    OSError.
    """

    def make(layouts: Layouts, transfers: TransferEngine) -> Sequence[Endpoint]:
        endpoints: list[Endpoint] = []
        with ExitStack() as undo:
            if config.lmcache is not None:
                endpoints.append(_lmcache_endpoint(config.lmcache, layouts, transfers, weights, listener))
                undo.callback(endpoints[-1].close)
            if (path := socket_path(config.socket)) is not None:
                endpoints.append(engine_endpoint(path, config.socket.allow_uids, layouts, listener))
            undo.pop_all()
        return endpoints

    return make


def socket_path(config: SocketConfig) -> str | None:
    """Return the path of the socket at which kvtier's own engines attach, or None if there is no such socket."""
    if config.path == "none":
        return None
    return default_socket(os.environ) if config.path == "auto" else config.path


def engine_endpoint(
    path: str,
    allow_uids: Sequence[int],
    layouts: Layouts,
    listener: Callable[[str, str], socket.socket] = lambda name, url: listen(url),
) -> EngineEndpoint:
    """Return an endpoint at *path* for kvtier's own engines of this user and of the users *allow_uids*.

    Raises OSError if the path is not available.
    """
    uids = {os.geteuid(), *allow_uids}
    try:
        found = listener(ENGINE, f"ipc://{path}")
        os.chmod(path, 0o600 if uids == {os.geteuid()} else 0o666)
    except OSError as error:
        why = "another sidecar listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise OSError(f"sidecar: cannot listen at {path} ({why}); choose another --socket") from error
    refusals = Refusals(time.monotonic, "engine")
    port = Port([found], time.monotonic, refusals.refused, EngineFrames, uids, lambda why: frame_of(Refused(why)))
    return EngineEndpoint(port, layouts, refusals, time.monotonic, f"kvtier {version('kvtier')}")


def _lmcache_endpoint(
    config: LmcacheConfig,
    layouts: Layouts,
    transfers: TransferEngine,
    weights: Mapping[str, str],
    listener: Callable[[str, str], socket.socket],
) -> LmcacheEndpoint:
    clock = time.monotonic
    refusals = Refusals(clock)
    try:
        port = Port([listener(LMCACHE, config.listen)], clock, refusals.refused, Zmtp)
    except OSError as error:
        why = f"sidecar: cannot listen at {config.listen} ({error.strerror}); choose another --listen"
        raise OSError(why) from error
    return LmcacheEndpoint(
        port, layouts, transfers, config.chunk_tokens, refusals, clock, lambda model: weights.get(model, "")
    )
