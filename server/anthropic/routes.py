"""The routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. Requests become a `ChatRequest`."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.server.answers import InputTokens
from kvtier.server.anthropic.message_reply import MessageReply
from kvtier.server.anthropic.messages_request import IGNORED, NEUTRAL, Conversation, MessagesRequest
from kvtier.server.generation import Generation
from kvtier.server.named_documents import with_document_texts
from kvtier.server.service import Service
from kvtier.web.api_error import json_response
from kvtier.web.connection import while_connected
from kvtier.web.facts import facts_of
from kvtier.web.paths import COUNT_TOKENS, MESSAGES
from kvtier.web.request_body import parse, read_body

_T = TypeVar("_T", bound=Conversation)


def message_routes() -> list[Route]:
    """Return the routes of Anthropic's API."""
    return [
        Route(MESSAGES, create_message, methods=["POST"]),
        Route(COUNT_TOKENS, count_tokens, methods=["POST"]),
    ]


async def create_message(request: Request) -> Generation:
    """Answer `POST /v1/messages`."""
    service: Service = request.app.state.service
    asked = await _asked(request, service, MessagesRequest)
    facts = facts_of(request.scope)
    chat = with_document_texts(service, facts.tenant, asked.chat())
    return Generation(
        service,
        chat,
        reply_of=lambda chat, _, __, usage, tools: MessageReply(
            chat.model, usage, tools, facts.request_id, asked.is_warmup
        ),
    )


async def count_tokens(request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens` with the number of tokens in the conversation's prompt."""
    service: Service = request.app.state.service
    asked = await _asked(request, service, Conversation)
    service.models.lora_of(asked.model)
    tenant = facts_of(request.scope).tenant
    generation = Generation(service, with_document_texts(service, tenant, asked.chat()))

    num_tokens = await while_connected(request.receive, generation.num_tokens(tenant))
    return json_response(InputTokens(num_tokens))


async def _asked(request: Request, service: Service, kind: type[_T]) -> _T:
    service.check_open()
    return parse(await read_body(request, service.settings), kind, IGNORED, NEUTRAL)
