"""Gate: lets connections in by number and by address, before a key has said which tenant they are of."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What connections may take of the server before their requests have been read."""

    max_header_bytes: int  # of a request's line and its headers
    header_timeout_s: float  # from a request's first byte, or the connection's begin, to the end of the headers
    max_connections: int
    max_per_address: int


class Gate:
    """Counts open connections, in all and by address, and turns away what is too many. Owned by the event loop.

    An IPv6 address stands for its network of 64 bits, which is what one customer has.
    """

    def __init__(self, limits: ConnectionLimits, on_refused: Callable[[str], None]) -> None:
        """*on_refused* is called with a word for the reason when a connection is turned away or cut."""
        self.limits = limits
        self.on_refused = on_refused
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """How many connections are open."""
        return self._open.total()

    def enter(self, host: str) -> bool:
        """Count a connection from *host*, unless there is no room for it; then False."""
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
        """Count a connection from *host* no longer: it has ended."""
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
