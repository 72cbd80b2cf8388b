"""TemplateTraits: how a chat template expects messages, tools and tool calls, found by rendering test conversations."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import TEMPLATE_ERRORS, chat_text

PROBE = "kvtier_probe"  # name of a tool that does not exist
_VALUE = "kvtier_value"
_ARGUMENTS = {_VALUE: 7}
_IS_JSON = re.compile(rf'"{_VALUE}"\s*:\s*7')  # matches neither the repr of a Python dict nor JSON within JSON
_MARKER = "kvtiermarker"  # a text that no template writes of its own accord
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "Takes a number.",
        "parameters": {
            "type": "object",
            "properties": {_VALUE: {"type": "integer", "description": "A number."}},
            "required": [_VALUE],
        },
    },
}
_LONG_ID, _SHORT_ID = "call_0123456789abcdef", "a0b1c2d3e"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form in which a chat template expects messages, tools and tool calls. The defaults fit most templates."""

    writes_tools: bool = True  # whether the template renders tools
    arguments_are_text: bool = False  # whether arguments of past calls must be JSON text; otherwise they are an object
    ids_are_short: bool = False  # whether the ids of calls must have nine characters
    call: str | None = None  # a call of PROBE as the template renders it; None if it renders no calls
    roles_of_parts: frozenset[str] = frozenset()  # roles whose text is rendered only if it is in a list of parts
    lost_roles: frozenset[str] = frozenset()  # roles whose text is left out of the prompt in either form
    takes_later_system: bool = True  # whether a system message may come after a user message

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, has_tools: bool = True) -> Self:
        """Return the traits of the tokenizer's template for requests with tools, or for those without.

        The first call renders the template about ten times, which takes a few milliseconds. Later calls reuse the
        result.
        """
        if tokenizer.chat_template is None:
            return cls(writes_tools=False)
        known = _known.setdefault(tokenizer, {})
        key = (str(tokenizer.chat_template), has_tools)
        if key not in known:
            known[key] = cls._probed(tokenizer, has_tools)
        return known[key]  # type: ignore[return-value]  # there are no subclasses

    @classmethod
    def _probed(cls, tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> Self:
        of_parts, lost = _content_forms(tokenizer, [_TOOL] if has_tools else [])
        user = {"role": "user", "content": _content("?", is_parts="user" in of_parts)}
        writes_tools = PROBE in (_written(tokenizer, [user], [_TOOL]) or "")
        text = _content("", is_parts="assistant" in of_parts)
        later = [user, {"role": "system", "content": _content(_MARKER, is_parts="system" in of_parts)}]
        answer = {"role": "assistant", "content": _content("!", is_parts="assistant" in of_parts)}
        takes_later_system = all(_is_written(tokenizer, each, []) for each in (later, [*later, answer, user]))
        for call_id, arguments in product((_LONG_ID, _SHORT_ID), (_ARGUMENTS, '{"kvtier_value": 7}')):
            call = _call(tokenizer, user, text, call_id, arguments)
            if call is not None and _IS_JSON.search(call):
                is_text, is_short = isinstance(arguments, str), call_id == _SHORT_ID
                return cls(writes_tools, is_text, is_short, call, of_parts, lost, takes_later_system)
        call = _call(tokenizer, user, text, _LONG_ID, _ARGUMENTS)
        return cls(
            writes_tools,
            call=call,
            roles_of_parts=of_parts,
            lost_roles=lost,
            takes_later_system=takes_later_system,
        )

    def content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """Return *text* in the form that the template expects as the content of messages of *role*."""
        return _content(text, is_parts=role in self.roles_of_parts)


PLAIN = TemplateTraits()
_known: "WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, bool], TemplateTraits]]" = WeakKeyDictionary()


def _content(text: str, *, is_parts: bool) -> str | list[dict[str, str]]:
    return [{"type": "text", "text": text}] if is_parts else text


def _content_forms(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the roles whose text the template renders only from a list of parts, and those whose text it leaves out.

    To find out, a marker text is rendered in a message of each role, as a string and as a list of parts. A role that
    the template rejects is in neither set, because requests with that role fail anyway.
    """
    of_parts: set[str] = set()
    lost: set[str] = set()
    for role in ("user", "system", "assistant", "tool") if tools else ("user", "system", "assistant"):
        as_text, as_parts = (
            _is_written(tokenizer, _conversation(role, _content(_MARKER, is_parts=is_parts), of_parts), tools)
            for is_parts in (False, True)
        )
        if as_parts and not as_text:
            of_parts.add(role)
        elif as_text is False:
            lost.add(role)
    return frozenset(of_parts), frozenset(lost)


def _conversation(role: str, content: object, of_parts: Collection[str]) -> list[Mapping[str, Any]]:
    """Return a conversation with *content* in a message of *role*, in an order of roles that most templates accept.

    The other messages have a list of parts as content if their role is in *of_parts*, otherwise a string.
    """
    message = {"role": role, "content": content}
    user = {"role": "user", "content": _content("?", is_parts="user" in of_parts)}
    if role == "user":
        return [message]
    if role == "system":
        return [message, user]
    if role == "assistant":
        return [user, message, user]
    answer = _calling(_content("", is_parts="assistant" in of_parts), _SHORT_ID, _ARGUMENTS)
    return [user, answer, {**message, "name": PROBE, "tool_call_id": _SHORT_ID}]


def _is_written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> bool | None:
    """Return whether the template writes the text `_MARKER` of a message; None if it rejects the messages."""
    written = _written(tokenizer, messages, tools)
    return None if written is None else _MARKER in written


def _calling(content: object, call_id: str, arguments: object) -> dict[str, Any]:
    """Return an assistant message that calls the tool `PROBE`."""
    call = {"id": call_id, "type": "function", "function": {"name": PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _call(
    tokenizer: PreTrainedTokenizerBase, user: Mapping[str, Any], content: object, call_id: str, arguments: object
) -> str | None:
    """Return a tool call as the template renders it; None if the template rejects or leaves out the call."""
    before = _written(tokenizer, [user], [_TOOL])
    whole = _written(tokenizer, [user, _calling(content, call_id, arguments)], [_TOOL])
    if before is None or whole is None:
        return None
    num_common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    return whole[num_common:] if PROBE in whole[num_common:] else None


def _written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    is_asked = messages[-1]["role"] == "user"
    try:
        return chat_text(tokenizer, messages, tools=tools, is_asked=is_asked)
    except TEMPLATE_ERRORS:
        return None
