"""Structs of the server's JSON answers. The OpenAPI document is generated from the same structs.

Some answers are also sent by other servers of kvtier, so their structs are elsewhere: errors in `web/api_error.py` and
`web/error_response.py`, the dashboard's history in `web/dashboard/routes.py`, and explanations in
`engine/observability/explain/explanation_object.py`. Statistics and answers to operators' requests are dicts, because
their fields vary.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.tiers.naming.tier import Reason


class CachedTokens(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were loaded from the cache instead of computed."""

    cached_tokens: int


class UsageObject(msgspec.Struct, frozen=True):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenSources(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were loaded from each tier or *recomputed*.

    The numbers add up to the length of the request's prompts.
    """

    device: int
    host: int
    disk: int
    remote: int
    recomputed: int


class KvtierObject(msgspec.Struct, frozen=True):
    """The use of the cache by a request: where its prompts' tokens came from, and why some tokens were computed.

    *ttft_s* is the time to first token. *pinned* is true if everything that the request asked to pin is pinned.
    *left_out* lists the keywords of the request's JSON schemas that are not enforced.
    """

    tokens: TokenSources
    reasons: dict[Reason, int]
    ttft_s: float | None
    pinned: bool | UnsetType = UNSET
    cache_creation: dict[str, int] | UnsetType = UNSET
    left_out: list[str] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """The log probability of one token at one position of a prompt, and its rank among all tokens."""

    logprob: float
    rank: int
    decoded_token: str


# One item per prompt token: an object with token ids as keys, or None for the first token, which has no probability.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of an answer's tokens, and of the likeliest tokens at each position.

    If the answer begins with the prompt (`echo`), both are null for the prompt's first token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """A continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True):
    """The answer of `/v1/completions`: the continuations of all prompts of a request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    kvtier: KvtierObject


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token with its log probability. *bytes* is null if the tokenizer does not know the token's bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(ChatTokenLogprob, frozen=True):
    """A token with its log probability, and the likeliest tokens at its position."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of the tokens of one choice. *refusal* is OpenAI's field and always null."""

    content: list[ChatLogprob]
    refusal: None


class ToolCallFunction(msgspec.Struct, frozen=True):
    """The name of a called function, and its *arguments* as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message. *refusal* is OpenAI's field and always null."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """A continuation of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`: all continuations of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    usage: UsageObject
    kvtier: KvtierObject


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts in Anthropic's format. The three counts of input tokens add up to the prompt's length.

    *cache_read_input_tokens* counts the tokens that were read from the cache. *cache_creation_input_tokens* counts the
    computed tokens that the cache now keeps because of a `cache_control`. *input_tokens* counts all others.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens: int


class MessageText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A block of text in Anthropic's answer."""

    text: str


class MessageToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of one of the request's tools in Anthropic's answer."""

    id: str
    name: str
    input: Any


MessageBlock: TypeAlias = MessageText | MessageToolUse


class MessageStart(msgspec.Struct, frozen=True):
    """The fields of `/v1/messages`' answer that a stream sends first."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageAnswer(MessageStart, frozen=True):
    """The whole answer of `/v1/messages`."""

    kvtier: KvtierObject


class InputTokens(msgspec.Struct, frozen=True):
    """The number of tokens of a conversation."""

    input_tokens: int


class Tokenized(msgspec.Struct, frozen=True):
    """The token ids of a prompt. *token_strs* is null unless the request asks for it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class ModelObject(msgspec.Struct, frozen=True):
    """The served model, or one of its adapters. The *parent* of an adapter is the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | None


class ModelList(msgspec.Struct, frozen=True):
    """The models that a request may name."""

    object: Literal["list"]
    data: list[ModelObject]


class DocumentPin(msgspec.Struct, frozen=True):
    """The pin that keeps a document in host memory. *is_held* is true once all of the document is in host memory."""

    expires_at: float
    ttl_s: float
    is_held: bool


class DocumentObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored document, without its text.

    If the document's file is damaged, only the fields id, object, status, error and file are present.
    """

    id: str | None
    object: Literal["document"]
    created: int | UnsetType = UNSET
    form: str | UnsetType = msgspec.field(name="as", default=UNSET)
    model: str | UnsetType = UNSET
    status: str
    error: str | None
    file: str | UnsetType | None = UNSET
    num_tokens: int | UnsetType = UNSET
    prefilled_tokens: int | UnsetType = UNSET
    tokens: Mapping[str, int] | UnsetType = UNSET
    bytes: Mapping[str, int] | UnsetType = UNSET
    load_s: float | UnsetType | None = UNSET
    compute_s: float | UnsetType | None = UNSET
    is_warming: bool | UnsetType = UNSET
    pin: DocumentPin | UnsetType | None = UNSET


class DocumentList(msgspec.Struct, frozen=True):
    """The documents of a tenant. *survive_restarts* is false if the documents are lost when the server stops."""

    object: Literal["list"]
    data: list[DocumentObject]
    survive_restarts: bool


class DocumentDeleted(msgspec.Struct, frozen=True):
    """A document that was deleted."""

    id: str
    object: Literal["document.deleted"]
    deleted: bool


class ServerStatus(msgspec.Struct, frozen=True):
    """The status of the server. While the model is loading, *stage* is the current step; later it is absent."""

    status: str
    stage: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    """The version of kvtier."""

    version: str
