"""ResponsesRequest: the body of `POST /v1/responses`, and its conversion to a `ChatRequest`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from kvtier.engine.text.chat_template import TemplateValue
from kvtier.server.chat_request import MAX_MESSAGES, ChatRequest
from kvtier.server.generation_request import KvtierOptions, Text, TokenCount
from kvtier.server.response_format import JsonObjectFormat, JsonSchemaFormat, NamedSchema, ResponseFormat, TextFormat
from kvtier.server.responses.items import Item, MessageItem, messages_of
from kvtier.server.responses.tools import KINDS, ClientTool, NamedTool, ToolChoice, chat_choice, named_tools
from kvtier.server.tool_calls.tool import MAX_TOOLS

# Parameters of OpenAI that do not affect the answer: any value is accepted and ignored.
IGNORED = frozenset(
    {
        "access_programs",
        "background_options",
        "client_metadata",
        "context_management",  # would shorten the conversation; kvtier always uses all of it
        "image",
        "include",
        "max_tool_calls",  # limits the calls of tools that the server runs; it runs none
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "truncation",  # would shorten the conversation
        "user",
    }
)
# Parameters that would change the answer, with the values that change nothing: any other value is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
}
MAX_METADATA = 16
_Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
_Value: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class JsonSchemaText(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """A format of the answer's text: JSON that follows a schema. *name* and *description* have no effect."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The object `text` of a request: the format of the answer's text. Unknown options are ignored."""

    format: TextFormat | JsonObjectFormat | JsonSchemaText = TextFormat()

    @property
    def in_chat(self) -> ResponseFormat | None:
        """Equivalent `response_format` of chats; None: any text."""
        match self.format:
            case JsonSchemaText(name, schema, description, strict):
                return JsonSchemaFormat(NamedSchema(name, schema, description, strict))
            case JsonObjectFormat():
                return self.format
        return None


class Reasoning(msgspec.Struct, frozen=True):
    """The object `reasoning` of a request. *effort* is a variable of the chat template. Other options are ignored."""

    effort: Text | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """The object `stream_options` of a request.

    *include_obfuscation* pads the events with text, to hide the lengths of tokens from eavesdroppers. Unlike in
    OpenAI's API, the default is false.
    """

    include_obfuscation: bool = False


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/responses`: a conversation to answer.

    With *previous_response_id*, the conversation of an earlier response precedes *input*. *instructions* are the system
    message, and are not stored. If *store* is true, the response and its conversation are stored.

    *cache_salt*, *chat_template_kwargs*, *kvtier*, *priority* and *seed* are not in OpenAI's API. They have the same
    meaning as in `/v1/chat/completions`.
    """

    model: str
    input: str | Annotated[list[Item], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Text | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=MAX_METADATA)] = {}
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    cache_salt: Text | None = None
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict)
    kvtier: KvtierOptions = KvtierOptions()
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None

    def __post_init__(self) -> None:
        if not messages_of(self.items):
            raise ValueError("input: it has no message; send one message or more")
        self.chat()  # runs the checks of ChatRequest

    @property
    def items(self) -> Sequence[Item]:
        """Items of the request. Input that is a string is a message of the user."""
        return [MessageItem("user", self.input)] if isinstance(self.input, str) else self.input

    @property
    def named_tools(self) -> Mapping[str, NamedTool]:
        """Tools of the request by the names under which the model sees them."""
        return named_tools(self.tools)

    def chat(self, earlier: Sequence[Item] = ()) -> ChatRequest:
        """Return the request as a request to `/v1/chat/completions`. The items of *earlier* responses come first."""
        return ChatRequest(
            model=self.model,
            messages=messages_of([*_system(self.instructions), *earlier, *self.items]),
            tools=[each.in_chat() for each in self.named_tools.values()],
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.in_chat,
            reasoning_effort=self.reasoning.effort,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            cache_salt=self.cache_salt,
            chat_template_kwargs=self.chat_template_kwargs,
            kvtier=self.kvtier,
            priority=self.priority,
            seed=self.seed,
        )


def _system(instructions: str | None) -> list[Item]:
    return [MessageItem("system", instructions)] if instructions else []


def normalized(content: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the JSON object of a request in the form of `ResponsesRequest`, and the kinds of tools that it left out.

    An item with a role but without a type is a message, as in OpenAI's API. Tools in items of the type
    `additional_tools` are added to the request's tools. The tools that a server would have to run, such as a search of
    the web, are left out.
    """
    fitted, left_out = dict(content), set[str]()
    items, tools = content.get("input"), content.get("tools")
    if isinstance(items, list):
        added = [tool for item in items if _adds_tools(item) for tool in item["tools"]]
        fitted["input"] = [_typed(item) for item in items if not _adds_tools(item)]
        tools = [*(tools or ()), *added] if added and isinstance(tools, list | None) else tools
    if isinstance(tools, list):
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
        left_out = {kind for kind in kinds if isinstance(kind, str)} - KINDS
        fitted["tools"] = [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in left_out]
    return fitted, left_out


def _adds_tools(item: Any) -> bool:
    is_addition = isinstance(item, dict) and item.get("type") == "additional_tools"
    return is_addition and isinstance(item.get("tools"), list)


def _typed(item: object) -> object:
    if isinstance(item, dict) and "role" in item and item.get("type") is None:
        return {**item, "type": "message"}
    return item
