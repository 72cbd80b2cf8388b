"""PastCall: a tool call in the history of a chat, which the model made in an earlier answer."""

import hashlib
from typing import Any, Literal

import msgspec

from kvtier.engine.text.template_traits import TemplateTraits

_SHORT_ID = 9  # characters; Mistral's templates refuse other lengths


class CalledFunction(msgspec.Struct, frozen=True):
    """The name of the called function, and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class PastCall(msgspec.Struct, frozen=True):
    """A call that a client sends back unchanged. Unknown fields are ignored."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def for_template(self, traits: TemplateTraits) -> dict[str, Any]:
        """Return the call in the format of the model's template."""
        function = {"name": self.function.name, "arguments": self._arguments(traits)}
        return {"id": template_id(self.id, traits), "type": "function", "function": function}

    def _arguments(self, traits: TemplateTraits) -> object:
        given = self.function.arguments
        if traits.arguments_are_text:
            return (given or "{}") if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
        return given if isinstance(given, dict) else _as_object(given)


def _as_object(arguments: str | None) -> dict[str, Any]:
    """Return the arguments as a JSON object, because templates iterate over its items.

    If a model wrote other JSON, or if `max_tokens` cut the arguments off, they become the only value of the object.
    """
    try:
        read = msgspec.json.decode(arguments or "null")
        if isinstance(read, str):  # JSON text within JSON
            read = msgspec.json.decode(read)
    except (msgspec.DecodeError, RecursionError):
        read = arguments
    if read is None:
        return {}
    return read if isinstance(read, dict) else {"arguments": read}


def template_id(call_id: str, traits: TemplateTraits) -> str:
    """Return a call's id in the format that the template accepts. The result of the call gets the same id."""
    fits = len(call_id) == _SHORT_ID and call_id.isalnum()
    if not traits.ids_are_short or fits:
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID]
