"""MessagesRequest: the body of `POST /v1/messages`, and the chat that it asks for."""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Literal

import msgspec

from kvtier.engine.server.anthropic.blocks import Blocks, TextBlock, parts_of
from kvtier.engine.server.cache_control import CacheControl, check_breakpoints
from kvtier.engine.server.chat_request import MOST_MESSAGES, ChatRequest, Message
from kvtier.engine.server.generation_request import KvtierOptions, Text
from kvtier.engine.text.chat_template import TemplateValue

# Anthropic's parameters that say nothing about the answer: any value is let pass …
IGNORED = frozenset({"diagnostics", "inference_geo", "metadata", "service_tier", "user_profile_id", "workspace_id"})
# … and those that would change it, with the values that ask for no change: any other value is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages/count_tokens`: a conversation. *cache_control* is of the last block.

    Beyond Anthropic's: *cache_salt*, *chat_template_kwargs*, as in OpenAI's chats.
    """

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = None
    cache_salt: Text | None = None
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_breakpoints([control for message in self.written() for _, control in message.cache_controls()])

    @property
    def is_begun(self) -> bool:
        """Whether the conversation ends with the beginning of the assistant's answer."""
        return self.messages[-1].role == "assistant"

    def written(self) -> list[Message]:
        """The messages of the chat. Those of one role in a row are one message, as Anthropic has it."""
        messages = list(self._joined())
        messages[-1] = msgspec.structs.replace(messages[-1], cache_control=self.cache_control)
        return messages

    def chat(self) -> ChatRequest:
        """The conversation as a chat, to be counted."""
        return ChatRequest(
            model=self.model,
            messages=self.written(),
            continue_final_message=self.is_begun,
            cache_salt=self.cache_salt,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _joined(self) -> Iterator[Message]:
        if self.system:
            blocks = [TextBlock(self.system)] if isinstance(self.system, str) else self.system
            yield Message("system", [part for block in blocks for part in block.parts()])
        for role, messages in groupby(self.messages, lambda message: message.role):
            yield Message(role, [part for message in messages for part in parts_of(message.content)])


class MessagesRequest(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer. With *max_tokens* 0 its prompt is computed and kept, and nothing is answered.

    Beyond Anthropic's: *kvtier*, *priority* and *seed*, as in OpenAI's chats.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stop_sequences: Annotated[list[Text], msgspec.Meta(max_length=16)] = []
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    kvtier: KvtierOptions = KvtierOptions()

    @property
    def only_warms(self) -> bool:
        """Whether nothing is to be answered."""
        return self.max_tokens == 0

    def chat(self) -> ChatRequest:
        """The chat that is to be answered. To be computed a prompt has to be continued, by a token at least."""
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
