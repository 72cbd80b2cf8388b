"""CallGrammar: the grammar of answers that call tools, in the shape of a family, with arguments by their schemas."""

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
    """Writes grammars in Lark's notation, as llguidance has it. An answer has one call of one of the *functions* or, if
    it *is_parallel*, also several."""

    def __init__(
        self, shape: CallShape, functions: Sequence[Function], special: Mapping[str, int], *, is_parallel: bool
    ) -> None:
        """*special* are the ids of special tokens, which are no text to a grammar, by what the shape has for them."""
        self._shape = shape
        self._functions = functions
        self._special = special
        more = f"( {self._literal(shape.separator)} call )*" if is_parallel else ""
        # A model that goes on with a line feed may still end: it need not call once more.
        self._end = f"{more} {self._literal(shape.closing)}" + (f" ( {_TAIL} )?" if is_parallel else "")

    def forced(self) -> str:
        """The answer is calls."""
        return self._with_rules("start: calls")

    def or_json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """The answer is calls, or JSON that is valid by the *schema*."""
        return self._with_rules("start: calls | other", f"other: {_json(schema, 'response_format.', strict=strict)}")

    def free(self, trigger: str) -> str:
        """The answer is any text; where it has the *trigger*, with which the shape begins, calls follow to its end."""
        if trigger in self._special:
            begun = [f"begun: TEXT {self._literal(trigger)}"]
        else:
            begun = [f"begun[lazy]: TEXT {self._literal(trigger)}"]
        rest = self._shape.marker.removeprefix(trigger)
        first = " | ".join(self._call(i, rest) for i in range(len(self._functions)))
        start = f"start: TEXT | begun ( {first} ) {self._end}"
        return self._with_rules(start, f"TEXT: {_ANY_TEXT}", *begun)

    def free_but_json(self) -> str:
        """The answer is calls, or any text that does not begin with a bracket of JSON."""
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
    """The arguments, which are an object also where the schema does not say so; an empty one if it takes none."""
    if not function.takes_arguments:
        return json.dumps("{}")
    where = f"tools.{function.name}.parameters."
    return _json({**function.schema, "type": "object"}, where, strict=bool(function.strict))


def _json(schema: Mapping[str, Any], where: str, *, strict: bool) -> str:
    """JSON by a schema. Unless it is *strict*, keywords that no grammar can have are left out of it, and named with
    *where* it is."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options, '$comment': where}, ensure_ascii=False)}"
