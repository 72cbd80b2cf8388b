"""Gate: which connections are let in, before anything is known of who they are."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take of the server until its request has been read."""

    max_header_bytes: int  # of a request's line and its headers
    header_timeout_s: float  # from a request's first byte, or the connection's begin, to the end of the headers
    max_connections: int
    max_per_address: int


class Gate:
    """Counts connections, in all and by address, and those that were turned away. Owned by the event loop.

    An IPv6 address stands for its network of 64 bits, which is what one customer has.
    """

    def __init__(self, limits: ConnectionLimits, refused: Callable[[str], None]) -> None:
        """*refused* is told of each connection that is turned away or cut, with a word for why."""
        self.limits = limits
        self.refused = refused
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Connections that are in."""
        return self._open.total()

    def enter(self, host: str) -> bool:
        """Let a connection from *host* in, if there is room for it."""
        address = _network(host)
        if self.num_open >= self.limits.max_connections:
            self.refused("connections")
            return False
        if self._open[address] >= self.limits.max_per_address:
            self.refused("connections_of_address")
            return False
        self._open[address] += 1
        return True

    def leave(self, host: str) -> None:
        """One that was let in has ended."""
        address = _network(host)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def _network(host: str) -> str:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # of a socket that has none
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, 64), strict=False))
