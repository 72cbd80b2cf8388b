"""Tools in Anthropic's format, and their conversion to OpenAI's format."""

from typing import Annotated, Any, TypeAlias

import msgspec

from kvtier.server.cache_control import CacheControl
from kvtier.server.tool_calls.tool import Function, FunctionName, NamedFunction, NamedTool, Tool
from kvtier.server.tool_calls.tool import ToolChoice as ChatToolChoice


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that the client runs.

    Unknown fields, such as *defer_loading*, *input_examples* and *allowed_callers*, are ignored and logged. All tools
    are always in the prompt.
    """

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type not in (None, "custom"):
            raise ValueError(
                f"type: {self.type} is a tool of Anthropic's own servers, which this server does not have; leave the "
                "tool out, or send one of your own with an input_schema"
            )
        if self.input_schema is None:
            raise ValueError("input_schema: is missing; give the JSON schema of the tool's input")

    def tool(self) -> Tool:
        """Return the tool in OpenAI's format."""
        return Tool(
            Function(self.name, self.description, self.input_schema, self.strict), cache_control=self.cache_control
        )


def unknown_fields(tools: object) -> set[str]:
    """Return the names of fields in a client's *tools* that kvtier does not know and therefore ignores."""
    if not isinstance(tools, list):
        return set()
    found = set[str]().union(*(tool.keys() for tool in tools if isinstance(tool, dict)))
    return found.difference(ClientTool.__struct_fields__)


class _Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A rule for whether the model uses tools, and which. By default, an answer may have several tool calls."""

    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice, frozen=True, tag="auto"):
    """The model may use a tool or not."""

    @property
    def in_chat(self) -> ChatToolChoice:
        """Equivalent `tool_choice` in OpenAI's format."""
        return "auto"


class AnyChoice(_Choice, frozen=True, tag="any"):
    """The model must use a tool."""

    @property
    def in_chat(self) -> ChatToolChoice:
        """Equivalent `tool_choice` in OpenAI's format."""
        return "required"


class NoneChoice(_Choice, frozen=True, tag="none"):
    """The model must not use a tool."""

    @property
    def in_chat(self) -> ChatToolChoice:
        """Equivalent `tool_choice` in OpenAI's format."""
        return "none"


class NamedChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    """The model must use the tool *name*."""

    name: Annotated[str, msgspec.Meta(min_length=1)]

    @property
    def in_chat(self) -> ChatToolChoice:
        """Equivalent `tool_choice` in OpenAI's format."""
        return NamedTool(NamedFunction(self.name))


ToolChoice: TypeAlias = AutoChoice | AnyChoice | NoneChoice | NamedChoice
