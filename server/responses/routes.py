"""The routes of OpenAI's Responses API, `/v1/responses`. Requests become a `ChatRequest`."""

import logging
import uuid
from collections.abc import Sequence, Set

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.server.generation import Generation
from kvtier.server.logged_once import LoggedOnce
from kvtier.server.named_documents import with_document_texts
from kvtier.server.responses.items import Item
from kvtier.server.responses.response_object import ResponseDeleted, ResponseObject
from kvtier.server.responses.response_reply import ResponseReply, new_response
from kvtier.server.responses.responses_request import IGNORED, NEUTRAL, ResponsesRequest, normalized
from kvtier.server.responses.stored_responses import StoredResponse, StoredResponses, encoded
from kvtier.server.service import Service
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.facts import facts_of
from kvtier.web.paths import RESPONSES
from kvtier.web.request_body import fit, json_object, read_body

log = logging.getLogger(__name__)

MAX_CHARACTERS = 40  # of a name in the log


class ResponseRoutes:
    """The routes of the Responses API, with the responses that they store. Owned by the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        settings = service.settings
        self._stored = StoredResponses(
            settings.max_stored_responses, settings.max_stored_response_bytes, lambda: service.num_tenants
        )
        self._logged = LoggedOnce()  # clients may make up any number of kinds of tools

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{RESPONSES}/{{id}}"
        return [
            Route(RESPONSES, self._create, methods=["POST"]),
            Route(path, self._show, methods=["GET"]),
            Route(path, self._delete, methods=["DELETE"]),
        ]

    async def _create(self, request: Request) -> Generation:
        service, facts = self._service, facts_of(request.scope)
        service.check_open()
        content, tools_left_out = normalized(json_object(await read_body(request, service.settings)))
        asked = fit(content, ResponsesRequest, IGNORED, NEUTRAL)
        self._tell("ignoring the parameters", IGNORED & content.keys())
        self._tell("leaving out tools of the kinds", tools_left_out)
        previous = asked.previous_response_id
        earlier = None if previous is None else self._found(facts.tenant, previous, "previous_response_id")
        chat = asked.chat(_items_of(earlier))

        def keep(response: ResponseObject) -> None:
            if asked.store:
                before = () if earlier is None else earlier.conversation
                conversation = (*before, *encoded(asked.items), *encoded(response.output))
                self._stored.put(facts.tenant, response.id, StoredResponse(msgspec.json.encode(response), conversation))

        response = new_response(asked, f"resp_{uuid.uuid4().hex}", service.llm.sampling_defaults)
        return Generation(
            service,
            with_document_texts(service, facts.tenant, chat),
            reply_of=lambda _, __, ___, usage, tools: ResponseReply(asked, response, usage, tools, keep),
        )

    async def _show(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            message = "stream: a stored response cannot be streamed; leave stream out"
            raise ApiError(400, message, param="stream", code="unsupported_parameter")
        stored = self._found(facts_of(request.scope).tenant, request.path_params["id"], None)
        return Response(stored.content, media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        tenant, response_id = facts_of(request.scope).tenant, request.path_params["id"]
        self._found(tenant, response_id, None)
        self._stored.delete(tenant, response_id)
        return json_response(ResponseDeleted(response_id))

    def _found(self, tenant: str | None, response_id: str, param: str | None) -> StoredResponse:
        """Return the tenant's response with this id; raise ApiError 404 if it is not stored."""
        stored = self._stored.find(tenant, response_id)
        if stored is None:
            message = (
                f"no response with the id {response_id[:MAX_CHARACTERS]} is stored; it may have been evicted, so send "
                "the whole conversation as input"
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        return stored

    def _tell(self, what: str, names: Set[str]) -> None:
        """Log the *names* that were not logged before, in one line."""
        new = self._logged.new(names)
        if new:
            log.info("responses: %s %s", what, ", ".join(name[:MAX_CHARACTERS] for name in new))


def _items_of(stored: StoredResponse | None) -> Sequence[Item]:
    return () if stored is None else stored.items()
