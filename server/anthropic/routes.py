"""The routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. Requests become a `ChatRequest`."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.server.answers import InputTokens
from kvtier.server.anthropic.message_reply import MessageReply
from kvtier.server.anthropic.messages_request import IGNORED, NEUTRAL, Conversation, MessagesRequest
from kvtier.server.anthropic.tools import unknown_fields
from kvtier.server.context_limit import ContextLimit
from kvtier.server.generation import Generation
from kvtier.server.generation_request import log_ignored_parameters, log_unknown_fields
from kvtier.server.named_documents import with_document_texts
from kvtier.server.service import Service
from kvtier.web.api_error import json_response
from kvtier.web.connection import while_connected
from kvtier.web.facts import facts_of
from kvtier.web.paths import COUNT_TOKENS, MESSAGES
from kvtier.web.request_body import fit, json_object, read_body

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
        too_long=ContextLimit.exceeded_by_messages,
    )


async def count_tokens(request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens` with the number of tokens in the conversation's prompt."""
    service: Service = request.app.state.service
    asked = await _asked(request, service, Conversation)
    service.models.lora_of(asked.model)
    tenant = facts_of(request.scope).tenant
    chat = with_document_texts(service, tenant, asked.chat())
    generation = Generation(service, chat, too_long=ContextLimit.exceeded_by_messages)

    num_tokens = await while_connected(request.receive, generation.num_tokens(tenant))
    return json_response(InputTokens(num_tokens))


async def _asked(request: Request, service: Service, kind: type[_T]) -> _T:
    service.check_open()
    content = json_object(await read_body(request, service.settings))
    asked = fit(content, kind, IGNORED, NEUTRAL)
    log_ignored_parameters(content, IGNORED)
    log_unknown_fields(unknown_fields(content.get("tools")), "tools")
    return asked
