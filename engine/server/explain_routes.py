"""`/v1/kvtier/explain`: why a request's prompt was found in the cache or not; each tenant is told of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from kvtier.engine.core import EngineCore
from kvtier.engine.explain.explanation import Departure, Explanation
from kvtier.engine.explain.explanation_object import explanation_object
from kvtier.engine.server.api_error import ApiError, json_response
from kvtier.engine.server.chat_request import MOST_MESSAGES, ChatRequest, Message
from kvtier.engine.server.completion_request import CompletionRequest
from kvtier.engine.server.facts import facts_of
from kvtier.engine.server.generation_request import Text
from kvtier.engine.server.named_documents import with_document_texts
from kvtier.engine.server.request_body import parse, read_body
from kvtier.engine.server.service import Service
from kvtier.engine.server.tenancy import effective_salt
from kvtier.engine.server.tool_calls.tool import MOST_TOOLS, Tool
from kvtier.engine.text.chat_template import TemplateValue
from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.tiers.naming.block_hash import ExtraKeys

BEFORE_TOKENS = 12  # whose text comes before that of the token at which a prompt departs
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST`: a prompt, or the messages of a chat. With *request_id* that request is explained, which must
    have had this prompt; without it, what would be found now."""

    model: str | None = None
    prompt: Text | Annotated[list[_TokenId], msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] = []  # of the chat
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    cache_salt: Text | None = None
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")


async def explain_request(request: Request) -> Response:
    """Answer `GET /v1/kvtier/explain/{id}`."""
    service: Service = request.app.state.service
    service.check_open()
    request_id, tenant = request.path_params["id"], facts_of(request.scope).tenant
    return _answer(await _explained(service, request_id, tenant))


async def explain_prompt(request: Request) -> Response:
    """Answer `POST /v1/kvtier/explain`."""
    service: Service = request.app.state.service
    service.check_open()
    tenant = facts_of(request.scope).tenant
    asked = parse(await read_body(request, service.settings), ExplainRequest, (), {})
    lora = None if asked.model is None else service.models.lora_of(asked.model)
    token_ids, asked = await _token_ids(service, asked, tenant)
    salt = effective_salt(tenant, asked.cache_salt, service.is_strict)
    alike = [] if asked.messages is None else service.conversations.alike_messages(tenant, asked.messages)

    def extra_of(core: EngineCore) -> ExtraKeys:
        return ExtraKeys(lora=None if lora is None else core.lora_key(lora), cache_salt=salt)

    if asked.request_id is None:
        found = [await service.llm.ask(lambda core: core.explain_prompt(token_ids, extra_of(core), tenant, alike))]
    else:
        found = await _explained(service, asked.request_id, tenant)
        request_id = asked.request_id
        if not await service.llm.ask(
            lambda core: core.explainer.is_prompt_of(
                request_id, core.chain(token_ids, extra_of(core)), len(token_ids), tenant
            )
        ):
            message = "that request had another prompt, cache_salt or model; give those that it had, or no request_id"
            raise ApiError(409, message, code="other_prompt", param="prompt")
    texts = await service.llm.with_tokenizer(
        lambda tokenizer: [_with_text(each, token_ids, tokenizer) for each in found], tenant
    )
    return _answer(texts)


async def _explained(service: Service, request_id: str, tenant: str | None) -> list[Explanation]:
    alike = service.conversations.alike(request_id)
    found = await service.llm.ask(lambda core: core.explainer.explain(request_id, tenant, alike))
    if not found:
        message = "no request of that id is remembered: it is another's, has not ended, or thousands have come since"
        raise ApiError(404, message, code="request_not_found")
    return found


async def _token_ids(
    service: Service, asked: ExplainRequest, tenant: str | None
) -> tuple[Sequence[int], ExplainRequest]:
    """The prompt's tokens, as a request with it would have them, and the question with the salt that it would have."""
    llm, name = service.llm, service.models.name
    limit = llm.tokenizers.limit(llm.longest_request)
    whole: CompletionRequest | ChatRequest
    if asked.messages is not None:
        whole = ChatRequest(
            model=name,
            messages=asked.messages,
            tools=asked.tools,
            chat_template_kwargs=asked.chat_template_kwargs,
            cache_salt=asked.cache_salt,
        )
        whole = with_document_texts(service, tenant, whole)
        asked = msgspec.structs.replace(asked, cache_salt=whole.cache_salt, messages=whole.messages)
    else:
        given = asked.prompt if isinstance(asked.prompt, str) else list[str | int | list[int]](asked.prompt or [])
        whole = CompletionRequest(model=name, prompt=given)
    try:
        (prompt,) = await llm.with_tokenizer(lambda tokenizer: whole.prompts(tokenizer, limit), tenant)
    except TooManyTokens as error:
        message = f"the prompt has {error.num_least} tokens or more; the model takes {llm.longest_request}"
        raise ApiError(400, message, code="context_length_exceeded") from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    if not len(prompt.token_ids):
        raise ApiError(400, "the prompt has no tokens; give at least one", code="invalid_value", param="prompt")
    return prompt.token_ids, asked


def _with_text(explanation: Explanation, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Explanation:
    departure = explanation.departure
    if departure is None or not departure.departs:
        return explanation
    place = departure.num_shared
    text = tokenizer.decode(list(token_ids[place : place + 1]))
    before = tokenizer.decode(list(token_ids[max(0, place - BEFORE_TOKENS) : place]))
    return replace(explanation, departure=Departure(place, True, str(text), str(before)))


def _answer(found: Sequence[Explanation]) -> Response:
    return json_response({"object": "list", "data": [explanation_object(each) for each in found]})
