"""`RedisSettings`: the address and options of a Valkey or Redis server, and the URLs that they are read from."""

from dataclasses import dataclass, field
from typing import NamedTuple, Self
from urllib.parse import unquote

WEEK_S = 7 * 24 * 3600
_PORT = 6379
_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
_FORM = "redis://[user[:password]@]host[:port][/db] or redis+cluster://host:port,host:port (rediss: with TLS)"


class Address(NamedTuple):
    """Host (a name or an IP address) and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RedisTls:
    """PEM files for TLS: the CA of the server's certificate, and our own certificate if the server asks for it.

    *ca_file* None stands for the CAs that this machine trusts. The certificate of a cluster node must be for the name
    or IP address that the node announces to clients.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True)
class RedisSettings:
    """Settings for a server, or for a cluster of which some nodes' addresses are known. Raises ValueError if invalid.

    *ttl_s* is how long a record stays after it was put. With None the record stays until the server's policy evicts it.
    *timeout_s* limits how long connecting may take and how long a server may be silent. *num_connections* is the
    maximum per server.
    """

    addresses: tuple[Address, ...]
    is_cluster: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: RedisTls | None = None
    timeout_s: float = 2.0
    ttl_s: int | None = WEEK_S
    prefix: str = "kvtier:"
    num_connections: int = 8

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("redis: no address; give at least one")
        if not self.is_cluster and len(self.addresses) > 1:
            raise ValueError("redis: only a cluster has several addresses; write redis+cluster://host:port,host:port")
        if self.is_cluster and self.db:
            raise ValueError("redis: a cluster has one database; leave out /db")
        if "{" in self.prefix or "}" in self.prefix:
            raise ValueError(
                f"redis: prefix {self.prefix!r} contains a brace; remove it, or a cluster puts all records on one node"
            )
        if self.timeout_s <= 0 or self.num_connections < 1:
            raise ValueError("redis: timeout_s must be above 0, and num_connections 1 or more")
        if self.ttl_s is not None and self.ttl_s < 1:
            raise ValueError("redis: ttl_s must be 1 or more; None keeps records until the server evicts them")

    @property
    def where(self) -> str:
        """The address for messages, without user and password."""
        scheme = ("rediss" if self.tls else "redis") + ("+cluster" if self.is_cluster else "")
        return f"{scheme}://{','.join(map(str, self.addresses))}" + (f"/{self.db}" if self.db else "")

    @classmethod
    def from_url(cls, url: str, password: str | None = None, tls: RedisTls | None = None) -> Self:
        """Return the settings in *url*. The scheme `valkey` means the same as `redis`.

        *password* replaces the password in the URL, and *tls* replaces the default certificates of `rediss`. Raises
        ValueError if the URL has another form. The message does not show the URL, which may contain a password.
        """
        scheme, has_scheme, rest = url.partition("://")
        kind, _, cluster = scheme.partition("+")
        login, _, place = rest.rpartition("@")
        hosts, _, db = place.partition("/")
        if not has_scheme or kind not in _SCHEMES or cluster not in ("", "cluster") or not (db or "0").isdecimal():
            raise ValueError(f"redis: not a URL of the form {_FORM}")
        is_secure = kind in ("rediss", "valkeys")
        if tls is not None and not is_secure:
            raise ValueError("redis: certificates need TLS; write rediss:// instead of redis://")
        user, _, word = login.partition(":")
        return cls(
            tuple(_address(host) for host in hosts.split(",")),
            is_cluster=bool(cluster),
            db=int(db or 0),
            username=unquote(user) or None,
            password=password or unquote(word) or None,
            tls=tls or RedisTls() if is_secure else None,
        )


def _address(text: str) -> Address:
    """Parse host, host:port, [IPv6] or [IPv6]:port."""
    host, has_port, port = text.rpartition(":")
    if not has_port or port.endswith("]"):
        host, port = text, str(_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"redis: an address in the URL is not host or host:port; the form is {_FORM}")
    return Address(host, int(port))
