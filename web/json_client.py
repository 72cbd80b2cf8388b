"""JsonClient: asks a server of kvtier's over HTTP, in JSON."""

import ipaddress
import json
import re
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_KEY = re.compile(r"[!-~]*")  # what a header can say


class Refused(RuntimeError):
    """The server refused; the message says why."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: the key is for this server only."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class JsonClient:
    """Asks one server; `ask` returns the JSON object that it answers."""

    def __init__(self, url: str, key: str | None, key_options: str, server: str, timeout_s: float) -> None:
        """*url* is the server's address, *key* what it is let in with; ValueError for either if it cannot be one.
        *key_options* say where the key was given, *server* is the command that starts such a server: for messages."""
        what = f"--url {url}: is no address of a server; give one such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets without an end, or a port that cannot be
            raise ValueError(what) from None
        if not is_address:
            raise ValueError(what)
        if parts.username is not None:  # which nothing here sends, and a message should not repeat
            raise ValueError(f"--url: has a name or a password in it; give the address alone, and {key_options}")
        if key is not None and not _KEY.fullmatch(key):  # http.client's error would quote the key
            raise ValueError(f"{key_options}: has a character that no key has; give the key alone")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._key_options = key_options
        self._server = server
        self._timeout_s = timeout_s
        self._opener = build_opener(_NoRedirect, *([ProxyHandler({})] if _is_here(parts.hostname or "") else []))

    def ask(self, method: str, path: str, content: dict[str, object] | None = None) -> dict[str, Any]:
        """What the server answers. Refused if it refuses, OSError if there is none."""
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
            raise OSError(f"{self._url}: {why}; start one with '{self._server}', or give --url") from error

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            content = json.loads(body)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Refused(f"{self._url}: does not answer as kvtier does; give the --url of a {self._command}")
        return content

    def _why(self, error: HTTPError) -> str:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError, OSError):
            what = f"the server answers {error.code} {error.reason}, not as kvtier does"
            return f"{what}; give the --url of a {self._command}"
        hint = f"; {self._key_options} gives one" if error.code == 401 else ""
        return f"{message}{hint}"

    @property
    def _command(self) -> str:
        return " ".join(self._server.split()[:2])


def _body(content: dict[str, object]) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can write what no text has
        half = error.object[error.start]
        raise ValueError(f"half of a pair of surrogates ({half!r}) is no character; give a text") from None


def _is_here(host: str) -> bool:
    """Whether *host* is this machine, for which no proxy is asked."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
