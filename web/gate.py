"""Limits on connections, in total and per client address. They apply before the client's API key is known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections, and on the headers of their requests."""

    max_header_bytes: int  # request line and headers together
    header_timeout_s: float  # from the request's first byte, or the start of the connection, to the end of the headers
    max_connections: int
    max_per_address: int


class Gate:
    """A counter of open connections, which refuses a connection that exceeds a limit. Owned by the event loop.

    All addresses of a /64 IPv6 network count as one address, because one customer usually has such a network.
    """

    def __init__(self, limits: ConnectionLimits, on_refused: Callable[[str], None]) -> None:
        """Create the gate. *on_refused* is called with the reason when a connection is refused or ended by a limit."""
        self.limits = limits
        self.on_refused = on_refused
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return self._open.total()

    def enter(self, host: str) -> bool:
        """Count a new connection from *host*. Return False, without counting it, if the connection exceeds a limit."""
        address = _network(host)
        if self.num_open >= self.limits.max_connections:
            self.on_refused("connections")
            return False
        if self._open[address] >= self.limits.max_per_address:
            self.on_refused("connections_of_address")
            return False
        self._open[address] += 1
        return True

    def leave(self, host: str) -> None:
        """Stop counting a connection from *host*, because it has ended."""
        address = _network(host)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def _network(host: str) -> str:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a socket without an address
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, 64), strict=False))
