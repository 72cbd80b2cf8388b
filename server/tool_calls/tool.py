"""Tool: a function that a model may ask to be called, as OpenAI's chats describe it, and which of them it has to."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvtier.engine.model.structured.schema_keywords import REMARKS
from kvtier.server.cache_control import CacheControl

MAX_TOOLS = 1024
FunctionName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tool is called, what it does, and the JSON schema of its arguments.

    With *strict* the arguments are held to the schema also where the model itself decides whether to call.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        kind = (self.parameters or {}).get("type")
        if kind not in (None, "object"):
            raise ValueError("parameters: arguments are an object; give a schema of that type")

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments; a function that says nothing takes none."""
        return NO_PARAMETERS if self.parameters is None else self.parameters

    @property
    def takes_arguments(self) -> bool:
        """Whether its schema names an argument, or allows for some that it does not name."""
        said = {key for key, value in (self.parameters or {}).items() if value not in (None, [], {})} - REMARKS
        return not said <= {"type", "additionalProperties"} or bool((self.parameters or {}).get("additionalProperties"))


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of a request. With *cache_control* the prompt is kept up to its end."""

    function: Function
    type: Literal["function"] = "function"
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool as templates know it: all keys that they may ask for, in one order, so that equal tools are equal
        text."""
        tool = self.function
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.schema}
        return {"type": "function", "function": function}


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of one tool, which the model has to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """ValueError for two tools of one name, and for a choice that the tools do not have."""
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"tools: there are two of the name {twice}; give each a name of its own")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice: there is no tool of that name among {', '.join(names) or 'none'}")
    if choice == "required" and not tools:
        raise ValueError("tool_choice: is required, and there are no tools; send some, or leave it out")
