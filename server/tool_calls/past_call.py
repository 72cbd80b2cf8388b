"""PastCall: a tool call in the history of a chat, which the model made in an earlier answer."""

import hashlib
from typing import Any, Literal

import msgspec

from kvtier.engine.text.template_traits import TemplateTraits

_SHORT_ID = 9  # characters; Mistral's templates refuse other lengths


class CalledFunction(msgspec.Struct, frozen=True):
    """The name of the called function, and its arguments as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class PastCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer, which the client sends back in the history. Unknown fields are ignored."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def for_template(self, traits: TemplateTraits) -> dict[str, Any]:
        """Return the call in the format that the model's chat template expects."""
        function = {"name": self.function.name, "arguments": self._arguments(traits)}
        return {"id": template_id(self.id, traits), "type": "function", "function": function}

    def _arguments(self, traits: TemplateTraits) -> object:
        given = self.function.arguments
        if traits.arguments_are_text:
            return (given or "{}") if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
        return given if isinstance(given, dict) else _as_object(given)


def _as_object(arguments: str | None) -> dict[str, Any]:
    """Return the arguments as an object, as some chat templates require.

    Arguments that are not a JSON object, for example because they were cut off, become the value of a key "arguments".
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
    """Return a call's id in the format that the chat template accepts. The call and its result get the same id."""
    fits = len(call_id) == _SHORT_ID and call_id.isalnum()
    if not traits.ids_are_short or fits:
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID]
