"""DocumentClient: asks a running `kvtier serve` over HTTP about its documents."""

import ipaddress
import json
import re
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from kvtier.engine.documents.document import check_id

TIMEOUT_S = 60.0
_KEY = re.compile(r"[!-~]*")  # what a header can say


class Refused(RuntimeError):
    """The server refused; the message says why."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: the API key is for this server only."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class DocumentClient:
    """Asks one server about its documents; methods return the JSON objects that it answers.

    Each raises Refused if the server refuses, OSError if no server answers, ValueError for an impossible id.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """*url* is the server's address, *key* an API key. ValueError for either if it cannot be one."""
        self._url = checked_url(url)
        check_key(key)
        self._key = key

    def list(self) -> dict[str, Any]:
        """List all documents of the tenant, and whether they survive a restart."""
        return self._ask("GET", "")

    def put(self, document_id: str, content: dict[str, object]) -> dict[str, Any]:
        """Put a document, or replace it."""
        return self._ask("PUT", _path(document_id), content)

    def get(self, document_id: str) -> dict[str, Any]:
        """The document with its status."""
        return self._ask("GET", _path(document_id))

    def warm(self, document_id: str, tier: str) -> dict[str, Any]:
        """Have the server begin to bring the document to *tier*."""
        return self._ask("POST", f"{_path(document_id)}/warm?{urlencode({'tier': tier})}")

    def pin(self, document_id: str, ttl_s: float) -> dict[str, Any]:
        """Have the document kept in host memory for *ttl_s* seconds."""
        return self._ask("POST", f"{_path(document_id)}/pin", {"ttl_s": ttl_s})

    def unpin(self, document_id: str) -> dict[str, Any]:
        """End the document's pin."""
        return self._ask("DELETE", f"{_path(document_id)}/pin")

    def delete(self, document_id: str) -> dict[str, Any]:
        """Delete the document."""
        return self._ask("DELETE", _path(document_id))

    def _ask(self, method: str, path: str, content: dict[str, object] | None = None) -> dict[str, Any]:
        return ask_server(self._url, self._key, method, f"/v1/documents{path}", content)


def checked_url(url: str) -> str:
    """The address of a server, without what comes behind it. ValueError if it cannot be one."""
    what = f"--url {url}: is no address of a server; give one such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # brackets without an end, or a port that cannot be
        raise ValueError(what) from None
    if not is_address:
        raise ValueError(what)
    return url.rstrip("/").removesuffix("/v1")


def check_key(key: str | None) -> None:
    """Raise ValueError for an API key that no header can say."""
    if key is not None and not _KEY.fullmatch(key):  # http.client's error would quote the key
        raise ValueError("--api-key or KVTIER_API_KEY: has a character that no key has; give the key alone")


def ask_server(
    url: str, key: str | None, method: str, path: str, content: dict[str, object] | None = None
) -> dict[str, Any]:
    """The JSON object that the server at *url* answers. Refused if it refuses, OSError if no server answers, ValueError
    for a key that cannot be one."""
    check_key(key)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if content is None else json.dumps(content).encode()
    request = Request(url + path, data, headers, method=method)
    here = _is_here(urlsplit(url).hostname or "")
    opener = build_opener(_NoRedirect, *([ProxyHandler({})] if here else []))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return _object(answer.read(), url)
    except HTTPError as error:
        raise Refused(_why(error)) from error
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        why = getattr(error, "reason", error)
        why = getattr(why, "strerror", None) or why
        raise OSError(f"{url}: {why}; start one with 'kvtier serve --model …', or give --url") from error


def _is_here(host: str) -> bool:
    """Whether *host* is this machine, for which no proxy is asked."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(document_id: str) -> str:
    check_id(document_id)  # an id with a slash would be another path
    return f"/{quote(document_id, safe='')}"


def _object(body: bytes, url: str) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise Refused(f"{url}: does not answer as kvtier does; give the --url of a kvtier serve")
    return content


def _why(error: HTTPError) -> str:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answers {error.code} {error.reason}, not as kvtier does; give the --url of a kvtier serve"
    hint = "; --api-key or KVTIER_API_KEY gives one" if error.code == 401 else ""
    return f"{message}{hint}"
