"""The doors that a configuration asks for."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.engine.sidecar.build import MakeDoors
from kvtier.engine.sidecar.config import SidecarConfig
from kvtier.engine.sidecar.door import Door
from kvtier.engine.sidecar.inherited import LMCACHE
from kvtier.engine.sidecar.layouts import Layouts
from kvtier.engine.sidecar.lmcache.door import LmcacheDoor
from kvtier.engine.sidecar.lmcache.port import Port, listen
from kvtier.engine.sidecar.lmcache.refusals import Refusals
from kvtier.transfer.transfer_engine import TransferEngine


def doors_of(
    config: SidecarConfig,
    weights: Mapping[str, str],
    listener: Callable[[str, str], socket.socket] = lambda name, url: listen(url),
) -> MakeDoors:
    """Makes the doors once there are layouts. *weights*: what is known of models' weights, by name. *listener* gives
    the socket of that name which listens at a URL. OSError, from the function that is given, for an
    address that cannot be had."""

    def make(layouts: Layouts, transfers: TransferEngine) -> Sequence[Door]:
        if config.lmcache is None:
            return []
        clock = time.monotonic
        refusals = Refusals(clock)
        address = config.lmcache.listen
        try:
            port = Port([listener(LMCACHE, address)], clock, refusals.refused)
        except OSError as error:
            raise OSError(f"sidecar: cannot listen at {address} ({error.strerror}); choose another --listen") from error
        tokens = config.lmcache.chunk_tokens
        return [LmcacheDoor(port, layouts, transfers, tokens, refusals, clock, lambda model: weights.get(model, ""))]

    return make
