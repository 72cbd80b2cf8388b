"""MessagesRequest: the body of `POST /v1/messages`, and its conversion to a `ChatRequest`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec

from kvtier.engine.text.chat_template import PART_SEPARATOR, TemplateValue
from kvtier.server.anthropic.blocks import (
    Block,
    Blocks,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    parts_of,
)
from kvtier.server.anthropic.tools import AutoChoice, ClientTool, ToolChoice
from kvtier.server.cache_control import CacheControl
from kvtier.server.chat_request import MAX_MESSAGES, ChatRequest, Message
from kvtier.server.generation_request import MAX_STOPS, KvtierOptions, Text
from kvtier.server.response_format import JsonSchemaFormat, NamedSchema
from kvtier.server.tool_calls.tool import MAX_TOOLS

# Parameters of Anthropic that do not affect the answer: any value is accepted and ignored.
IGNORED = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "context_management",  # would shorten the conversation; kvtier always uses all of it
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "thinking",  # depends on the chat template; set its variables with chat_template_kwargs
        "user_profile_id",
        "workspace_id",
    }
)
# Parameters that would change the answer, with the values that change nothing: any other value is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}


# Claude Code begins its system prompt with a line that differs from session to session and is not for the model.
HEADER = "x-anthropic-billing-header:"


class JsonOutput(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """An answer in JSON that follows a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """Options of the answer. *effort* works like OpenAI's `reasoning_effort`. Unknown options are ignored."""

    effort: Text | None = None
    format: JsonOutput | None = None


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages/count_tokens`: a conversation.

    *cache_control* applies to the end of the last message. *cache_salt* and *chat_template_kwargs* are not in
    Anthropic's API. They have the same meaning as in `/v1/chat/completions`.
    """

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice = AutoChoice()
    cache_control: CacheControl | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonOutput | None = None  # the predecessor of *output_config*
    cache_salt: Text | None = None
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        Conversation.chat(self)  # runs the checks of ChatRequest

    @property
    def continues_answer(self) -> bool:
        """True if the last message is the beginning of the answer, which the model continues."""
        return self.messages[-1].role == "assistant"

    def written(self) -> list[Message]:
        """Return the conversation as chat messages.

        As in Anthropic's API, consecutive messages of one role become one message.
        """
        messages = list(self._joined())
        if self.cache_control is not None:
            messages[-1] = msgspec.structs.replace(messages[-1], cache_control=self.cache_control)
        return messages

    def chat(self) -> ChatRequest:
        """Return the conversation as a request to `/v1/chat/completions`."""
        asked = self.output_config.format or self.output_format
        return ChatRequest(
            model=self.model,
            messages=self.written(),
            tools=[tool.tool() for tool in self.tools],
            tool_choice=self.tool_choice.in_chat,
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            continue_final_message=self.continues_answer,
            response_format=None if asked is None else JsonSchemaFormat(NamedSchema("answer", asked.schema)),
            reasoning_effort=self.output_config.effort,
            cache_salt=self.cache_salt,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _joined(self) -> Iterator[Message]:
        blocks = without_header([TextBlock(self.system)] if isinstance(self.system, str) else self.system or [])
        if blocks:
            yield Message("system", [part for block in blocks for part in block.parts()])
        for role, messages in groupby(self.messages, lambda message: message.role):
            said: list[Block] = [block for message in messages for block in blocks_of(message.content)]
            yield from _answer(said) if role == "assistant" else _question(role, said)


def without_header(blocks: Sequence[TextBlock]) -> Sequence[TextBlock]:
    """Return the *blocks* of a system prompt without a first line that begins with `HEADER`.

    The line would make the prompts of two sessions differ from the start, so that they could not share cached blocks.
    """
    if not blocks or not blocks[0].text.startswith(HEADER):
        return blocks
    first, *others = blocks
    _, _, text = first.text.partition("\n")
    return [msgspec.structs.replace(first, text=text), *others] if text else others


def _answer(blocks: Sequence[Block]) -> Iterator[Message]:
    """Yield the assistant's message.

    Of all cache controls in its tool calls, only the last is used. It applies to the end of the last tool call.
    """
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    controls = [use.cache_control for use in uses if use.cache_control is not None]
    calls = [use.call() for use in uses] or None
    thoughts = PART_SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    control = controls[-1] if controls else None
    yield Message("assistant", [*parts_of(blocks)], control, tool_calls=calls, reasoning_content=thoughts)


def _question(role: Literal["user", "system"], blocks: Sequence[Block]) -> Iterator[Message]:
    """Yield one message for each tool result among *blocks*, then one message with the other blocks, if any."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        yield result.message()
    if len(results) < len(blocks):
        yield Message(role, [*parts_of(blocks)])


class MessagesRequest(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages`: a conversation to answer.

    If *max_tokens* is 0, the prompt is computed and cached, and the answer is empty. *kvtier*, *priority* and *seed*
    are not in Anthropic's API. They have the same meaning as in `/v1/chat/completions`.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stop_sequences: Annotated[list[Text], msgspec.Meta(max_length=MAX_STOPS)] = []
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    kvtier: KvtierOptions = KvtierOptions()

    @property
    def is_warmup(self) -> bool:
        """True if the request only computes and caches its prompt, without an answer."""
        return self.max_tokens == 0

    def chat(self) -> ChatRequest:
        """Return the request as a request to `/v1/chat/completions`, where *max_tokens* is at least 1."""
        return msgspec.structs.replace(
            super().chat(),
            max_tokens=max(1, self.max_tokens),
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            priority=self.priority,
            kvtier=self.kvtier,
        )
