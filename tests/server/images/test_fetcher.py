"""Images at URLs: only https, only allowed hosts at public addresses, no redirections, bounded in bytes and time."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="certificates need kvtier[crypto]")

from certificates import HOST, Certificates

from kvtier.engine.config import ImagesConfig
from kvtier.engine.images.image import ImageError
from kvtier.server.images.fetcher import ImageFetcher, is_public

MAX_BYTES = 1000
FILE = b"the file of an image"


@dataclass
class Page:
    """A server of one answer, which counts what it was asked."""

    answer: bytes
    port: int = 0
    asked: bytes = b""
    num_connections: int = 0

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}/a.png?size=1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def ok(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode() + body


@asynccontextmanager
async def serving_page(certificates: Certificates, answer: bytes, is_silent: bool = False) -> AsyncIterator[Page]:
    page, context = Page(answer), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.make("server"))
    done = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page.num_connections += 1
        page.asked = await reader.readuntil(b"\r\n\r\n")
        if is_silent:
            await done.wait()
        writer.write(page.answer)
        writer.close()

    server = await asyncio.start_server(reply, HOST, 0, ssl=context)
    page.port = server.sockets[0].getsockname()[1]
    try:
        yield page
    finally:
        done.set()
        server.close()


def fetch(
    certificates: Certificates, answer: bytes, *, url: str | None = None, is_silent: bool = False, **config: object
) -> tuple[dict[str, bytes], Page]:
    settings = ImagesConfig(**{"url_hosts": (HOST,), "url_timeout_s": 60.0, **config})
    trust = ssl.create_default_context(cafile=certificates.ca_file)

    async def play() -> tuple[dict[str, bytes], Page]:
        async with serving_page(certificates, answer, is_silent) as page:
            fetcher = ImageFetcher(settings, MAX_BYTES, lambda address: address.is_loopback, trust)
            return await fetcher.fetch([url or page.url]), page

    return asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        ok(FILE, f"Content-Length: {len(FILE)}"),
        ok(
            b"5\r\n" + FILE[:5] + b"\r\n%x\r\n" % len(FILE[5:]) + FILE[5:] + b"\r\n0\r\n\r\n",
            "Transfer-Encoding: chunked",
        ),
        ok(FILE, "Connection: close"),
    ],
)
def test_a_file_of_an_allowed_host_is_fetched(certificates: Certificates, answer: bytes) -> None:
    files, page = fetch(certificates, answer)

    assert files == {page.url: FILE}
    assert page.asked.startswith(f"GET /a.png?size=1 HTTP/1.1\r\nHost: {HOST}:{page.port}\r\n".encode())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://10.0.0.1/\r\n\r\n", "status 302; redirections are not followed"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404; the file is not there"),
        (ok(bytes(MAX_BYTES + 1)), f"more than {MAX_BYTES} bytes"),
        (ok(b"", "X: " + "x" * 200_000), "too large a header|cannot be read"),
        (b"SSH-2.0-OpenSSH_9\r\n", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_other_answers_are_errors_that_say_why(certificates: Certificates, answer: bytes, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        fetch(certificates, answer)


def test_a_server_that_does_not_answer_is_left(certificates: Certificates) -> None:
    with pytest.raises(ImageError, match=r"did not answer in 0\.2 s"):
        fetch(certificates, b"", is_silent=True, url_timeout_s=0.2)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1/a.png", "not written as https://HOST/PATH"),
        ("https://user:secret@127.0.0.1/a.png", "without a password"),
        ("https://127.0.0.1/a b.png", "in ASCII"),
        ("https://127.0.0.1/\r\nX-Evil: 1", "in ASCII"),
        ("https://127.0.0.1:99999/", "is not a URL"),
        ("https:///a.png", "not written as"),
        ("file:///etc/passwd", "not written as"),
        ("https://other.example/a.png", "images from other.example are not allowed here"),
    ],
)
def test_urls_that_are_not_allowed_are_not_connected_to(certificates: Certificates, url: str, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        fetch(certificates, ok(FILE), url=url)


def test_nothing_is_fetched_by_default(certificates: Certificates) -> None:
    with pytest.raises(ImageError, match="image URLs are switched off here"):
        fetch(certificates, ok(FILE), url_hosts=())


def test_a_certificate_of_no_trusted_authority_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    async def play() -> None:
        async with serving_page(Certificates(tmp_path), ok(FILE)) as page:
            trust = ssl.create_default_context(cafile=certificates.ca_file)
            config = ImagesConfig(url_hosts=("*",))
            await ImageFetcher(config, MAX_BYTES, lambda address: True, trust).fetch([page.url])

    with pytest.raises(ImageError, match="cannot be read"):
        asyncio.run(play())


def test_an_allowed_host_at_a_private_address_is_not_connected_to(certificates: Certificates) -> None:
    async def play() -> Page:
        async with serving_page(certificates, ok(FILE)) as page:
            with pytest.raises(ImageError, match="its address is not public"):
                await ImageFetcher(ImagesConfig(url_hosts=("*",)), MAX_BYTES).fetch([page.url])
            return page

    assert asyncio.run(play()).num_connections == 0


def test_all_images_of_a_request_share_one_limit(certificates: Certificates) -> None:
    async def play() -> None:
        async with serving_page(certificates, ok(bytes(MAX_BYTES // 2 + 1))) as page:
            trust = ssl.create_default_context(cafile=certificates.ca_file)
            config = ImagesConfig(url_hosts=(HOST,))
            fetcher = ImageFetcher(config, MAX_BYTES, lambda address: True, trust)
            assert len(await fetcher.fetch([page.url, page.url, "data:,"])) == 1
            await fetcher.fetch([page.url, page.url + "0"])

    with pytest.raises(ImageError, match="bytes left; send smaller images"):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds tell their machines secrets
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
    ],
)
def test_addresses_of_the_operators_networks_are_not_public(address: str, expected: bool) -> None:
    assert is_public(ip_address(address)) is expected


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [("*", True), (HOST, True), ("*.0.0.1", True), ("*.example", False), ("27.0.0.1", False), ("example", False)],
)
def test_hosts_are_allowed_by_name_or_ending(certificates: Certificates, allowed: str, is_allowed: bool) -> None:
    answer = ok(FILE, f"Content-Length: {len(FILE)}")
    if is_allowed:
        assert list(fetch(certificates, answer, url_hosts=(allowed,))[0].values()) == [FILE]
    else:
        with pytest.raises(ImageError, match="are not allowed here"):
            fetch(certificates, answer, url_hosts=(allowed,))
