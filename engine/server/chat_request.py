"""`POST /v1/chat/completions`: a conversation to go on with, written down by the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.generation_request import GenerationRequest, LogprobCount, TokenCount
from kvtier.engine.text.chat_template import PART_SEPARATOR, NotOfTheTemplate, TemplateValue, chat_token_ids
from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.text.prompt_limit import PromptLimit

MOST_MESSAGES = 10_000  # templates take each in Python


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message; models here read text only."""

    text: str


class DocumentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A part of a message that is the text of one of `/v1/documents`."""

    document_id: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side said. An answer of this server's can be sent back as it came, with its empty fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | DocumentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None  # what is said about an answer; no part of it
    tool_calls: list[Any] | None = None  # refused unless there are none

    def __post_init__(self) -> None:
        if self.tool_calls:
            raise ValueError("tool_calls are not supported; leave them out")

    def for_template(self) -> dict[str, str]:
        """What templates know: developers, who came later, are their system."""
        parts = self.content or ""
        if not isinstance(parts, str):
            parts = PART_SEPARATOR.join(part.text for part in parts if isinstance(part, TextPart))
        written = {"role": "system" if self.role == "developer" else self.role, "content": parts}
        return written | ({} if self.name is None else {"name": self.name})

    @property
    def document_ids(self) -> list[str]:
        """Of the documents that stand in it."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        return [part.document_id for part in parts if isinstance(part, DocumentPart)]

    def with_texts(self, texts: Mapping[str, str]) -> "Message":
        """The message with the texts of its documents, by their ids."""
        if not self.document_ids or self.content is None or isinstance(self.content, str):
            return self
        parts = [TextPart(texts[part.document_id]) if isinstance(part, DocumentPart) else part for part in self.content]
        return msgspec.structs.replace(self, content=parts)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation. Without a limit the answer may be as long as there is room. Beyond OpenAI's:
    *chat_template_kwargs*, variables of the model's template such as `enable_thinking`."""

    messages: Annotated[list[Message], msgspec.Meta(max_length=MOST_MESSAGES)]
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages:
            raise ValueError("messages: there are none; send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")

    @property
    def num_top_logprobs(self) -> int | None:
        """None if none are wanted."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def num_prompts(self) -> int:
        """One conversation."""
        return 1

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, document: Sequence[int] = ()
    ) -> list[Sequence[int]]:
        """The conversation's token ids. ApiError 400 if there is no template, or if it does not take this one;
        TooManyTokens beyond the *limit*. No *document* comes before it."""
        assert not document, "documents stand in the messages"
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; use /v1/completions, or a model made for chats"
            raise ApiError(400, message, code="no_chat_template")
        messages = [message.for_template() for message in self.messages]
        try:
            return [chat_token_ids(tokenizer, messages, limit, self.chat_template_kwargs)]
        except TooManyTokens:
            raise
        except NotOfTheTemplate as error:
            raise ApiError(400, str(error), param="chat_template_kwargs", code="invalid_value") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # what filters raise
            message = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, message, param="messages", code="invalid_value") from None

    @property
    def document_ids(self) -> list[str]:
        """Of the documents that stand in the messages, in their order."""
        return [document_id for message in self.messages for document_id in message.document_ids]

    def with_texts(self, texts: Mapping[str, str]) -> "ChatRequest":
        """The conversation with the texts of its documents, by their ids. Before that it cannot be written down."""
        return msgspec.structs.replace(self, messages=[message.with_texts(texts) for message in self.messages])

    def max_new_tokens(self, room: int) -> int:
        """How many tokens to generate; *room* is what the longest request has left."""
        return self.max_completion_tokens or self.max_tokens or max(1, room)
