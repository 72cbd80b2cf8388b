"""JSON objects of documents, as the API answers them."""

import time

from kvtier.server.documents.document import Document
from kvtier.server.documents.worker import DocumentState


def document_object(document: Document, residence: DocumentState, model: str) -> dict[str, object]:
    """Return the JSON object of a document, without its text; *model* is the name of the server's model."""
    pin, left_s = None, (document.pinned_until or 0.0) - time.time()
    if left_s > 0:
        pin = {"expires_at": document.pinned_until, "ttl_s": round(left_s, 1), "is_held": residence.is_held}
    return {
        "id": document.id,
        "object": "document",
        "created": int(document.created_at),
        "as": document.form,
        "model": document.lora or model,
        "status": residence.status,
        "error": residence.error,
        "num_tokens": document.num_tokens,
        "prefilled_tokens": residence.num_computed,
        "tokens": residence.tokens,
        "bytes": residence.num_bytes,
        "load_s": residence.load_s,
        "compute_s": residence.compute_s,
        "is_warming": residence.is_warming,
        "pin": pin,
    }


def damaged_object(why: str, document_id: str | None = None, file: str | None = None) -> dict[str, object]:
    """Return the JSON object of a document whose file is unreadable; *document_id* or *file* may be unknown."""
    return {"id": document_id, "object": "document", "status": "damaged", "error": why, "file": file}
