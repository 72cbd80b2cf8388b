"""PastCall: a call in the history of a chat, which the model made in an earlier answer."""

import hashlib
from typing import Any, Literal

import msgspec

from kvtier.engine.text.template_traits import TemplateTraits

_SHORT_ID = 9  # characters; Mistral's templates refuse others


class CalledFunction(msgspec.Struct, frozen=True):
    """Which function was called, and its arguments, a text of JSON."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class PastCall(msgspec.Struct, frozen=True):
    """A call that a client sends back as it came: fields that are unknown here are left out."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def for_template(self, traits: TemplateTraits) -> dict[str, Any]:
        """The call as the model's template wants it."""
        function = {"name": self.function.name, "arguments": self._arguments(traits)}
        return {"id": template_id(self.id, traits), "type": "function", "function": function}

    def _arguments(self, traits: TemplateTraits) -> object:
        given = self.function.arguments
        if traits.arguments_are_text:
            return (given or "{}") if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
        return given if isinstance(given, dict) else _as_object(given)


def _as_object(arguments: str | None) -> dict[str, Any]:
    """Return the arguments as the object that templates go through, also if they are none.

    A model may have written them, or `max_tokens` cut them off: what is there of them is the object's only value.
    """
    try:
        read = msgspec.json.decode(arguments or "null")
        if isinstance(read, str):  # JSON within JSON
            read = msgspec.json.decode(read)
    except (msgspec.DecodeError, RecursionError):
        read = arguments
    if read is None:
        return {}
    return read if isinstance(read, dict) else {"arguments": read}


def template_id(call_id: str, traits: TemplateTraits) -> str:
    """The id of a call as the template takes it, which is the same for the call and for what the tool answered."""
    fits = len(call_id) == _SHORT_ID and call_id.isalnum()
    if not traits.ids_are_short or fits:
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID]
