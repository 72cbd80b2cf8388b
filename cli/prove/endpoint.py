"""Endpoint: one server with OpenAI's interface, over HTTP."""

import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.completion_stream import CompletionStream

_COMPLETIONS = "/v1/completions"
_TIMEOUT_S = 600.0  # for a long prompt behind others
_CONNECT_S = 10.0


class Refused(RuntimeError):
    """The server has answered with an error; the message says where and what."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Asks one server; threads may share it. OSError if no server answers, `Refused` if it does with an error.

    Each question has a connection of its own: one that is kept might be the server's of before its restart. Times are
    those of *clock*, in seconds.
    """

    def __init__(self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """*url* with or without `/v1`, *key* a bearer's; ValueError for an URL that is none."""
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets without an end, or a port that cannot be
            is_address = False
        if not is_address:
            raise ValueError(f"{url}: is no address of a server; give one such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clock = clock
        self._is_elsewhere = not _is_here(parts.hostname or "")
        # once: it reads the certificates of all authorities
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else False

    def get(self, path: str) -> Any:
        """What the server answers there, from JSON."""
        with self._client() as client:
            return self._content(path, client.get(self.url + path))

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """What the server answers there, from JSON."""
        with self._client() as client:
            return self._content(path, client.post(self.url + path, json=body))

    def complete(self, body: Mapping[str, object]) -> Answer:
        """The answer to a completion, streamed for the time of its first token."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._client() as client:
            stream = CompletionStream(self._clock())
            with client.stream("POST", self.url + _COMPLETIONS, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._content(_COMPLETIONS, response)
                return self._streamed(stream, response)

    def _streamed(self, stream: CompletionStream, response: httpx.Response) -> Answer:
        try:
            for line in _lines(response.iter_bytes()):
                stream.add(line, self._clock())
            if stream.error is None:
                return stream.answer()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"does not stream completions as OpenAI does ({type(error).__name__}: {error})"
            raise Refused(f"{self.url}{_COMPLETIONS}: {why}", response.status_code) from error
        raise Refused(f"{self.url}{_COMPLETIONS}: {stream.error}", 500)

    def _content(self, path: str, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise Refused(f"{self.url}{path}: {response.status_code} {_why(response)}", response.status_code)
        try:
            return response.json()
        except JSONDecodeError:
            raise Refused(f"{self.url}{path}: does not answer in JSON", response.status_code) from None

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        try:
            # A proxy in the environment is for other machines.
            with httpx.Client(
                headers=self._headers, timeout=timeout, trust_env=self._is_elsewhere, verify=self._tls
            ) as client:
                yield client
        except httpx.HTTPError as error:
            raise OSError(f"{self.url}: {error or type(error).__name__}; is the server running?") from error


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of a stream of events. (httpx's end at characters such as U+2028 too, which may stand in a text.)"""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode().rstrip("\r")
    yield rest.decode()


def _why(response: httpx.Response) -> str:
    """What the server says has gone wrong, in one line."""
    try:
        content = response.json()
        error = content.get("error", content)
        why = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        why = response.text
    return " ".join(str(why).split())[:300] or response.reason_phrase


def _is_here(host: str) -> bool:
    """Whether *host* is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
