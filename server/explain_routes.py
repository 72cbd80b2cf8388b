"""`/v1/kvtier/explain`: why a request's prompt hit or missed the cache. Tenants see only their own requests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from kvtier.engine.core import EngineCore
from kvtier.engine.observability.explain.explanation import Departure, Explanation
from kvtier.engine.observability.explain.explanation_object import explanation_list
from kvtier.engine.observability.explain.past_requests import Past
from kvtier.engine.text.chat_template import TemplateValue
from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.server.chat_request import MAX_MESSAGES, ChatRequest, Message
from kvtier.server.completion_request import CompletionRequest
from kvtier.server.context_limit import ContextLimit
from kvtier.server.generation_request import Text
from kvtier.server.images.chat_images import chat_images
from kvtier.server.named_documents import with_document_texts
from kvtier.server.prompt import Prompt
from kvtier.server.service import Service
from kvtier.server.tool_calls.tool import MAX_TOOLS, Tool
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.api_keys import effective_salt
from kvtier.web.facts import facts_of
from kvtier.web.request_body import parse, read_body

CONTEXT_TOKENS = 12  # tokens of context to show before the token at which a prompt diverges
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/kvtier/explain`: a prompt, or the messages of a chat.

    Without *request_id*, the answer explains which part of the prompt would hit the cache now. With *request_id*, it
    explains the hits and misses of a past request, which must have had the same prompt.
    """

    model: str | None = None
    prompt: Text | Annotated[list[_TokenId], msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] = []  # of the chat
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Text | None = None
    cache_salt: Text | None = None
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")


async def explain_request(request: Request) -> Response:
    """Answer `GET /v1/kvtier/explain/{id}`: why the past request hit or missed the cache."""
    service: Service = request.app.state.service
    service.check_open()
    request_id, tenant = request.path_params["id"], facts_of(request.scope).tenant
    pasts = await _pasts(service, request_id, tenant)
    return _answer(await _explained(service, pasts, request_id, tenant))


async def explain_prompt(request: Request) -> Response:
    """Answer `POST /v1/kvtier/explain`, see `ExplainRequest`."""
    service: Service = request.app.state.service
    service.check_open()
    tenant = facts_of(request.scope).tenant
    asked = parse(await read_body(request, service.settings), ExplainRequest, (), {})
    lora = None if asked.model is None else service.models.lora_of(asked.model)
    prompt, asked = await _prompt(service, asked, tenant)
    token_ids = prompt.token_ids
    salt = effective_salt(tenant, asked.cache_salt, service.is_strict)
    alike = [] if asked.messages is None else service.conversations.requests_like(tenant, asked.messages)

    def naming(core: EngineCore) -> Callable[[], BlockChain]:
        extra = ExtraKeys(None if lora is None else core.lora_key(lora), prompt.items, salt)
        return partial(core.chain, token_ids, extra)

    named = await service.llm.ask(naming)
    # Hashing a long prompt must not block the engine's thread.
    chain = await service.llm.with_tokenizer(lambda _: named(), tenant)
    if asked.request_id is None:
        evidence = await service.llm.ask(lambda core: core.explain_prompt(chain, tenant, alike))
        found = [await service.llm.with_tokenizer(lambda _: evidence.explanation(), tenant)]
    else:
        pasts = await _pasts(service, asked.request_id, tenant)
        explainer = await service.llm.ask(lambda core: core.explainer)
        if not await service.llm.with_tokenizer(
            lambda _: any(explainer.is_prompt_of(past, chain, len(token_ids)) for past in pasts), tenant
        ):
            message = (
                "the request with this id had another prompt, cache_salt or model; send those of the request, or leave "
                "request_id out"
            )
            raise ApiError(409, message, code="other_prompt", param="prompt")
        found = await _explained(service, pasts, asked.request_id, tenant)
    texts = await service.llm.with_tokenizer(
        lambda tokenizer: [_with_text(each, token_ids, tokenizer) for each in found], tenant
    )
    return _answer(texts)


async def _pasts(service: Service, request_id: str, tenant: str | None) -> Sequence[Past]:
    """Return the past requests with this id; raise ApiError 404 if there is none."""
    found = await service.llm.ask(lambda core: core.explainer.find(request_id, tenant))
    if not found:
        message = (
            "no request of that id is remembered; it may belong to another tenant, it may still be running, or it may "
            "have been dropped because thousands of requests came after it"
        )
        raise ApiError(404, message, code="request_not_found")
    return found


async def _explained(service: Service, pasts: Sequence[Past], request_id: str, tenant: str | None) -> list[Explanation]:
    """Return an explanation of each past request. Most of the work runs outside the engine's thread."""
    alike, found = service.conversations.alike(request_id), []
    for past in pasts:
        evidence = await service.llm.ask(lambda core, past=past: core.explainer.evidence(past, alike))  # type: ignore[misc]
        found.append(await service.llm.with_tokenizer(lambda _, evidence=evidence: evidence.explanation(), tenant))  # type: ignore[misc]
    return found


async def _prompt(service: Service, asked: ExplainRequest, tenant: str | None) -> tuple[Prompt, ExplainRequest]:
    """Return the prompt, and *asked* with the texts of stored documents instead of their ids.

    If *asked* has no cache_salt, it gets that of its first document.
    """
    llm = service.llm
    limit = llm.tokenizers.limit(llm.longest_request)
    try:
        whole, images = _request_with(asked, service.models.name), None
        if isinstance(whole, ChatRequest):
            whole = with_document_texts(service, tenant, whole)
            asked = msgspec.structs.replace(asked, cache_salt=whole.cache_salt, messages=whole.messages)
            images = await chat_images(service, whole, tenant)

        def work(tokenizer: PreTrainedTokenizerBase) -> Prompt:
            (prompt,) = whole.prompts(tokenizer, limit)
            return prompt if images is None else images.placed(prompt)

        prompt = await llm.with_tokenizer(work, tenant)
    except TooManyTokens as error:
        message = f"{ContextLimit.of(llm)}. The prompt has {error.min_num_tokens} or more; shorten it"
        raise ApiError(400, message, code="context_length_exceeded") from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    if not len(prompt.token_ids):
        raise ApiError(400, "the prompt has no tokens; give at least one", code="invalid_value", param="prompt")
    return prompt, asked


def _request_with(asked: ExplainRequest, model: str) -> CompletionRequest | ChatRequest:
    """Return a completion or chat request with the prompt to explain; raise ValueError if the prompt is invalid."""
    if asked.messages is None:
        given = asked.prompt if isinstance(asked.prompt, str) else list[str | int | list[int]](asked.prompt or [])
        return CompletionRequest(model=model, prompt=given)
    return ChatRequest(
        model=model,
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        reasoning_effort=asked.reasoning_effort,
        cache_salt=asked.cache_salt,
    )


def _with_text(explanation: Explanation, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Explanation:
    departure = explanation.departure
    if departure is None or not departure.departs:
        return explanation
    place = departure.num_shared
    text = tokenizer.decode(list(token_ids[place : place + 1]))
    before = tokenizer.decode(list(token_ids[max(0, place - CONTEXT_TOKENS) : place]))
    return replace(explanation, departure=Departure(place, True, str(text), str(before)))


def _answer(found: Sequence[Explanation]) -> Response:
    return json_response(explanation_list(found))
