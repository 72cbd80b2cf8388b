"""Tool: a function that a model may call, in the format of OpenAI's chat API, and the request's `tool_choice`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvtier.engine.model.structured.schema_keywords import REMARKS
from kvtier.server.cache_control import CacheControl

MAX_TOOLS = 1024
FunctionName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name and the description of a tool, and the JSON schema of its arguments.

    With *strict*, a grammar enforces the schema of the arguments even if `tool_choice` is "auto".
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        kind = (self.parameters or {}).get("type")
        if kind not in (None, "object"):
            raise ValueError("parameters: this is not the schema of an object; set its type to object")

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments; a function without *parameters* takes none."""
        return NO_PARAMETERS if self.parameters is None else self.parameters

    @property
    def takes_arguments(self) -> bool:
        """True if the schema allows at least one argument."""
        said = {key for key, value in (self.parameters or {}).items() if value not in (None, [], {})} - REMARKS
        return not said <= {"type", "additionalProperties"} or bool((self.parameters or {}).get("additionalProperties"))


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of a request. With *cache_control*, the cache keeps the part of the prompt that ends with this tool."""

    function: Function
    type: Literal["function"] = "function"
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the format that chat templates expect.

        The result has all keys that a template may use, in a fixed order, so that equal tools become equal text.
        """
        tool = self.function
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.schema}
        return {"type": "function", "function": function}


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function in a `tool_choice`."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A `tool_choice` that names the one tool that the model must call."""

    function: NamedFunction


class AllowedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that an `AllowedTools` object lists."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedToolList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that the model may call. In the mode `required`, the model must call at least one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that allows only some of the request's tools.

    All tools stay in the prompt, so that a change of the allowed tools does not change the prompt.
    """

    allowed_tools: AllowedToolList

    @property
    def names(self) -> set[str]:
        """Names of the allowed tools."""
        return {tool.function.name for tool in self.allowed_tools.tools}


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def chosen_names(choice: ToolChoice) -> set[str] | None:
    """Return the names of the tools to which *choice* restricts the model, or None if it restricts nothing."""
    match choice:
        case NamedTool(function):
            return {function.name}
        case AllowedTools():
            return choice.names
    return None


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raise ValueError if two tools have the same name, or if *choice* needs a tool that is not in *tools*."""
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"tools: two tools have the name {twice}; give each tool a unique name")
    chosen = set() if choice is None else chosen_names(choice) or set()
    if unknown := sorted(chosen.difference(names)):
        there = ", ".join(names) or "none"
        raise ValueError(f"tool_choice: the request has no tool named {unknown[0]}; its tools: {there}")
    if choice == "required" and not tools:
        raise ValueError(
            "tool_choice is 'required', but the request has no tools; send tools, or leave tool_choice out"
        )
