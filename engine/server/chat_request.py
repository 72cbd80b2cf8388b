"""ChatRequest: the body of `POST /v1/chat/completions`, a conversation that the chat template makes a prompt of."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.generation_request import GenerationRequest, LogprobCount, Text, TokenCount
from kvtier.engine.text.chat_template import PART_SEPARATOR, NotOfTheTemplate, TemplateValue, chat_token_ids
from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.text.prompt_limit import PromptLimit

MOST_MESSAGES = 10_000  # a template handles each message in Python


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str


class DocumentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A part of a message that stands for the text of a document of `/v1/documents`."""

    document_id: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """A part of a message that is an image, which no model here can read."""

    def __post_init__(self) -> None:
        raise ValueError("image_url is not supported, as the models served here read text; send what the image says")


class Message(msgspec.Struct, frozen=True):
    """One message. A client may send an answer of this server, or of another, back as it came: what is unknown here is
    left out, see `unknown_fields`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | DocumentPart | ImagePart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None  # remarks about an answer; ignored
    tool_calls: list[Any] | None = None  # refused unless the list is empty

    def __post_init__(self) -> None:
        if self.tool_calls:
            raise ValueError("tool_calls are not supported; leave them out")

    def for_template(self) -> dict[str, str]:
        """The message as templates know it: the role developer, which is younger than they are, becomes system."""
        parts = self.content or ""
        if not isinstance(parts, str):
            parts = PART_SEPARATOR.join(part.text for part in parts if isinstance(part, TextPart))
        written = {"role": "system" if self.role == "developer" else self.role, "content": parts}
        return written | ({} if self.name is None else {"name": self.name})

    @property
    def document_ids(self) -> list[str]:
        """The ids of the documents in the message."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        return [part.document_id for part in parts if isinstance(part, DocumentPart)]

    def with_texts(self, texts: Mapping[str, str]) -> "Message":
        """A copy of the message with the texts of its documents, which *texts* has by id."""
        if not self.document_ids or self.content is None or isinstance(self.content, str):
            return self
        parts = [TextPart(texts[part.document_id]) if isinstance(part, DocumentPart) else part for part in self.content]
        return msgspec.structs.replace(self, content=parts)


def unknown_fields(messages: object) -> set[str]:
    """The fields of messages, as they came, that are not known here, and that the prompt therefore has nothing of."""
    if not isinstance(messages, list):
        return set()
    found = set[str]().union(*(message.keys() for message in messages if isinstance(message, dict)))
    return found.difference(Message.__struct_fields__)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue. Without a limit the answer may fill what the longest request has left.

    Beyond OpenAI's: *chat_template_kwargs*, variables of the model's template such as `enable_thinking`. What
    *reasoning_effort* says, the template is told too, by that name.
    """

    messages: Annotated[list[Message], msgspec.Meta(max_length=MOST_MESSAGES)]
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    reasoning_effort: Text | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages:
            raise ValueError("messages: the list is empty; send one message or more")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell with each token; None: no log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def num_prompts(self) -> int:
        """A chat has one prompt."""
        return 1

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, document: Sequence[int] = ()
    ) -> list[Sequence[int]]:
        """The token ids of the conversation, as a list of one. *document* has to be empty.

        ApiError 400 if the model has no template, or it does not take these messages; TooManyTokens beyond *limit*.
        """
        assert not document, "documents stand in the messages"
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; use /v1/completions, or a model made for chats"
            raise ApiError(400, message, code="no_chat_template")
        messages = [message.for_template() for message in self.messages]
        try:
            return [chat_token_ids(tokenizer, messages, limit, self._variables)]
        except TooManyTokens:
            raise
        except NotOfTheTemplate as error:
            raise ApiError(400, str(error), param="chat_template_kwargs", code="invalid_value") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # what filters raise
            message = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, message, param="messages", code="invalid_value") from None

    @property
    def document_ids(self) -> list[str]:
        """The ids of the documents in the messages, in their order."""
        return [document_id for message in self.messages for document_id in message.document_ids]

    def with_texts(self, texts: Mapping[str, str]) -> "ChatRequest":
        """A copy with the texts of its documents, which *texts* has by id. Only the copy can be made a prompt of."""
        return msgspec.structs.replace(self, messages=[message.with_texts(texts) for message in self.messages])

    @property
    def _variables(self) -> dict[str, TemplateValue]:
        """What the template is told beside the messages."""
        told = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return told | self.chat_template_kwargs

    def max_new_tokens(self, room: int) -> int:
        """How many tokens to generate at most; *room* is what the longest request has left beside the prompt."""
        return self.max_completion_tokens or self.max_tokens or max(1, room)
