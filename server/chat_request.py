"""ChatRequest: the body of `POST /v1/chat/completions`, and its conversion to a prompt with the chat template."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import (
    PART_SEPARATOR,
    TEMPLATE_ERRORS,
    LostContent,
    ReservedVariable,
    TemplateValue,
    chat_text,
)
from kvtier.engine.text.min_tokens import PromptLimit, TooManyTokens
from kvtier.engine.text.prefixed_text import PrefixedText
from kvtier.engine.text.template_traits import PLAIN, TemplateTraits
from kvtier.server.cache_control import CacheControl, check_breakpoints
from kvtier.server.documents.kept_prefixes import Breakpoint
from kvtier.server.generation_request import IGNORED, NEUTRAL, GenerationRequest, LogprobCount, Text, TokenCount
from kvtier.server.prompt import Prompt
from kvtier.server.tool_calls.past_call import PastCall, template_id
from kvtier.server.tool_calls.tool import MAX_TOOLS, Function, Tool, ToolChoice, check_tools
from kvtier.web.api_error import ApiError

CHAT_IGNORED = IGNORED - {"parallel_tool_calls"}
CHAT_NEUTRAL = NEUTRAL | {
    "add_special_tokens": (False,),  # the chat template writes the special tokens
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
}
MAX_MESSAGES = 10_000  # a limit on time, because the template renders each message in Python
# A marker that is inserted into a message to find a place in the rendered prompt. If a client's message contained this
# text, a kept prefix would only become shorter.
_HERE = "\ue000kvtier\ue001"  # with private-use characters


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str
    cache_control: CacheControl | None = None


class RefusalPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A part of an earlier answer in which the model refused to help. It is treated as text."""

    refusal: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return self.refusal


class DocumentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A part of a message that stands for a document stored with `/v1/kvtier/documents`."""

    document_id: str
    cache_control: CacheControl | None = None


class ImageUrl(msgspec.Struct, frozen=True):
    """The location of an image: a data URL (`data:image/png;base64,…`), or an https URL if the server allows its host.

    *detail* is ignored: the model's own image processor determines the size.
    """

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """A part of a message that is an image, for models that see images."""

    image_url: ImageUrl
    cache_control: CacheControl | None = None


Part: TypeAlias = TextPart | RefusalPart | DocumentPart | ImagePart


class Message(msgspec.Struct, frozen=True):
    """A message of a chat. A client may send back the answer of any OpenAI-compatible server unchanged.

    Unknown fields are ignored and logged. *reasoning_content*, *reasoning* and *thinking* are the names that different
    servers use for the model's thoughts before its answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    cache_control: CacheControl | None = None  # overrides that of the message's last part
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None  # remarks about an answer; ignored
    tool_calls: list[PastCall] | None = None
    reasoning_content: Any = None  # a text; anything else is ignored
    reasoning: Any = None
    thinking: Any = None

    def for_template(self, traits: TemplateTraits = PLAIN) -> dict[str, Any]:
        """Return the message as input for a chat template with these *traits*.

        The role `developer` becomes `system`, because many templates do not know `developer`.
        """
        role = "system" if self.role == "developer" else self.role
        written: dict[str, Any] = {"role": role, "content": self._content(role, traits)}
        if thoughts := self.thoughts:
            written |= {"reasoning_content": thoughts, "thinking": thoughts}  # a template reads one of them, or neither
        if self.tool_calls:
            written["tool_calls"] = [call.for_template(traits) for call in self.tool_calls]
        if self.tool_call_id is not None:
            written["tool_call_id"] = template_id(self.tool_call_id, traits)
        return written | ({} if self.name is None else {"name": self.name})

    def _content(self, role: str, traits: TemplateTraits) -> object:
        """Return the content as the template expects it. With images, it is a list of texts and images."""
        written: list[dict[str, str]] = []
        for part in self.parts:
            match part:
                case TextPart() | RefusalPart():
                    written.append({"type": "text", "text": part.text})
                case ImagePart():
                    written.append({"type": "image"})
        if self.image_urls:
            return written
        return traits.content(role, PART_SEPARATOR.join(part["text"] for part in written))

    def answering(self, names: Mapping[str, str]) -> "Message":
        """Add the tool's name to a message with the role `tool`. *names* maps ids of calls to names of tools."""
        name = names.get(self.tool_call_id or "")
        return msgspec.structs.replace(self, name=name) if self.role == "tool" and self.name is None and name else self

    @property
    def parts(self) -> Sequence[Part]:
        """Parts of the message. Content that is a string is one part, and a refusal is another part."""
        said = [TextPart(self.content)] if isinstance(self.content, str) else self.content or []
        return [*(part for part in said if part != TextPart("")), TextPart(self.refusal)] if self.refusal else said

    @property
    def thoughts(self) -> str:
        """Thoughts of the model before this answer, or an empty string if the message has none."""
        told = (self.reasoning_content, self.reasoning, self.thinking) if self.role == "assistant" else ()
        return next((text for text in told if isinstance(text, str) and text), "")

    @property
    def image_urls(self) -> list[str]:
        """URLs of the images in the message."""
        return [part.image_url.url for part in self.parts if isinstance(part, ImagePart)]

    @property
    def document_ids(self) -> list[str]:
        """Ids of the documents in the message."""
        return [part.document_id for part in self.parts if isinstance(part, DocumentPart)]

    def cache_controls(self) -> Iterator[tuple[int | None, CacheControl]]:
        """Yield each cache control of the message, with the index of a part of the message.

        The cache control applies to the end of this part, or if the index is None, to the end of the tool calls.
        """
        *others, last = [part.cache_control for part in self.parts] or [None]
        own = None if self.tool_calls else self.cache_control
        for number, control in enumerate([*others, own or last]):
            if control is not None:
                yield number, control
        if self.tool_calls and self.cache_control is not None:
            yield None, self.cache_control

    def marked(self, number: int) -> "Message":
        """Return a copy of the message with the marker `_HERE` at the end of its part *number*, a text or an image.

        When the copy is rendered, the marker shows where this part ends in the prompt.
        """
        parts: list[Part] = []
        for place, part in enumerate(self.parts or [TextPart("")]):
            match part:
                case TextPart() | RefusalPart() if place == number:
                    parts.append(TextPart(part.text + _HERE))
                case ImagePart() if place == number:
                    parts += [part, TextPart(_HERE)]
                case _:
                    parts.append(part)
        return msgspec.structs.replace(self, content=parts, refusal=None)

    def with_texts(self, texts: Mapping[str, str]) -> "Message":
        """Return a copy of the message with each document replaced by its text. *texts* maps document ids to texts."""
        if not self.document_ids or self.content is None or isinstance(self.content, str):
            return self
        parts = [
            TextPart(texts[part.document_id], part.cache_control) if isinstance(part, DocumentPart) else part
            for part in self.content
        ]
        return msgspec.structs.replace(self, content=parts)


