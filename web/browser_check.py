"""Protection of servers without API keys from browsers that send requests for pages of other websites.

A server without keys trusts all requests that reach it. A page of any website, opened in a browser on the same network,
can send requests to the server in two ways: cross-origin requests and DNS rebinding. A cross-origin request is
recognized by its `Origin` or `Sec-Fetch-Site` header. With DNS rebinding, the website's host name resolves to the
server's address. Such a request is recognized by its `Host` header, which is not a name of the server. A server with
keys needs no such protection, because other websites have no key.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from kvtier.engine.config import is_loopback
from kvtier.web.api_error import ApiError

# Names that no other website can have, because public DNS does not delegate these domains.
_LOOPBACK_DOMAINS = (".localhost",)
_PRIVATE_DOMAINS = (*_LOOPBACK_DOMAINS, ".local", ".internal", ".home.arpa", ".svc")
_MAX_SHOWN = 128  # characters of a client's text in an error


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """The host names and origins that a server without keys accepts.

    IP addresses are always accepted as `Host`, because DNS rebinding needs a host name.
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
            listen: The name or address that the server listens on. If it is a loopback address, only loopback names
                are accepted. Otherwise names that public DNS cannot have, such as `kvtier` and
                `kvtier.default.svc`, are accepted too.
            hosts: Further host names. `*.example` means all names below `example`, and `*` means any name.
            origins: Origins whose pages may send requests, such as `https://chat.example`, or `*` for any.
            host_advice: What to do about a refused host, for the error message.
            origin_advice: What to do about a refused origin, for the error message.
        """
        is_local = is_loopback(listen)
        own = {listen} if is_local else {listen, socket.gethostname()}
        names = frozenset(name.lower().rstrip(".") for name in (*own, *hosts))
        return cls(names, frozenset(origins), is_local, host_advice, origin_advice)

    def refusal(self, method: str, headers: Headers) -> ApiError | None:
        """Return the error for a request that must be refused, or None if the request is accepted."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return ApiError(400, "two Host headers; send one", code="invalid_request")
        name = _name_of(hosts[0]) if hosts else ""
        if name and not self._knows(name):
            message = (
                f"this server needs no key, so it refuses requests for the unknown host name {name[:_MAX_SHOWN]!r}; "
                f"{self.host_advice}, or use the server's IP address"
            )
            return ApiError(403, message, code="unknown_host")
        origin = headers.get("origin")
        if "*" in self.origins or origin in self.origins or not _is_foreign(method, headers):
            return None
        message = (
            f"this server needs no key, so it refuses requests from pages of {(origin or 'another site')[:_MAX_SHOWN]}"
            f"; {self.origin_advice}"
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
    """Return whether the request comes from a page of this server, according to the browser's headers."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:  # set by the browser, so it is right even if a proxy has changed the Host
        return site in ("same-origin", "none")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() == headers.get("host", "").strip().lower()
    except ValueError:
        return False


def _is_foreign(method: str, headers: Headers) -> bool:
    """Return whether the request comes from a page of another origin. A link that the user followed does not count."""
    site = headers.get("sec-fetch-site")
    if site is None and headers.get("origin") is None:  # not a browser, or a link or image in an old browser
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
