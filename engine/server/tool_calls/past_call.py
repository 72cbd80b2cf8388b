"""PastCall: a call in the history of a chat, which the model made in an earlier answer."""

import hashlib
from typing import Any, Literal

import msgspec

from kvtier.engine.text.template_traits import TemplateTraits

_SHORT_ID = 9  # characters; Mistral's templates refuse others


class CalledFunction(msgspec.Struct, frozen=True):
    """Which function was called, and its arguments, a text of JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


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
            return given if isinstance(given, str) else msgspec.json.encode(given).decode()
        if not isinstance(given, str):
            return given
        try:
            read = msgspec.json.decode(given or "{}")
        except (msgspec.DecodeError, RecursionError):  # a model wrote them: what it wrote stays as it is
            return given
        return read if isinstance(read, dict) else given


def template_id(call_id: str, traits: TemplateTraits) -> str:
    """The id of a call as the template takes it, which is the same for the call and for what the tool answered."""
    fits = len(call_id) == _SHORT_ID and call_id.isalnum()
    if not traits.ids_are_short or fits:
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID]