def cache_controls(tools: Sequence[Tool], messages: Sequence[Message]) -> list[CacheControl]:
    """Return all cache controls of a request in the order of the prompt: first those of tools, then of messages."""
    of_tools = [tool.cache_control for tool in tools if tool.cache_control is not None]
    return of_tools + [control for message in messages for _, control in message.cache_controls()]


def without_later_system(messages: Sequence[Message]) -> list[Message]:
    """Return *messages* with each system message after the first message made a part of a user message.

    Many chat templates take a system message only at the beginning. A later one is appended to the message before it.
    If that message is the assistant's or a tool's, a user message with the text takes its place.
    """
    joined = [*messages[:1]]
    follows_system = False
    for message in messages[1:]:
        is_system = message.role in ("system", "developer")
        takes_text = joined[-1].role in ("user", "system", "developer")
        if takes_text and (is_system or (follows_system and message.role == "user" == joined[-1].role)):
            joined[-1] = msgspec.structs.replace(joined[-1], content=[*joined[-1].parts, *message.parts], refusal=None)
        else:
            joined.append(msgspec.structs.replace(message, role="user") if is_system else message)
        follows_system = is_system
    return joined


def unknown_fields(messages: object) -> set[str]:
    """Return the names of fields in a client's *messages* that kvtier does not know and therefore ignores."""
    if not isinstance(messages, list):
        return set()
    found = set[str]().union(*(message.keys() for message in messages if isinstance(message, dict)))
    return found.difference(Message.__struct_fields__)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue. Without *max_tokens*, the answer may be as long as the context length allows.

    The following parameters are not in OpenAI's API. *chat_template_kwargs* sets variables of the model's chat
    template, such as `enable_thinking`. If *continue_final_message* is true, the answer continues the last message,
    which must be the assistant's. If *add_generation_prompt* is false, the prompt ends with the last message.

    *reasoning_effort* is a variable of the chat template. The template gets the *tools* even if *tool_choice* is none,
    so that all prompts of one conversation share a prefix.
    """

    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
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
            raise ValueError(
                "continue_final_message: the last message is not the assistant's; leave this parameter out"
            )
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise ValueError("messages: the last message calls tools and cannot be continued; append the results")
        check_tools(self.tools, self.tool_choice)
        check_breakpoints(cache_controls(self.tools, self.messages))
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: requires logprobs; set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give only one of them")

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens to return at each position, or None if no log probabilities are requested."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def num_prompts(self) -> int:
        """Number of prompts, which is 1 for a chat."""
        return 1

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit, document: Sequence[int] = ()
    ) -> list[Prompt]:
        """Return the conversation's prompt, in a list of length 1.

        *document* must be empty, because a chat has its documents in its messages.

        Raises:
            ApiError: With status 400, if the model has no chat template, or if the template rejects the request.
            TooManyTokens: If the prompt exceeds *limit*.
        """
        assert not document, "documents are parts of the messages"
        if tokenizer.chat_template is None:
            message = "the model's tokenizer has no chat template; use /v1/completions, or a model made for chats"
            raise ApiError(400, message, code="no_chat_template")
        traits = TemplateTraits.of(tokenizer, has_tools=bool(self.tools))
        if self.tools and not traits.writes_tools:
            message = (
                "the model's chat template does not support tools; leave them out, or serve a model that supports them"
            )
            raise ApiError(400, message, param="tools", code="no_tools")
        try:
            text = PrefixedText(tokenizer, self._text(tokenizer, traits, self.messages, self.tools), limit)
            return [Prompt(text.token_ids, sorted(self._breakpoints(tokenizer, traits, text), key=_place))]
        except TooManyTokens:
            raise
        except ReservedVariable as error:
            raise ApiError(400, str(error), param="chat_template_kwargs", code="invalid_value") from None
        except TEMPLATE_ERRORS as error:
            message = f"the model's chat template rejects these messages: {error}"
            raise ApiError(400, message, param="messages", code="invalid_value") from None

    def _text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        traits: TemplateTraits,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        is_asked: bool = True,
    ) -> str:
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        if not traits.takes_later_system:
            messages = without_later_system(messages)
        written = [message.answering(names).for_template(traits) for message in messages]

        def write(messages: Sequence[Mapping[str, Any]]) -> str:
            return chat_text(
                tokenizer,
                messages,
                self._variables,
                tools=[tool.for_template() for tool in tools],
                is_continued=is_asked and self.continue_final_message,
                is_asked=is_asked and self.add_generation_prompt,
            )

        try:
            text = write(written)
        except TEMPLATE_ERRORS:
            if not any(message.thoughts for message in messages):
                raise
            # Some templates reject thoughts in certain messages, so try again without thoughts.
            text = write([_without_thoughts(message) for message in written])
        _check_kept(messages, traits, text)
        return text

    def _breakpoints(
        self, tokenizer: PreTrainedTokenizerBase, traits: TemplateTraits, text: PrefixedText
    ) -> Iterator[Breakpoint]:
        """Yield a breakpoint at the end of each tool and each part of a message that has a `cache_control`.

        *text* is the rendered prompt. To find a breakpoint in it, the conversation is rendered again, either with the
        marker `_HERE` at the breakpoint or without the messages after it. The beginning that both renderings have in
        common ends at the breakpoint, or earlier if the chat template rewrites the conversation.
        """
        write = partial(self._text, tokenizer, traits)
        for place, tool in enumerate(self.tools):
            if tool.cache_control is not None:
                other = Tool(Function(_HERE))
                yield from _marked(text, write(self.messages, [*self.tools[: place + 1], other]), tool.cache_control)
        for place, message in enumerate(self.messages):
            for number, control in message.cache_controls():
                before, after = self.messages[:place], self.messages[place + 1 :]
                if number is None:
                    up_to_here = write([*before, message], self.tools, is_asked=False)
                    yield Breakpoint(text.num_common_tokens(up_to_here), control.ttl_s)
                else:
                    marked = [*before, message.marked(number), *after]
                    yield from _marked(text, write(marked, self.tools), control)

    @property
    def image_urls(self) -> list[str]:
        """URLs of the images in the messages, in order of appearance."""
        return [url for message in self.messages for url in message.image_urls]

    @property
    def document_ids(self) -> list[str]:
        """Ids of the documents in the messages, in order of appearance."""
        return [document_id for message in self.messages for document_id in message.document_ids]

    def with_texts(self, texts: Mapping[str, str]) -> "ChatRequest":
        """Return a copy of the request with each document replaced by its text. *texts* maps document ids to texts.

        Call this before `prompts`, which leaves out documents that are not replaced.
        """
        return msgspec.structs.replace(self, messages=[message.with_texts(texts) for message in self.messages])

    @property
    def _variables(self) -> dict[str, TemplateValue]:
        """Variables that the template gets in addition to the messages and the tools."""
        told = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return told | self.chat_template_kwargs

    def max_new_tokens(self, room: int) -> int:
        """Return the maximum number of tokens to generate; *room* is the context length minus the prompt's length."""
        return self.max_completion_tokens or self.max_tokens or max(1, room)


def _without_thoughts(written: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key not in ("reasoning_content", "thinking")}


def _check_kept(messages: Sequence[Message], traits: TemplateTraits, text: str) -> None:
    """Raise LostContent if *text*, the prompt, lacks the last user message.

    This is only checked for chat templates that are known to drop users' text.
    """
    if "user" not in traits.lost_roles:
        return
    said = next((message for message in reversed(messages) if message.role == "user"), None)
    if said is not None and any(part.text.strip() not in text for part in said.parts if isinstance(part, TextPart)):
        raise LostContent("it drops the user's text; use /v1/completions, or a tokenizer with another template")


def _marked(text: PrefixedText, marked: str, control: CacheControl) -> Iterator[Breakpoint]:
    """Yield a breakpoint at the marker `_HERE` in *marked*, the prompt rendered with this marker.

    *text* is the prompt rendered without it. If the chat template has dropped the marker, there is no breakpoint.
    """
    before, mark, _ = marked.partition(_HERE)
    if mark:
        yield Breakpoint(text.num_common_tokens(before), control.ttl_s)


def _place(breakpoint: Breakpoint) -> int:
    return breakpoint.num_tokens
