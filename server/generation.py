"""Generation: answers one request for completions or a chat."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from kvtier.engine.async_engine import AsyncEngine, StreamChunk
from kvtier.engine.images.preparer import ImagesBusy
from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.engine.scheduling.timeline import Caller
from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.server.chat_reply import ChatReply
from kvtier.server.chat_request import CHAT_IGNORED, CHAT_NEUTRAL, ChatRequest, unknown_fields
from kvtier.server.choices import Choice, ChoicePiece, generate
from kvtier.server.completion_reply import CompletionReply
from kvtier.server.completion_request import COMPLETION_IGNORED, CompletionRequest
from kvtier.server.context_limit import ContextLimit, RequestLength
from kvtier.server.documents.documents import Documents
from kvtier.server.documents.kept_prefixes import MarkedPrompt
from kvtier.server.documents.worker import PROMPT_PIN_S
from kvtier.server.generation_request import NEUTRAL, log_ignored_parameters, log_unknown_fields
from kvtier.server.images.chat_images import ChatImages, chat_images, refuse_truncation
from kvtier.server.named_documents import with_document, with_document_texts
from kvtier.server.prompt import Prompt
from kvtier.server.reply import Answer, Reply
from kvtier.server.service import Service
from kvtier.server.token_text import TokenText
from kvtier.server.tool_calls.tool_use import ToolFormat, ToolUse
from kvtier.server.usage import Usage
from kvtier.server.waiting_room import RoomFull, Visit
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.api_keys import effective_salt
from kvtier.web.connection import in_time, while_connected
from kvtier.web.event_stream import HEADERS
from kvtier.web.facts import facts_of
from kvtier.web.request_body import fit, json_object, read_body

HEADER = "x-kvtier-left-out"
_MAX_CHARACTERS = 1024  # proxies take headers of a few KiB
_AS_THEY_ARE = "./[]$"
Asked: TypeAlias = CompletionRequest | ChatRequest
ReplyOf: TypeAlias = Callable[[Asked, Sequence[Prompt], TokenText, Usage, ToolUse], Reply]
TooLong: TypeAlias = Callable[[ContextLimit, RequestLength], str]

_T = TypeVar("_T")

IMAGES_RETRY = {"Retry-After": "1"}  # images of a request that ends make room for others
MAX_TRUNCATION_FACTOR = 8  # a prompt to truncate may be this many times its limit, because all of it is tokenized


class PromptKeeper:
    """An object that pins a request's prompts in host memory before its answer ends. Owned by one request.

    It records in *usage* whether the prompts are pinned. Their blocks are hashed with *lora* and *cache_salt*.
    """

    def __init__(
        self, documents: Documents, usage: Usage, tenant: str | None, lora: str | None, cache_salt: str | None
    ) -> None:
        self._documents = documents
        self._usage = usage
        self._tenant = tenant
        self._names = (lora, cache_salt)  # of the prompts' blocks

    async def pinned(
        self, pieces: AsyncIterator[ChoicePiece], prompts: Mapping[int, Prompt], ttl_s: float
    ) -> AsyncIterator[ChoicePiece]:
        """Yield *pieces*. Before a choice's last piece, pin the choice's prompt for *ttl_s* seconds.

        *prompts* maps the index of a choice to its prompt.
        """
        async for item in pieces:
            if item.piece.completion is not None and item.index in prompts:
                prompt = prompts[item.index]
                has_room = await self._documents.pin_prompt(
                    self._tenant, prompt.token_ids, *self._names, ttl_s, prompt.items
                )
                self._usage.note_pinned(has_room)
            yield item

    async def kept(self, pieces: AsyncIterator[ChoicePiece], prompt: Prompt) -> AsyncIterator[ChoicePiece]:
        """Yield *pieces*. Before the first piece, pin the prefixes of the prompt that end at its breakpoints."""
        marked = MarkedPrompt(self._tenant, prompt.token_ids, *self._names, prompt.breakpoints, prompt.items)
        # Look up pinned prefixes when the request starts, so that the first token need not wait for an engine step.
        reading = asyncio.create_task(self._documents.read_prefixes(marked))
        try:
            async for item in pieces:
                if self._usage.kept is None:
                    kept = await reading
                    if len(kept.breakpoints) < len(prompt.breakpoints):
                        kept = await self._documents.keep_prefixes(marked)
                    self._usage.kept = kept
                    self._usage.note_pinned(len(kept.breakpoints) == len(prompt.breakpoints))
                yield item
        finally:
            reading.cancel()


def left_out_headers(left_out: Sequence[str]) -> dict[str, str]:
    """Return a header that lists *left_out*, the keywords of a JSON schema that are not enforced.

    Return no header if *left_out* is empty. The keywords are percent-encoded, and the list is cut off after 1,024
    characters. The answer's `kvtier` object has the whole list.
    """
    named = ", ".join(quote(name, safe=_AS_THEY_ARE) for name in left_out)
    if len(named) > _MAX_CHARACTERS:
        named = named[:_MAX_CHARACTERS].rpartition(",")[0] + ", and more"
    return {HEADER: named} if left_out else {}


def openai_reply(asked: Asked, prompts: Sequence[Prompt], text: TokenText, usage: Usage, tools: ToolUse) -> Reply:
    """Return the writer of an answer in the format of OpenAI's endpoints."""
    if isinstance(asked, ChatRequest):
        return ChatReply(asked.model, text, usage, tools, asked.num_top_logprobs is not None, asked.chunk_options)
    return CompletionReply(asked, prompts, text, usage)


