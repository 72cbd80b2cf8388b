"""ImageFetcher: fetches images at https URLs, from the hosts that the configuration allows.

A client chooses the URL, so the server must not reach anything for it that the client could not reach itself. Only
https is spoken, to configured hosts, at public addresses. The connection goes to the address that was checked, so a
name server cannot answer differently a second time. Redirections are not followed.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

import httptools

from kvtier.engine.config import ImagesConfig
from kvtier.engine.images.image import ImageError

Address: TypeAlias = IPv4Address | IPv6Address
OFF = (
    "image URLs are switched off here; send the image's file as a data URL (data:image/png;base64,…), or ask the "
    "operator to list the host in images.url_hosts"
)
_PIECE_BYTES = 64 << 10
_MAX_HEADER_BYTES = 32 << 10


def is_public(address: Address) -> bool:
    """Return whether *address* belongs to the public internet, and so to no network of the operator's."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_global and not address.is_multicast


@dataclass(frozen=True, slots=True)
class ImageFetcher:
    """Fetches images for one server. *may_reach* says to which addresses it may connect. Used on the event loop."""

    config: ImagesConfig
    max_bytes: int  # of all images of one request together
    may_reach: Callable[[Address], bool] = is_public
    trust: ssl.SSLContext | None = None  # certificates to trust; None: those of the system

    async def fetch(self, urls: Iterable[str]) -> dict[str, bytes]:
        """Return the files at the *urls* that are not data URLs, by URL.

        Raises:
            ImageError: If a URL is not allowed, or its file cannot be fetched within the limits.
        """
        files: dict[str, bytes] = {}
        for url in dict.fromkeys(urls):
            if url[:5].lower() == "data:":
                continue
            left = self.max_bytes - sum(map(len, files.values()))
            try:
                async with asyncio.timeout(self.config.url_timeout_s):
                    files[url] = await self._file(url, left)
            except TimeoutError:
                raise ImageError(f"the image's URL did not answer in {self.config.url_timeout_s:g} s") from None
            except (OSError, ssl.SSLError, httptools.HttpParserError, EOFError) as error:
                raise ImageError(f"the image's URL cannot be read ({type(error).__name__})") from None
        return files

    async def _file(self, url: str, max_bytes: int) -> bytes:
        parts = self._checked(url)
        host = parts.hostname or ""
        address = await self._address(host, parts.port or 443)
        trust = self.trust or ssl.create_default_context()
        reader, writer = await asyncio.open_connection(
            str(address), parts.port or 443, ssl=trust, server_hostname=host, limit=_PIECE_BYTES
        )
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            name = parts.netloc
            head = f"GET {path} HTTP/1.1\r\nHost: {name}\r\nAccept: image/*\r\nConnection: close\r\n\r\n"
            writer.write(head.encode("ascii"))
            await writer.drain()
            return await _body(reader, max_bytes)
        finally:
            writer.transport.abort()

    def _checked(self, url: str) -> SplitResult:
        """Return the parts of an allowed URL. Raises `ImageError` for any other."""
        if not self.config.url_hosts:
            raise ImageError(OFF)
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ImageError("the image's URL is not a URL") from None
        if parts.scheme != "https" or not host or parts.username is not None or not _is_plain(url):
            raise ImageError("the image's URL is not written as https://HOST/PATH, in ASCII and without a password")
        if not any(_is_named(host, allowed) for allowed in self.config.url_hosts):
            raise ImageError(f"images from {host} are not allowed here; send the image's file as a data URL")
        return parts

    async def _address(self, host: str, port: int) -> Address:
        """Return an address of the host. Raises `ImageError` if one of its addresses must not be reached."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ip_address(each[4][0]) for each in found]
        if not addresses or not all(map(self.may_reach, addresses)):
            raise ImageError(f"images from {host} are not allowed here: its address is not public")
        return addresses[0]


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and " " not in url


def _is_named(host: str, allowed: str) -> bool:
    """Return whether *host* is *allowed*: a name, `*.example` for all names below it, or `*` for all."""
    return allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:]))


class _Answer:
    """The parts of an HTTP response that its parser has found so far."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.has_header = self.is_complete = False

    def on_headers_complete(self) -> None:
        """Note that the body begins. The parser calls this."""
        self.has_header = True

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body. The parser calls this."""
        self.pieces.append(piece)
        self.num_bytes += len(piece)

    def on_message_complete(self) -> None:
        """Note that the response has ended. The parser calls this."""
        self.is_complete = True


async def _body(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return the body of a response. Raises `ImageError` for any status but 200, and for a body that is too large."""
    answer, num_read = _Answer(), 0
    parser = httptools.HttpResponseParser(answer)
    while not answer.is_complete and (piece := await reader.read(_PIECE_BYTES)):
        parser.feed_data(piece)
        num_read += len(piece)
        if answer.has_header and parser.get_status_code() != 200:
            status = parser.get_status_code()
            why = "redirections are not followed" if 300 <= status < 400 else "the file is not there"
            raise ImageError(f"the image's URL answered with status {status}; {why}")
        if not answer.has_header and num_read > _MAX_HEADER_BYTES:
            raise ImageError("the image's URL answered with too large a header")
        if answer.num_bytes > max_bytes:
            raise ImageError(f"the images of the request have more than {max_bytes} bytes left; send smaller images")
    if not answer.has_header:
        raise EOFError("no answer")
    return b"".join(answer.pieces)
