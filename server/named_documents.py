"""Named documents: replaces the ids of stored documents in a request by the documents' content."""

from typing import TypeVar

import msgspec

from kvtier.server.chat_request import ChatRequest
from kvtier.server.completion_request import CompletionRequest
from kvtier.server.documents.document import Document, Form
from kvtier.server.service import Service
from kvtier.web.api_error import ApiError

_Asked = TypeVar("_Asked", CompletionRequest, ChatRequest)


def with_document_texts(service: Service, tenant: str | None, asked: ChatRequest) -> ChatRequest:
    """Return the chat with each document id in its messages replaced by the document's text.

    A chat without a cache_salt gets that of its first document, so that it hits the document's cached blocks. Raises
    ApiError 404 for a document that the tenant does not have.
    """
    if asked.kvtier.document is not None:
        message = (
            "kvtier.document is for /v1/completions; in a chat, name the document in a message: "
            '{"type": "document", "document_id": …}'
        )
        raise ApiError(400, message, param="kvtier.document", code="invalid_value")
    texts, first = {}, None
    for document_id in asked.document_ids:
        document = _document(service, tenant, document_id, "messages")
        if document.text is None:
            message = "the document was put as token ids, which a chat cannot contain; put the document as text"
            raise ApiError(400, message, param="messages", code="invalid_value")
        texts[document_id] = document.text
        first = first or document
    if first is None:
        return asked
    return _salted(asked.with_texts(texts), first)


def with_document(
    service: Service, tenant: str | None, asked: CompletionRequest
) -> tuple[CompletionRequest, list[int]]:
    """Return the request, and the token ids of the document in `kvtier.document`, which precede each prompt.

    Without a document, the list is empty. A request without a cache_salt gets the document's cache_salt. Raises
    ApiError 404 if the tenant does not have the document.
    """
    if asked.kvtier.document is None:
        return asked, []
    document = _document(service, tenant, asked.kvtier.document, "kvtier.document")
    if document.form is not Form.TEXT:
        message = 'the document is for chats; name it in a message of a chat, or put it with "as": "text"'
        raise ApiError(400, message, param="kvtier.document", code="invalid_value")
    return _salted(asked, document), document.token_ids.tolist()


def _document(service: Service, tenant: str | None, document_id: str, field: str) -> Document:
    service.check_open()
    document = service.documents.find(tenant, document_id)
    if document is None:
        raise ApiError(404, "there is no document with this id", param=field, code="document_not_found")
    return document


def _salted(asked: _Asked, document: Document) -> _Asked:
    if asked.cache_salt is not None or document.cache_salt is None:
        return asked
    return msgspec.structs.replace(asked, cache_salt=document.cache_salt)
