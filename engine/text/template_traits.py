"""TemplateTraits: what a chat template makes of tools and calls, found by having it write some."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import TEMPLATE_ERRORS, chat_text

PROBE = "kvtier_probe"  # the name of a tool that nobody has
_VALUE = "kvtier_value"
_ARGUMENTS = {_VALUE: 7}
_IS_JSON = re.compile(rf'"{_VALUE}"\s*:\s*7')  # neither Python's notation of a dict, nor JSON within JSON
_USER = {"role": "user", "content": "?"}
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
    """How to tell a template of tools. The defaults are those of most templates."""

    writes_tools: bool = True
    arguments_are_text: bool = False  # it writes those of past calls as they are; else it makes JSON of an object
    ids_are_short: bool = False  # it refuses ids of calls that do not have nine characters
    call: str | None = None  # a call of PROBE as it writes one; None: it writes none

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Those of the tokenizer's template, which is asked a few times, in about a millisecond."""
        if tokenizer.chat_template is None:
            return cls(writes_tools=False)
        writes_tools = PROBE in (_written(tokenizer, [_USER], [_TOOL]) or "")
        for call_id, arguments in product((_LONG_ID, _SHORT_ID), (_ARGUMENTS, '{"kvtier_value": 7}')):
            call = _call(tokenizer, call_id, arguments)
            if call is not None and _IS_JSON.search(call):
                return cls(writes_tools, isinstance(arguments, str), call_id == _SHORT_ID, call)
        return cls(writes_tools, call=_call(tokenizer, _LONG_ID, _ARGUMENTS))


PLAIN = TemplateTraits()


def _call(tokenizer: PreTrainedTokenizerBase, call_id: str, arguments: object) -> str | None:
    """What the template writes of an answer that is a call; None if it refuses it, or leaves it out."""
    function = {"name": PROBE, "arguments": arguments}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    before, whole = _written(tokenizer, [_USER], [_TOOL]), _written(tokenizer, [_USER, answer], [_TOOL])
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