class Generation:
    """An ASGI app that generates and sends the answer to one request for completions or a chat.

    If the client disconnects, its completions are aborted, and its place in the queue (`WaitingRoom`) is freed.
    """

    def __init__(
        self,
        service: Service,
        asked: Asked,
        document: Sequence[int] = (),
        reply_of: ReplyOf = openai_reply,
        too_long: TooLong = ContextLimit.exceeded_by,
    ) -> None:
        """Prepare the answer to *asked*.

        Args:
            service: The state that all requests share.
            asked: The request.
            document: Token ids of a stored document, which precede each prompt of a CompletionRequest.
            reply_of: Creates the writer of the answer in the endpoint's format.
            too_long: Writes the endpoint's error message for a request that exceeds the context length.
        """
        self._service = service
        self._asked = asked
        self._document = document
        self._reply_of = reply_of
        self._too_long = too_long
        self._field = "messages" if isinstance(asked, ChatRequest) else "prompt"
        self._usage = Usage(asked.n)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._answer(scope, receive, in_time(send)))
        except (ClientDisconnect, TimeoutError):
            facts_of(scope).client_left = True

    async def num_tokens(self, tenant: str | None) -> int:
        """Return the number of tokens of all prompts together; raise ApiError 400 if they are invalid or too long."""
        with self._api_errors():
            llm = self._service.llm
            images = await self._images(tenant)
            prompts = await llm.with_tokenizer(lambda tokenizer: self._prompts(tokenizer, llm, images), tenant)
        return sum(len(prompt.token_ids) for prompt in prompts)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, service = self._asked, self._service
        lora, tenant = service.models.lora_of(asked.model), facts_of(scope).tenant
        service.check_open()
        llm = service.llm
        num_completions = asked.n * asked.num_prompts
        if num_completions > service.room.capacity:
            limit = service.room.capacity
            message = (
                f"the request asks for {num_completions} completions; the server takes at most {limit}; ask for fewer"
            )
            raise ApiError(400, message, code="too_many_completions")
        try:
            with service.room.enter(num_completions, tenant, asked.priority) as visit:
                with self._api_errors():
                    images = await self._images(tenant)
                    prompts, text = await llm.with_tokenizer(
                        lambda tokenizer: (self._prompts(tokenizer, llm, images), TokenText(tokenizer)), tenant
                    )
                    tools = tool_use(asked, service.tool_format)
                    choices = self._choices(prompts, llm, tools)
                    grammar = await llm.grammar_of(choices[0][0].sampling.structured_outputs, tenant)
                    self._usage.left_out = () if grammar is None else grammar.left_out
                visit.prompts = [group[0].prompt for group in choices]
                await visit.wait_for_turn()
                reply = self._reply_of(asked, prompts, text, self._usage, tools)
                if isinstance(asked, ChatRequest):
                    service.conversations.add(facts_of(scope).request_id, tenant, asked.messages)
                salt = effective_salt(tenant, asked.cache_salt, service.is_strict)
                async with aclosing(generate(llm, choices, lora, salt, self._options(), _caller(scope))) as pieces:
                    keeper = PromptKeeper(service.documents, self._usage, tenant, lora, salt)
                    observed = self._observed(self._kept(pieces, prompts, keeper), visit)
                    if asked.stream:
                        await self._send_stream(observed, reply, send, tenant)
                    else:
                        answers = await self._collect(observed)
                        headers = left_out_headers(self._usage.left_out)
                        response = await self._written(
                            lambda: json_response(reply.whole(answers), 200, headers), tenant
                        )
                        await response(scope, receive, send)
        except RoomFull as full:
            headers = {"Retry-After": str(full.retry_after_s)}
            raise ApiError(429, f"{full}", code="queue_full", headers=headers) from None
        finally:
            self._tell(scope)

    def _options(self) -> RequestOptions:
        """Return the options for the engine.

        With several tenants, all requests get priority 0 in the engine, so that no tenant overtakes another. The
        server's queue (`WaitingRoom`) uses the priority to order the requests of one tenant.
        """
        options = self._asked.options
        return options if self._service.num_tenants <= 1 else replace(options, priority=0)

    async def _images(self, tenant: str | None) -> ChatImages | None:
        asked = self._asked
        return await chat_images(self._service, asked, tenant) if isinstance(asked, ChatRequest) else None

    def _prompts(self, tokenizer: PreTrainedTokenizerBase, llm: AsyncEngine, images: ChatImages | None) -> list[Prompt]:
        """Return the tokenized prompts; raise ApiError 400 for an unknown token id, or for a text that is too long.

        A text that is far too long is not tokenized to its end. `_choices` makes the exact check.
        """
        limit, longest = self._service.settings.max_prompt_tokens, llm.longest_request
        max_prompt = max(0, min(longest if limit is None else limit, longest - self._max_new_tokens(0)))
        num_kept = self._asked.truncated_length(max_prompt)
        try:
            max_given = max_prompt if num_kept is None else MAX_TRUNCATION_FACTOR * max_prompt
            within = llm.tokenizers.limit(max(0, max_given - len(self._document)))
            prompts = self._asked.prompts(tokenizer, within, self._document)
            if images is not None:
                refuse_truncation(num_kept)
                return [images.placed(prompt) for prompt in prompts]
            return prompts if num_kept is None else [prompt.last(num_kept) for prompt in prompts]
        except TooManyTokens as error:
            num_new, min_num_tokens = self._max_new_tokens(0), error.min_num_tokens + len(self._document)
            if limit is not None and limit <= longest - num_new:
                message = (
                    f"the prompt has {min_num_tokens} tokens or more, and server.max_prompt_tokens is {limit}; "
                    "shorten it"
                )
            else:
                length = RequestLength(min_num_tokens, num_new, self._field, is_exact=False)
                message = self._too_long(ContextLimit.of(llm), length)
            raise ApiError(400, message, code="context_length_exceeded", param=self._field) from None

    def _choices(self, prompts: Sequence[Prompt], llm: AsyncEngine, tools: ToolUse) -> list[list[Choice]]:
        """Return a list of choices for each prompt; raise ApiError 400 if a prompt is too long."""
        asked = self._asked
        structured = tools.structured
        groups = []
        for number, whole in enumerate(prompts):
            prompt = whole.token_ids
            self._check_length(len(prompt), self._max_new_tokens(0), ContextLimit.of(llm))
            max_tokens = self._max_new_tokens(llm.longest_request - len(prompt))
            indices = range(number * asked.n, (number + 1) * asked.n)
            samplings = [
                tools.shown(asked.sampling(i % asked.n, max_tokens, llm.sampling_defaults, structured)) for i in indices
            ]
            groups.append(
                [Choice(i, prompt, sampling, whole.images) for i, sampling in zip(indices, samplings, strict=True)]
            )
        return groups

    def _max_new_tokens(self, room: int) -> int:
        """Return the maximum number of tokens to generate: the smaller of the request's and the model's limit.

        *room* is the number of tokens that the context has left after the prompt.
        """
        asked, limit = self._asked.max_new_tokens(room), self._service.llm.sampling_defaults.max_tokens
        return asked if limit is None else min(asked, limit)

    def _check_length(self, num_prompt: int, num_new: int, longest: ContextLimit) -> None:
        code = "context_length_exceeded"
        if (limit := self._service.settings.max_prompt_tokens) is not None and num_prompt > limit:
            message = f"the prompt has {num_prompt} tokens, and server.max_prompt_tokens is {limit}; shorten it"
            raise ApiError(400, message, code=code, param=self._field)
        if num_prompt + num_new > longest.num_tokens:
            message = self._too_long(longest, RequestLength(num_prompt, num_new, self._field))
            raise ApiError(400, message, code=code, param=self._field)

    async def _observed(self, pieces: AsyncIterator[ChoicePiece], visit: Visit) -> AsyncIterator[ChoicePiece]:
        """Yield *pieces*. Record their latencies in the metrics, and add up the token usage."""
        metrics, began_at = self._service.metrics, time.monotonic()
        last_at: dict[int, float] = {}
        with self._api_errors():
            async for item in pieces:
                now = time.monotonic()
                if item.index in last_at:
                    metrics.token_gap.observe(now - last_at[item.index])
                elif not last_at:
                    visit.has_begun = True
                    metrics.ttft.observe(now - began_at)
                last_at[item.index] = now
                if item.piece.completion is not None:
                    self._usage.add(item.index, item.piece.completion)
                yield item

    def _kept(
        self, pieces: AsyncIterator[ChoicePiece], prompts: Sequence[Prompt], keeper: PromptKeeper
    ) -> AsyncIterator[ChoicePiece]:
        """Return *pieces*, wrapped by *keeper* if the request asks to pin its prompts or prefixes of them."""
        asked = self._asked
        if prompts[0].breakpoints:  # of a chat, which has one prompt
            pieces = keeper.kept(pieces, prompts[0])
        if asked.kvtier.pin:
            firsts = {number * asked.n: prompt for number, prompt in enumerate(prompts)}
            pieces = keeper.pinned(pieces, firsts, asked.kvtier.ttl_s or PROMPT_PIN_S)
        return pieces

    @contextmanager
    def _api_errors(self) -> Iterator[None]:
        try:
            yield
        except InvalidParameter as error:
            raise ApiError(400, str(error), param=error.name, code="invalid_value") from None
        except ImagesBusy as error:
            raise ApiError(429, str(error), code="images_busy", headers=IMAGES_RETRY) from None
        except ValueError as error:
            raise ApiError(400, str(error), param=self._field, code="invalid_value") from None
        except RuntimeError as error:  # the engine ended during the request
            code = "shutting_down" if self._service.is_draining else "engine_failed"
            raise ApiError(503, "the server ended before the answer was complete; retry", code=code) from error

    async def _collect(self, pieces: AsyncIterator[ChoicePiece]) -> list[Answer]:
        answers = []
        async for item in pieces:
            if item.piece.completion is not None:
                answers.append(Answer(item.index, item.piece.completion))
        return sorted(answers, key=lambda answer: answer.index)

    async def _send_stream(
        self, pieces: AsyncIterator[ChoicePiece], reply: Reply, send: Send, tenant: str | None
    ) -> None:
        """Send *pieces* as server-sent events.

        The HTTP status is sent with the first piece, so that an earlier error still gets its own status.
        """
        begun: set[int] = set()
        try:
            async for item in pieces:
                if not begun:
                    left_out = left_out_headers(self._usage.left_out)
                    headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in left_out.items())]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                write = partial(_joined_events, reply, item.index, item.piece)
                events = write() if item.index in begun else await self._written(write, tenant)
                begun.add(item.index)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            last = b"".join(reply.last_events())
        except ApiError as error:
            if not begun:
                raise
            last = reply.error_event(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _written(self, write: Callable[[], _T], tenant: str | None) -> _T:
        """Return the result of *write*, which writes a part of the answer.

        If the answer contains the prompt or its log probabilities, *write* may be slow, so it runs in a tokenizer's
        thread.
        """
        if not self._asked.covers_prompt:
            return write()
        return await self._service.llm.with_tokenizer(lambda _: write(), tenant)

    def _tell(self, scope: Scope) -> None:
        usage = self._usage
        facts_of(scope).fields |= {
            "stream": self._asked.stream,
            "prompt_tokens": usage.prompts.num_tokens,
            **msgspec.structs.asdict(usage.by_tier()),
            "generated": usage.num_generated,
            "ttft_s": None if usage.ttft_s is None else round(usage.ttft_s, 4),
        }


def _joined_events(reply: Reply, index: int, piece: StreamChunk) -> bytes:
    return b"".join(reply.events(index, piece))


def tool_use(asked: Asked, form: ToolFormat) -> ToolUse:
    """Return whether and how the answer may call tools; raise `InvalidParameter` for an invalid schema or grammar."""
    if isinstance(asked, ChatRequest):
        return ToolUse(asked.tools, asked.tool_choice, asked.parallel_tool_calls, form, asked.structured)
    return ToolUse((), "none", False, form, asked.structured)


def _caller(scope: Scope) -> Caller:
    facts = facts_of(scope)
    return Caller(facts.request_id, facts.tenant, None if facts.trace is None else facts.trace.header)


async def complete(request: Request) -> Generation:
    """Answer `POST /v1/completions`."""
    service: Service = request.app.state.service
    service.check_open()
    content = json_object(await read_body(request, service.settings))
    asked = fit(content, CompletionRequest, COMPLETION_IGNORED, NEUTRAL)
    log_ignored_parameters(content, COMPLETION_IGNORED)
    return Generation(service, *with_document(service, facts_of(request.scope).tenant, asked))


async def chat(request: Request) -> Generation:
    """Answer `POST /v1/chat/completions`."""
    service: Service = request.app.state.service
    service.check_open()
    content = json_object(await read_body(request, service.settings))
    asked = fit(content, ChatRequest, CHAT_IGNORED, CHAT_NEUTRAL)
    log_unknown_fields(unknown_fields(content.get("messages")))
    log_ignored_parameters(content, CHAT_IGNORED)
    return Generation(service, with_document_texts(service, facts_of(request.scope).tenant, asked))
