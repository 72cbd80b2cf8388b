"""`/v1/kvtier/documents`: put, list, show, warm, pin and delete documents; each tenant has its own."""

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, TypeVar

import msgspec
from jinja2.exceptions import TemplateError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.server.answers import DocumentDeleted, DocumentList, DocumentObject, DocumentPin
from kvtier.server.documents.document import MAX_PINNED_S, Document, Form
from kvtier.server.documents.documents import Documents, TooManyDocuments
from kvtier.server.documents.draft import Draft
from kvtier.server.documents.pins import NoRoomToPin
from kvtier.server.documents.worker import DocumentState
from kvtier.server.generation_request import Text
from kvtier.server.service import Service
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.connection import while_connected
from kvtier.web.facts import facts_of
from kvtier.web.paths import DOCUMENTS
from kvtier.web.request_body import parse, read_body

_T = TypeVar("_T")


def document_object(document: Document, residence: DocumentState, model: str) -> DocumentObject:
    """Return the JSON object that describes a document. *model* is the name of the server's model."""
    pin, until = None, document.pinned_until
    if until is not None and (left_s := until - time.time()) > 0:
        pin = DocumentPin(expires_at=until, ttl_s=round(left_s, 1), is_held=residence.is_held)
    return DocumentObject(
        id=document.id,
        object="document",
        created=int(document.created_at),
        form=document.form,
        model=document.lora or model,
        status=residence.status,
        error=residence.error,
        num_tokens=document.num_tokens,
        prefilled_tokens=residence.num_computed,
        tokens=residence.tokens,
        bytes=residence.num_bytes,
        load_s=residence.load_s,
        compute_s=residence.compute_s,
        is_warming=residence.is_warming,
        pin=pin,
    )


def damaged_object(why: str, document_id: str | None = None, file: str | None = None) -> DocumentObject:
    """Return the JSON object for a document whose file cannot be read; *why* is the reason."""
    return DocumentObject(id=document_id, object="document", status="damaged", error=why, file=file)


class PutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `PUT /v1/kvtier/documents/{id}`.

    *system* is the system message with which chats about the document begin.
    """

    text: Text | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    form: Literal["text", "chat"] | None = msgspec.field(name="as", default=None)
    system: str | None = None
    model: str | None = None
    cache_salt: Text | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("text: give either text or token_ids")


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/kvtier/documents/{id}/pin`."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PINNED_S)]


def routes() -> Iterator[Route]:
    """Yield the routes below `/v1/kvtier/documents`."""
    yield Route(DOCUMENTS, _answer)
    yield Route(f"{DOCUMENTS}/{{id}}", _answer, methods=["GET", "PUT", "DELETE"])
    yield Route(f"{DOCUMENTS}/{{id}}/{{action}}", _answer, methods=["POST", "DELETE"])


async def _answer(request: Request) -> Response:
    request.app.state.service.check_open()
    document_id, action = request.path_params.get("id"), request.path_params.get("action")
    if document_id is None:
        return await _list(request)
    if action is not None:
        respond = _ACTIONS.get((request.method, action))
        if respond is None:
            raise ApiError(404, f"no such route: {request.method} {request.url.path}")
        return await respond(request, _found(request, document_id))
    respond_to = {"PUT": _put, "DELETE": _delete}.get(request.method, _get)
    return await respond_to(request, document_id)


async def _list(request: Request) -> Response:
    service: Service = request.app.state.service
    documents, tenant = _documents(request), facts_of(request.scope).tenant
    there = documents.of(tenant)
    residences = await _with_api_errors(documents.residences(there), request)
    objects = [document_object(*pair, service.models.name) for pair in zip(there, residences, strict=True)]
    objects += [damaged_object(why, file=name) for name, why in sorted(documents.damaged_files(tenant).items())]
    return json_response(DocumentList(object="list", data=objects, survive_restarts=documents.are_kept))


async def _put(request: Request, document_id: str) -> Response:
    service: Service = request.app.state.service
    asked = parse(await read_body(request, service.settings), PutRequest, (), {})
    draft = Draft(
        asked.text,
        asked.token_ids,
        None if asked.form is None else Form(asked.form),
        asked.system,
        None if asked.model is None else service.models.lora_of(asked.model),
        asked.cache_salt,
    )
    documents, facts = _documents(request), facts_of(request.scope)
    limit = service.settings.max_prompt_tokens
    putting = documents.put(facts.tenant, document_id, draft, limit)
    document, is_new = await _with_api_errors(while_connected(request.receive, putting), request)
    facts.fields["tokens"] = document.num_tokens
    return await _told(request, document, 201 if is_new else 200)


async def _get(request: Request, document_id: str) -> Response:
    why = _documents(request).damage_reason(facts_of(request.scope).tenant, document_id)
    if why is not None:
        return json_response(damaged_object(why, document_id=document_id))
    return await _told(request, _found(request, document_id))


async def _delete(request: Request, document_id: str) -> Response:
    if not await _with_api_errors(_documents(request).delete(facts_of(request.scope).tenant, document_id), request):
        raise _not_found()
    return json_response(DocumentDeleted(id=document_id, object="document.deleted", deleted=True))


async def _warm(request: Request, document: Document) -> Response:
    tier = request.query_params.get("tier", "host")
    if tier not in ("host", "device"):
        raise ApiError(400, "tier: must be host or device", param="tier", code="invalid_value")
    await _with_api_errors(_documents(request).warm(document, Tier(tier)), request)
    return await _told(request, document, 202)


async def _pin(request: Request, document: Document) -> Response:
    service: Service = request.app.state.service
    asked = parse(await read_body(request, service.settings), PinRequest, (), {})
    await _with_api_errors(_documents(request).pin(document, asked.ttl_s), request)
    return await _told(request, document)


async def _unpin(request: Request, document: Document) -> Response:
    await _with_api_errors(_documents(request).unpin(document), request)
    return await _told(request, document)


_ACTIONS = {("POST", "warm"): _warm, ("POST", "pin"): _pin, ("DELETE", "pin"): _unpin}


async def _told(request: Request, document: Document, status: int = 200) -> Response:
    service: Service = request.app.state.service
    residence = await _with_api_errors(_documents(request).residence(document), request)
    return json_response(document_object(document, residence, service.models.name), status)


def _documents(request: Request) -> Documents:
    service: Service = request.app.state.service
    service.check_open()
    return service.documents


def _found(request: Request, document_id: str) -> Document:
    document = _documents(request).find(facts_of(request.scope).tenant, document_id)
    if document is None:
        raise _not_found()
    return document


def _not_found() -> ApiError:
    return ApiError(404, "there is no document with this id", code="document_not_found")


async def _with_api_errors(work: Awaitable[_T], request: Request) -> _T:
    """Await *work* and return its result; raise its errors as ApiErrors."""
    with _api_errors(request.app.state.service):
        return await work


@contextmanager
def _api_errors(service: Service) -> Iterator[None]:
    try:
        yield
    except NoRoomToPin as error:
        raise ApiError(507, str(error), code="host_memory_full") from None
    except TooManyDocuments as error:
        raise ApiError(409, str(error), code="too_many_documents") from None
    except TemplateError as error:
        message = f"the model's chat template rejects this document: {error}"
        raise ApiError(400, message, param="text", code="invalid_value") from None
    except TooManyTokens as error:
        message = (
            f"the document has {error.min_num_tokens} tokens or more; shorten it to {error.limit}, which leaves room "
            "for a question"
        )
        raise ApiError(400, message, code="context_length_exceeded") from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    except OSError as error:
        message = f"the document cannot be written to disk: {error.strerror}; nothing has changed"
        raise ApiError(507, message, code="storage_failed") from error
    except RuntimeError as error:  # the engine ended during the request
        code = "shutting_down" if service.is_draining else "engine_failed"
        raise ApiError(503, "the server ended before the request was done; retry", code=code) from error
