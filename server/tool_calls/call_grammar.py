"""CallGrammar: builds grammars that force tool calls into a model family's format and arguments into their schemas."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier.engine.model.structured.notation import WHITESPACE
from kvtier.server.tool_calls.call_syntax import CallShape
from kvtier.server.tool_calls.tool import Function

_ANY_TEXT = r"/(.|\n)*/"
_TAIL = r"/[ \n]{1,4}/"


class CallGrammar:
    """A builder of grammars that constrain an answer, in llguidance's variant of Lark's notation.

    The grammars allow one call of one of the *functions*, or several calls if *is_parallel*.
    """

    def __init__(
        self, shape: CallShape, functions: Sequence[Function], special: Mapping[str, int], *, is_parallel: bool
    ) -> None:
        """Prepare the grammars, which refer to special tokens by id. *special* maps these tokens to their ids."""
        self._shape = shape
        self._functions = functions
        self._special = special
        more = f"( {self._literal(shape.separator)} call )*" if is_parallel else ""
        # After a line feed, a model may end without another call.
        self._end = f"{more} {self._literal(shape.closing)}" + (f" ( {_TAIL} )?" if is_parallel else "")

    def forced(self) -> str:
        """Return the grammar of an answer that consists of calls."""
        return self._with_rules("start: calls")

    def or_json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """Return the grammar of an answer that consists of calls, or of JSON that follows the *schema*."""
        return self._with_rules("start: calls | other", f"other: {_json(schema, 'response_format.', strict=strict)}")

    def free(self, trigger: str) -> str:
        """Return the grammar of an answer that consists of any text, or of any text and then calls.

        Once the answer contains *trigger*, a prefix of the text with which calls begin, a call must follow.
        """
        if trigger in self._special:
            begun = [f"begun: TEXT {self._literal(trigger)}"]
        else:
            begun = [f"begun[lazy]: TEXT {self._literal(trigger)}"]
        rest = self._shape.marker.removeprefix(trigger)
        first = " | ".join(self._call(i, rest) for i in range(len(self._functions)))
        start = f"start: TEXT | begun ( {first} ) {self._end}"
        return self._with_rules(start, f"TEXT: {_ANY_TEXT}", *begun)

    def free_except_json(self) -> str:
        """Return the grammar of an answer that consists of calls, or of text that does not begin with `{` or `[`."""
        return self._with_rules("start: calls | TEXT", r"TEXT: /[ \t\r\n]*([^ \t\r\n{\[](.|\n)*)?/")

    def _with_rules(self, *rules: str) -> str:
        call = " | ".join(self._call(i, self._shape.before) for i in range(len(self._functions)))
        schemas = [f"arguments_{i}: {_arguments(function)}" for i, function in enumerate(self._functions)]
        calls = f"calls: {self._literal(self._shape.opening)} call {self._end}"
        return "\n".join([*rules, calls, f"call: {call}", *schemas])

    def _call(self, number: int, before: str) -> str:
        head = f"{before}{self._functions[number].name}{self._shape.between}"
        return f"{self._literal(head)} arguments_{number} {self._literal(self._shape.after)}"

    def _literal(self, text: str) -> str:
        return " ".join(self._parts(text)) or '""'

    def _parts(self, text: str) -> Iterator[str]:
        pattern = "|".join(map(re.escape, self._special)) or "(?!)"
        for part in re.split(f"({pattern})", text):
            if part in self._special:
                yield f"<[{self._special[part]}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


def _arguments(function: Function) -> str:
    """Return the grammar rule for the JSON object with the function's arguments."""
    if not function.takes_arguments:
        return json.dumps("{}")
    where = f"tools.{function.name}.parameters."
    return _json({**function.schema, "type": "object"}, where, strict=bool(function.strict))


def _json(schema: Mapping[str, Any], where: str, *, strict: bool) -> str:
    """Return the grammar rule for JSON that follows *schema*.

    If *strict*, a schema keyword that a grammar cannot express is an error. Otherwise it is ignored, and reported to
    the client with *where*, the path of the schema in the request.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options, '$comment': where}, ensure_ascii=False)}"
