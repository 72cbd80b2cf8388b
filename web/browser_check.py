"""BrowserRules: refuse requests that a page of another site makes a browser send to a server that needs no key.

A server without keys trusts everything that reaches it. A browser on the same network reaches it too, on behalf of any
page that it shows: by a request to another origin, or by a name of the page's own that resolves to the server's address
(DNS rebinding). The first kind of request says where it comes from, the second kind names a host that is not the
server's. With keys neither does harm, because such a page has none.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from kvtier.engine.config import is_loopback
from kvtier.web.api_error import ApiError

# Names that no page of another site can have: DNS does not delegate these domains to anybody.
_LOOPBACK_DOMAINS = (".localhost",)
_PRIVATE_DOMAINS = (*_LOOPBACK_DOMAINS, ".local", ".internal", ".home.arpa", ".svc")
_MAX_SHOWN = 128  # characters of a client's text in an error


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """The host names and origins by which a server without keys may be asked.

    IP addresses are always allowed as `Host`: a page cannot have one as its name without being at that address.
    """

    hosts: frozenset[str]
    origins: frozenset[str]
    is_local: bool
    host_advice: str
    origin_advice: str

    @classmethod
    def of(
        cls, listen: str, hosts: Iterable[str], origins: Iterable[str], host_advice: str, origin_advice: str
    ) -> "BrowserRules":
        """Return the rules of a server.

        Args:
            listen: The name or address that the server listens on. On a loopback address only loopback names are
                known; on others also names that public DNS cannot have, such as `kvtier` and `kvtier.default.svc`.
            hosts: Further host names; `*.example` stands for all names below it, `*` for any.
            origins: Origins whose pages may ask, such as `https://chat.example`; `*` for any.
            host_advice: What to do about a host that is refused, for its error.
            origin_advice: What to do about an origin that is refused, for its error.
        """
        is_local = is_loopback(listen)
        own = {listen} if is_local else {listen, socket.gethostname()}
        names = frozenset(name.lower().rstrip(".") for name in (*own, *hosts))
        return cls(names, frozenset(origins), is_local, host_advice, origin_advice)

    def refusal(self, method: str, headers: Headers) -> ApiError | None:
        """Return the reason not to answer a request; None if it may be answered."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return ApiError(400, "two Host headers; send one", code="invalid_request")
        name = _name_of(hosts[0]) if hosts else ""
        if name and not self._knows(name):
            message = (
                f"this server needs no key, so it refuses requests for the unknown host name {name[:_MAX_SHOWN]!r}; "
                f"{self.host_advice}, or ask by IP address"
            )
            return ApiError(403, message, code="unknown_host")
        origin = headers.get("origin")
        if "*" in self.origins or origin in self.origins or not _is_foreign(method, headers):
            return None
        message = (
            f"this server needs no key, so it refuses requests of pages of {(origin or 'another site')[:_MAX_SHOWN]}; "
            f"{self.origin_advice}"
        )
        return ApiError(403, message, code="unknown_origin")

    def _knows(self, name: str) -> bool:
        if name in self.hosts or "*" in self.hosts or _is_ip(name):
            return True
        if name == "localhost" or name.endswith(_LOOPBACK_DOMAINS):
            return True
        if not self.is_local and ("." not in name or name.endswith(_PRIVATE_DOMAINS)):
            return True
        return any(name.endswith(known[1:]) for known in self.hosts if known.startswith("*."))


def is_same_origin(headers: Headers) -> bool:
    """Return whether a browser sent the request for a page of this very server."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:  # the browser says so itself, also where a proxy has changed the Host
        return site in ("same-origin", "none")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() == headers.get("host", "").strip().lower()
    except ValueError:
        return False


def _is_foreign(method: str, headers: Headers) -> bool:
    """Return whether a page of another origin had a browser send the request. Following a link is no such request."""
    site = headers.get("sec-fetch-site")
    if site is None and headers.get("origin") is None:  # no browser, or an old one's link or image
        return False
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if site is not None and is_link and method in ("GET", "HEAD"):
        return False
    return not is_same_origin(headers)


def _name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]  # an IPv6 address without its brackets
    return name.rstrip(".")


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
