"""The routes `/tokenize` and `/detokenize`, in vLLM's format: convert a prompt to token ids, and back."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import TemplateValue
from kvtier.engine.text.min_tokens import PromptLimit, TooManyTokens
from kvtier.server.answers import Detokenized, Tokenized
from kvtier.server.chat_request import CHAT_NEUTRAL, MAX_MESSAGES, ChatRequest, Message, unknown_fields
from kvtier.server.generation import MAX_TRUNCATION_FACTOR
from kvtier.server.generation_request import Text, log_unknown_fields
from kvtier.server.images.chat_images import chat_images
from kvtier.server.prompt import Prompt
from kvtier.server.service import Service
from kvtier.server.tool_calls.tool import MAX_TOOLS, Tool
from kvtier.tiers.naming.request_text import check_text
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.facts import facts_of
from kvtier.web.request_body import fit, json_object, parse, read_body

_NEUTRAL = {name: CHAT_NEUTRAL[name] for name in ("add_special_tokens", "mm_processor_kwargs")}


class TokenizeCompletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /tokenize` for a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def prompt_of(self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit) -> Prompt:
        """Return the prompt."""
        check_text("prompt", self.prompt)
        limit.check_text(self.prompt)
        token_ids: list[int] = tokenizer(self.prompt, add_special_tokens=self.add_special_tokens)["input_ids"]
        return Prompt(token_ids)


class TokenizeChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /tokenize` for a conversation, which the chat template turns into a prompt."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] = []
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Text | None = None
    return_token_strs: bool = False

    def prompt_of(self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit) -> Prompt:
        """Return the prompt, without its images."""
        return self.chat().prompts(tokenizer, limit)[0]

    def chat(self) -> ChatRequest:
        """Return the conversation as a chat request."""
        return ChatRequest(
            model=self.model or "",
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            reasoning_effort=self.reasoning_effort,
        )


class Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """Answer `POST /tokenize`."""
    service: Service = request.app.state.service
    content = json_object(await read_body(request, service.settings))
    is_chat = "messages" in content
    log_unknown_fields(unknown_fields(content.get("messages")))
    asked = fit(content, TokenizeChat, (), _NEUTRAL) if is_chat else fit(content, TokenizeCompletion)
    _check_model(service, asked.model)
    longest, tenant = service.llm.longest_request, facts_of(request.scope).tenant

    def work(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[str] | None]:
        within = service.llm.tokenizers.limit(MAX_TRUNCATION_FACTOR * longest)
        prompt = asked.prompt_of(tokenizer, within)
        token_ids = list(prompt.token_ids if images is None else images.placed(prompt).token_ids)
        if not asked.return_token_strs:
            return token_ids, None
        texts = tokenizer.convert_ids_to_tokens(token_ids)
        assert isinstance(texts, list)  # it returns a str only for a single id
        return token_ids, texts

    try:
        images = await chat_images(service, asked.chat(), tenant) if isinstance(asked, TokenizeChat) else None
        token_ids, texts = await service.llm.with_tokenizer(work, tenant)
    except TooManyTokens as error:
        limit = MAX_TRUNCATION_FACTOR * longest
        message = f"the prompt has {error.min_num_tokens} tokens or more; at most {limit} can be tokenized at once"
        raise ApiError(400, message, code="context_length_exceeded") from None
    except ValueError as error:
        param = "messages" if is_chat else "prompt"
        raise ApiError(400, str(error), code="invalid_value", param=param) from None
    return json_response(Tokenized(count=len(token_ids), max_model_len=longest, tokens=token_ids, token_strs=texts))


async def detokenize(request: Request) -> Response:
    """Answer `POST /detokenize`."""
    service: Service = request.app.state.service
    asked = parse(await read_body(request, service.settings), Detokenize)
    _check_model(service, asked.model)

    def work(tokenizer: PreTrainedTokenizerBase) -> str:
        service.llm.tokenizers.limit(len(asked.tokens)).check_ids(asked.tokens)
        text = tokenizer.decode(asked.tokens)
        assert isinstance(text, str)  # decode returns a list only for several lists
        return text

    try:
        text = await service.llm.with_tokenizer(work, facts_of(request.scope).tenant)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="tokens") from None
    return json_response(Detokenized(text))


def _check_model(service: Service, model: str | None) -> None:
    """Raise ApiError 404 if *model* is not served. None stands for the served model."""
    if model is not None:
        service.models.lora_of(model)
