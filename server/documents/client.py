"""DocumentClient: an HTTP client for the documents of a running `kvtier serve`."""

from typing import Any
from urllib.parse import quote, urlencode

from kvtier.server.documents.document import check_id
from kvtier.web.json_client import JsonClient

TIMEOUT_S = 60.0


class DocumentClient:
    """A client for the documents of one server. Methods return the JSON object in the server's answer.

    Methods raise Refused if the server answers with an error, OSError if no server answers, and ValueError for an
    invalid id.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """Create a client of the server at *url*; raise ValueError if *url* or the API key *key* is malformed."""
        self._client = JsonClient(url, key, "--api-key or KVTIER_API_KEY", "kvtier serve --model …", TIMEOUT_S)

    def list(self) -> dict[str, Any]:
        """Return all documents of the API key's tenant, and whether documents survive a restart of the server."""
        return self._ask("GET", "")

    def put(self, document_id: str, content: dict[str, object]) -> dict[str, Any]:
        """Store a document. It replaces a document with the same id."""
        return self._ask("PUT", _path(document_id), content)

    def get(self, document_id: str) -> dict[str, Any]:
        """Return the document with its status."""
        return self._ask("GET", _path(document_id))

    def warm(self, document_id: str, tier: str) -> dict[str, Any]:
        """Ask the server to start loading the document into *tier*."""
        return self._ask("POST", f"{_path(document_id)}/warm?{urlencode({'tier': tier})}")

    def pin(self, document_id: str, ttl_s: float) -> dict[str, Any]:
        """Keep the document in host memory for *ttl_s* seconds."""
        return self._ask("POST", f"{_path(document_id)}/pin", {"ttl_s": ttl_s})

    def unpin(self, document_id: str) -> dict[str, Any]:
        """End the document's pin."""
        return self._ask("DELETE", f"{_path(document_id)}/pin")

    def delete(self, document_id: str) -> dict[str, Any]:
        """Delete the document."""
        return self._ask("DELETE", _path(document_id))

    def _ask(self, method: str, path: str, content: dict[str, object] | None = None) -> dict[str, Any]:
        return self._client.ask(method, f"/v1/kvtier/documents{path}", content)


def _path(document_id: str) -> str:
    check_id(document_id)  # an id with a slash would change the path
    return f"/{quote(document_id, safe='')}"
