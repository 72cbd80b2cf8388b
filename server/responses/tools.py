"""Tools of a request to the Responses API, and their conversion to the tools of `/v1/chat/completions`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvtier.server.tool_calls.tool import (
    MAX_TOOLS,
    AllowedTool,
    AllowedToolList,
    AllowedTools,
    Function,
    FunctionName,
    NamedFunction,
    Tool,
)
from kvtier.server.tool_calls.tool import NamedTool as ChosenTool
from kvtier.server.tool_calls.tool import ToolChoice as ChatToolChoice

CUSTOM_INPUT = "input"  # name of the only argument of a custom tool
_BETWEEN = "__"  # between the name of a namespace and the name of a tool in it


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function that the client runs. Unknown fields are ignored.

    With *strict*, a grammar enforces the schema of the arguments. Unlike in OpenAI's API, the default is false.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def tool(self, name: str) -> Tool:
        """Return the tool in the format of chats, with this *name*."""
        return Tool(Function(name, self.description, self.parameters, self.strict or None))


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tool of the client whose input is any text. Unknown fields are ignored.

    The model calls the tool like a function with one argument. A grammar in *format* is not enforced. The model reads
    the grammar as a part of the description.
    """

    name: FunctionName
    description: str | None = None
    format: dict[str, Any] | None = None

    def tool(self, name: str) -> Tool:
        """Return the tool in the format of chats, with this *name*."""
        definition = (self.format or {}).get("definition")
        about = [text for text in (self.description, definition) if isinstance(text, str) and text]
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return Tool(Function(name, "\n".join(about) or None, parameters))


class NamespaceTool(msgspec.Struct, frozen=True, tag_field="type", tag="namespace"):
    """A group of tools. The model sees the tool TOOL of the group GROUP under the name `GROUP__TOOL`."""

    name: FunctionName
    tools: Annotated[list[FunctionTool | CustomTool], msgspec.Meta(max_length=MAX_TOOLS)]


ClientTool: TypeAlias = FunctionTool | CustomTool | NamespaceTool
KINDS = frozenset({"function", "custom", "namespace"})  # all others are tools that the server would have to run


def full_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees the tool *name* of *namespace*."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool of a request, with the name of its namespace, if it has one."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """Name under which the model sees the tool."""
        return full_name(self.tool.name, self.namespace)

    def in_chat(self) -> Tool:
        """Return the tool in the format of chats."""
        return self.tool.tool(self.full_name)


def named_tools(tools: Sequence[ClientTool]) -> Mapping[str, NamedTool]:
    """Return all tools, also those in namespaces, by the names under which the model sees them.

    Raises:
        ValueError: Two tools have the same name.
    """
    named: dict[str, NamedTool] = {}
    for each in _flat(tools):
        if each.full_name in named:
            raise ValueError(f"tools: two tools have the name {each.full_name}; give each tool a unique name")
        named[each.full_name] = each
    return named


def _flat(tools: Sequence[ClientTool]) -> Iterator[NamedTool]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from (NamedTool(each, tool.name) for each in tool.tools)
        else:
            yield NamedTool(tool)


class FunctionChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A `tool_choice` that names the function that the model must call."""

    name: str
    namespace: str | None = None

    @property
    def function(self) -> NamedFunction:
        """The function's name in the format of chats."""
        return NamedFunction(full_name(self.name, self.namespace))


class CustomChoice(FunctionChoice, frozen=True, tag_field="type", tag="custom"):
    """A `tool_choice` that names the custom tool that the model must call."""


class AllowedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that limits the answer to some of the request's tools.

    The prompt has all tools, so that all prompts of a conversation share a prefix.
    """

    tools: Annotated[list[FunctionChoice | CustomChoice], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | AllowedChoice


def chat_choice(choice: ToolChoice) -> ChatToolChoice:
    """Return *choice* in the format of chats."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedChoice):
        return AllowedTools(AllowedToolList(choice.mode, [AllowedTool(each.function) for each in choice.tools]))
    return ChosenTool(choice.function)
