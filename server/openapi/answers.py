"""What the server answers with, as structs: for the schema, which has fields that are not listed here let pass."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.tiers.naming.tier import Reason


class Error(msgspec.Struct):
    """What went wrong. Programs read *code*; *param* is the field of the request that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Any error, but for those of Anthropic's API."""

    error: Error


class AnthropicError(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct):
    """Any error of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class CachedTokens(msgspec.Struct):
    """How many of the prompt's tokens were not computed."""

    cached_tokens: int


class UsageObject(msgspec.Struct):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenSources(msgspec.Struct):
    """The prompts' tokens by the tier that had them; they add up to the prompts."""

    device: int
    host: int
    disk: int
    recomputed: int


class KvtierObject(msgspec.Struct):
    """Where the prompts' tokens came from, and why some were computed."""

    tokens: TokenSources
    reasons: dict[Reason, int]
    ttft_s: float | None
    pinned: bool | UnsetType = UNSET
    cache_creation: dict[str, int] | UnsetType = UNSET
    left_out: list[str] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """What the model thinks of one token at one place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of the tokens, with those of the likeliest; null for the first token of an echo."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct):
    """The continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    kvtier: KvtierObject


class ChatTokenLogprob(msgspec.Struct):
    """A token with its log probability; *bytes* are null where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(ChatTokenLogprob):
    """The same, with the likeliest tokens at its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of an answer's tokens."""

    content: list[ChatLogprob] | None


class ChatMessage(msgspec.Struct):
    """The assistant's answer."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(msgspec.Struct):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    kvtier: KvtierObject
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class MessageAnswer(msgspec.Struct):
    """Anthropic's answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]
    kvtier: KvtierObject


class CountedTokens(msgspec.Struct):
    """How many tokens a conversation has."""

    input_tokens: int


class Tokenized(msgspec.Struct):
    """A prompt's token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class ModelObject(msgspec.Struct):
    """The model, or an adapter of it, whose *parent* it is."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | None


class ModelList(msgspec.Struct):
    """What a request may name as its model."""

    object: Literal["list"]
    data: list[ModelObject]


class DocumentPin(msgspec.Struct):
    """How long a document stays in host memory."""

    expires_at: float
    ttl_s: float
    is_held: bool


class DocumentObject(msgspec.Struct):
    """A document without its text. One whose file is damaged has only the first fields and *file*."""

    id: str | None
    object: Literal["document"]
    status: str
    error: str | None
    file: str | UnsetType | None = UNSET
    created: int | UnsetType = UNSET
    form: str | UnsetType = msgspec.field(name="as", default=UNSET)
    model: str | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    prefilled_tokens: int | UnsetType = UNSET
    tokens: dict[str, int] | UnsetType = UNSET
    bytes: dict[str, int] | UnsetType = UNSET
    load_s: float | UnsetType | None = UNSET
    compute_s: float | UnsetType | None = UNSET
    is_warming: bool | UnsetType = UNSET
    pin: DocumentPin | UnsetType | None = UNSET


class DocumentList(msgspec.Struct):
    """A tenant's documents."""

    object: Literal["list"]
    data: list[DocumentObject]
    survive_restarts: bool


class DocumentDeleted(msgspec.Struct):
    """A document that is gone."""

    id: str
    object: Literal["document.deleted"]
    deleted: bool


class ExplanationObject(msgspec.Struct):
    """Why a prompt was found or not, a row for each run of tokens with one answer."""

    object: Literal["kvtier.explanation"]
    id: str | None
    arrived_at: float | None
    prompt_tokens: int
    block_size: int
    rows: list[dict[str, Any]]
    departure: dict[str, Any] | None
    notes: list[str]


class Explanations(msgspec.Struct):
    """One explanation for each choice of the request."""

    object: Literal["list"]
    data: list[ExplanationObject]


class Standing(msgspec.Struct):
    """How the server is; *stage* while it loads."""

    status: str
    stage: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """The version of kvtier."""

    version: str


class HistoryStretch(msgspec.Struct):
    """What the dashboard shows: a value for each step of each column."""

    step_s: float
    start: float
    rows: int
    columns: dict[str, list[float | None]]


class VerbAnswer(msgspec.Struct):
    """What an operator's verb has done, in names and numbers."""

    verb: str
