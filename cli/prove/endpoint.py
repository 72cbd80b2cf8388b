"""An HTTP client for one server with OpenAI's API."""

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
_TIMEOUT_S = 600.0  # a long prompt may be queued behind others
_CONNECT_S = 10.0


class Refused(RuntimeError):
    """An error response of the server. The message has the URL and the server's message."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """A thread-safe client for one server.

    Its methods raise OSError if no server answers, and `Refused` for an error response. Each request opens a new
    connection, because an open one might date from before a restart of the server.
    """

    def __init__(self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a client for *url*, with or without `/v1`. Raise ValueError if it is not an HTTP URL."""
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # unclosed brackets, or a port out of range
            is_address = False
        if not is_address:
            raise ValueError(f"{url}: is not a server URL; write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clock = clock
        self._is_elsewhere = not _is_here(parts.hostname or "")
        # The context is created only once, because creating it reads all CA certificates.
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else False

    def get(self, path: str) -> Any:
        """Send a GET request and return the decoded JSON response."""
        with self._client() as client:
            return self._content(path, client.get(self.url + path))

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Send a POST request and return the decoded JSON response."""
        with self._client() as client:
            return self._content(path, client.post(self.url + path, json=body))

    def complete(self, body: Mapping[str, object]) -> Answer:
        """Request a completion and return its answer. The response is streamed, to measure its TTFT."""
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
            why = f"the response is no stream of completions in OpenAI's format ({type(error).__name__}: {error})"
            raise Refused(f"{self.url}{_COMPLETIONS}: {why}", response.status_code) from error
        raise Refused(f"{self.url}{_COMPLETIONS}: {stream.error}", 500)

    def _content(self, path: str, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise Refused(f"{self.url}{path}: {response.status_code} {_why(response)}", response.status_code)
        try:
            return response.json()
        except JSONDecodeError:
            raise Refused(f"{self.url}{path}: the response is not JSON", response.status_code) from None

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        try:
            # For a server on this machine, ignore the proxies that environment variables set.
            with httpx.Client(
                headers=self._headers, timeout=timeout, trust_env=self._is_elsewhere, verify=self._tls
            ) as client:
                yield client
        except httpx.HTTPError as error:
            raise OSError(f"{self.url}: {error or type(error).__name__}; is the server running?") from error


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of an event stream, which are separated only by newlines.

    httpx's own method would also split at characters such as U+2028, which may occur in texts.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode().rstrip("\r")
    yield rest.decode()


def _why(response: httpx.Response) -> str:
    """Return the server's error message as one line."""
    try:
        content = response.json()
        error = content.get("error", content)
        why = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        why = response.text
    return " ".join(str(why).split())[:300] or response.reason_phrase


def _is_here(host: str) -> bool:
    """Return whether *host* is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
