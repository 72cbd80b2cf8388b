"""A client for JSON requests to a kvtier server over HTTP."""

import ipaddress
import json
import re
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_KEY = re.compile(r"[!-~]*")  # characters that a header can have


class Refused(RuntimeError):
    """An error for a request that the server refused, or that was answered by something other than a kvtier server."""


class _NoRedirect(HTTPRedirectHandler):
    """A handler that follows no redirect, so that the key is not sent to another server."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class JsonClient:
    """A client for JSON requests to one kvtier server."""

    def __init__(self, url: str, key: str | None, key_options: str, server: str, timeout_s: float) -> None:
        """Create a client.

        Args:
            url: URL of the server.
            key: API key or operator's token, or None.
            key_options: Command-line options that give the key, for error messages.
            server: Command that starts a server for this client, for error messages.
            timeout_s: Timeout of each request.

        Raises:
            ValueError: *url* or *key* is malformed.
        """
        what = f"--url {url}: is not a server URL; write it as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # unclosed brackets, or a port out of range
            raise ValueError(what) from None
        if not is_address:
            raise ValueError(what)
        if parts.username is not None:  # credentials in the URL are not sent, and messages must not repeat them
            raise ValueError(f"--url contains a user name or password; give only the address, and use {key_options}")
        if key is not None and not _KEY.fullmatch(key):  # http.client's error would quote the key
            raise ValueError(f"{key_options}: the key has a space or another invalid character; give only the key")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._key_options = key_options
        self._server = server
        self._timeout_s = timeout_s
        self._opener = build_opener(_NoRedirect, *([ProxyHandler({})] if _is_here(parts.hostname or "") else []))

    def ask(self, method: str, path: str, content: dict[str, object] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON object of the response.

        Raises:
            Refused: The server responds with an error, or is not a kvtier server.
            OSError: No server answers.
        """
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if content is None else _body(content)
        request = Request(f"{self._url}{path}", data, headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return self._object(answer.read())
        except HTTPError as error:
            raise Refused(self._why(error)) from error
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            why = getattr(error, "reason", error)
            why = getattr(why, "strerror", None) or why
            raise OSError(f"{self._url}: {why}; start a server with '{self._server}', or give --url") from error

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            content = json.loads(body)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Refused(f"{self._url}: no kvtier server answers there; give the --url of a '{self._command}' server")
        return content

    def _why(self, error: HTTPError) -> str:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError, OSError):
            what = f"the response {error.code} {error.reason} does not come from a kvtier server"
            return f"{what}; give the --url of a '{self._command}' server"
        hint = f"; for this command, give it with {self._key_options}" if error.code == 401 else ""
        return f"{message}{hint}"

    @property
    def _command(self) -> str:
        return " ".join(self._server.split()[:2])


def _body(content: dict[str, object]) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON escapes can contain lone surrogates, which UTF-8 cannot
        half = error.object[error.start]
        raise ValueError(
            f"the text has half of a surrogate pair ({half!r}), which is not a character; remove it"
        ) from None


def _is_here(host: str) -> bool:
    """Return whether *host* is this machine. Requests to it do not go through a proxy."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
