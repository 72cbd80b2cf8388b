"""Structs of the answers of the Responses API. The OpenAPI document is generated from the same structs."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.server.answers import KvtierObject
from kvtier.server.usage import Usage

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


class AnswerText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text of an answer. *annotations* and *logprobs* are OpenAI's fields and always empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class AnswerMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of an answer."""

    id: str
    status: ItemStatus
    content: list[AnswerText]
    role: Literal["assistant"] = "assistant"


class AnswerCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of one of the request's functions. *arguments* is JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class AnswerCustomCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of one of the request's custom tools."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


AnswerItem: TypeAlias = AnswerMessage | AnswerCall | AnswerCustomCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were loaded from the cache.

    *cache_write_tokens* is OpenAI's count of tokens that a request asked to keep. It is always 0, because requests to
    the Responses API have no such parameter.
    """

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The number of tokens of the model's thoughts. It is always 0, because the server does not count them apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Return the counts of *usage* in the format of the Responses API."""
        counts = usage.openai()
        return cls(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(counts.prompt_tokens_details.cached_tokens),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=counts.total_tokens,
        )


class ResponseFailure(msgspec.Struct, frozen=True):
    """The error that ended a response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response.

    *tools* lists the tools that the model saw. *tool_choice*, *text* and other parameters are those of the request.
    *usage* and *kvtier* are present once the response has ended.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnswerItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    kvtier: KvtierObject | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct, frozen=True):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
