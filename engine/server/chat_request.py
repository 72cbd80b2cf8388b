"""ChatRequest: the body of `POST /v1/chat/completions`, a conversation that the chat template makes a prompt of."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from kvtier.engine.documents.kept_prefixes import Breakpoint
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.cache_control import CacheControl, check_breakpoints
from kvtier.engine.server.generation_request import NEUTRAL, GenerationRequest, LogprobCount, Text, TokenCount
from kvtier.engine.server.prompt import Prompt
from kvtier.engine.text.chat_template import PART_SEPARATOR, NotOfTheTemplate, TemplateValue, chat_text
from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.text.prefixed_text import PrefixedText
from kvtier.engine.text.prompt_limit import PromptLimit

CHAT_NEUTRAL = NEUTRAL | {"echo": (False,)}
MOST_MESSAGES = 10_000  # a template handles each message in Python
_HERE = "\ue000kvtier\ue001"  # of characters for private use; what a text has before it only makes a prefix shorter


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str
    cache_control: CacheControl | None = None


class DocumentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A part of a message that stands for the text of a document of `/v1/documents`."""

    document_id: str
    cache_control: CacheControl | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """A part of a message that is an image, which no model here can read."""

    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        raise ValueError("image_url is not supported, as the models served here read text; send what the image says")


class Message(msgspec.Struct, frozen=True):
    """One message. A client may send an answer of this server, or of another, back as it came: what is unknown here is
    left out, see `unknown_fields`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | DocumentPart | ImagePart] | None = None
    cache_control: CacheControl | None = None  # of the message's last part, in the place of the part's own
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
        text = PART_SEPARATOR.join(part.text for part in self.parts if isinstance(part, TextPart))
        written = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return written | ({} if self.name is None else {"name": self.name})

    @property
    def parts(self) -> Sequence[TextPart | DocumentPart | ImagePart]:
        """The message's parts; a content that is a text is one part."""
        return [TextPart(self.content)] if isinstance(self.content, str) else self.content or []

    @property
    def document_ids(self) -> list[str]:
        """The ids of the documents in the message."""
        return [part.document_id for part in self.parts if isinstance(part, DocumentPart)]

    def cache_controls(self) -> Iterator[tuple[int, CacheControl]]:
        """The numbers of the parts up to which the prompt is to be kept, and how."""
        *others, last = [part.cache_control for part in self.parts] or [None]
        for number, control in enumerate([*others, self.cache_control or last]):
            if control is not None:
                yield number, control

    def marked(self, number: int) -> "Message":
        """A copy of the message with a mark behind its part *number*, which is a text."""
        parts = [
            TextPart(part.text + _HERE) if place == number and isinstance(part, TextPart) else part
            for place, part in enumerate(self.parts or [TextPart("")])
        ]
        return msgspec.structs.replace(self, content=parts)

    def with_texts(self, texts: Mapping[str, str]) -> "Message":
        """A copy of the message with the texts of its documents, which *texts* has by id."""
        if not self.document_ids or self.content is None or isinstance(self.content, str):
            return self
        parts = [
            TextPart(texts[part.document_id], part.cache_control) if isinstance(part, DocumentPart) else part
            for part in self.content
        ]
        return msgspec.structs.replace(self, content=parts)


def unknown_fields(messages: object) -> set[str]:
    """The fields of messages, as they came, that are not known here, and that the prompt therefore has nothing of."""
    if not isinstance(messages, list):
        return set()
    found = set[str]().union(*(message.keys() for message in messages if isinstance(message, dict)))
    return found.difference(Message.__struct_fields__)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue. Without a limit the answer may fill what the longest request has left.

    Beyond OpenAI's: *chat_template_kwargs*, variables of the model's template such as `enable_thinking`, and
    *continue_final_message*: the answer goes on where the last message, the assistant's, ends. What
    *reasoning_effort* says, the template is told too, by that name.
    """

    messages: Annotated[list[Message], msgspec.Meta(max_length=MOST_MESSAGES)]
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    continue_final_message: bool = False
    reasoning_effort: Text | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages:
            raise ValueError("messages: the list is empty; send one message or more")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's; leave it out")
        check_breakpoints([control for message in self.messages for _, control in message.cache_controls()])
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
    ) -> list[Prompt]:
        """The conversation's prompt, as a list of one. *document* has to be empty.

        ApiError 400 if the model has no template, or it does not take these messages; TooManyTokens beyond *limit*.
        """
        assert not document, "documents stand in the messages"
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; use /v1/completions, or a model made for chats"
            raise ApiError(400, message, code="no_chat_template")
        try:
            text = PrefixedText(tokenizer, self._text(tokenizer, self.messages), limit)
            return [Prompt(text.token_ids, list(self._breakpoints(tokenizer, text)))]
        except TooManyTokens:
            raise
        except NotOfTheTemplate as error:
            raise ApiError(400, str(error), param="chat_template_kwargs", code="invalid_value") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # what filters raise
            message = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, message, param="messages", code="invalid_value") from None

    def _text(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
        written = [message.for_template() for message in messages]
        return chat_text(tokenizer, written, self._variables, is_continued=self.continue_final_message)

    def _breakpoints(self, tokenizer: PreTrainedTokenizerBase, text: PrefixedText) -> Iterator[Breakpoint]:
        """Where the parts with a `cache_control` end in the prompt. The template is asked, which may write them anew:
        it writes the whole conversation with a mark there, and what comes before that is compared with *text*."""
        for place, message in enumerate(self.messages):
            for number, control in message.cache_controls():
                marked = [*self.messages[:place], message.marked(number), *self.messages[place + 1 :]]
                before, mark, _ = self._text(tokenizer, marked).partition(_HERE)
                if mark:  # else the template has left the part out
                    yield Breakpoint(text.num_tokens_shared(before), control.ttl_s)

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
