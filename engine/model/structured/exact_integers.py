"""ExactIntegers: grammar rules for a JSON schema with integers that llguidance would round.

llguidance reads the numbers of a schema as doubles, which are not exact beyond 2**53. So this module writes the
subschemas that contain larger integers as rules in Lark's notation, and llguidance compiles the remaining subschemas.
Every text that the rules allow is valid by the schema. The rules allow only members that the schema describes, although
the schema itself may allow others.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.engine.model.structured.schema_keywords import REMARKS, has_inexact, schemas_in

_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "minProperties"})
_OF_ARRAYS = frozenset({"type", "items", "prefixItems", "minItems", "maxItems"})
_OF_INTEGERS = frozenset({"type", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_BLANKS = r"/[ \n\r\t]{1,32}/"


def integer_range(low: int | None, high: int | None) -> str:
    """Return a regular expression for the integers from *low* to *high* inclusive, in JSON's form.

    None means no bound. There must be at least one integer within the bounds.
    """
    parts = []
    if low is None or low < 0:
        minimum = 1 if high is None or high >= 0 else -high
        parts += [f"-{part}" for part in _naturals(minimum, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _naturals(max(0, low or 0), high)
    return f"({'|'.join(parts)})"


def _naturals(low: int, high: int | None) -> Iterator[str]:
    """Yield regular expressions that together match the numbers from *low* to *high*; None means no bound."""
    num_digits = len(str(low))
    last = num_digits if high is None else len(str(high))
    for digits in range(num_digits, last + 1):
        first = str(low) if digits == num_digits else "1" + "0" * (digits - 1)
        end = str(high) if high is not None and digits == last else "9" * digits
        yield _same_length(first, end)
    if high is None:
        yield f"[1-9][0-9]{{{num_digits},}}"


def _same_length(low: str, high: str) -> str:
    """Return a regular expression for the numbers from *low* to *high*, which must have equally many digits."""
    if not low:
        return ""
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    num_left = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = [low[0] + _same_length(low[1:], "9" * num_left), high[0] + _same_length("0" * num_left, high[1:])]
    if last - first > 1:
        parts.insert(1, f"[{first + 1}-{last - 1}]" + (f"[0-9]{{{num_left}}}" if num_left else ""))
    return f"({'|'.join(parts)})"


class NotExact(ValueError):
    """An error for a schema with a large integer for which `ExactIntegers` cannot write a rule."""


class ExactIntegers:
    """Grammar rules for one JSON schema, in Lark's notation, which do not round large integers.

    The names of all rules begin with *prefix*. The rule called *prefix* matches the values valid by the whole schema.
    """

    def __init__(self, schema: Mapping[str, Any], options: Mapping[str, Any], prefix: str) -> None:
        """Translate a JSON *schema* into grammar rules in Lark's notation.

        *options* are llguidance's options for the subschemas that it compiles itself.

        Raises:
            NotExact: If the rules cannot express the schema.
        """
        self._root = schema
        self._options = options
        self._prefix = prefix
        self._rules: dict[str, str] = {}
        self._refs: dict[str, str] = {}  # rules of definitions
        self._rules[prefix] = ""
        self._rules[prefix] = self._written(schema)
        self._rules[f"{prefix}_s"] = f"{_BLANKS}?"

    @property
    def rules(self) -> list[str]:
        """Lines of a grammar, one for each rule."""
        return [f"{name}: {text}" for name, text in self._rules.items()]

    def _rule(self, text: str) -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules[name] = text
        return name

    def _written(self, schema: object) -> str:
        """Return an expression in Lark's notation that matches the values valid by *schema*."""
        if not isinstance(schema, dict) or not self._is_inexact(schema):
            return f"%json {json.dumps(self._self_contained(schema), ensure_ascii=False)}"
        keys = schema.keys() - REMARKS
        match schema:
            case {"anyOf": list(choices)} | {"oneOf": list(choices)} if len(keys) == 1:
                text = self._any_of([self._written(each) for each in choices])
            case {"$ref": str(ref)} if keys == {"$ref"}:
                text = self._definition(ref)
            case {"allOf": [only]} if keys == {"allOf"}:
                text = self._written(only)
            case {"const": value} if keys <= {"const", "type"}:
                text = self._any_of([_literal(value)])
            case {"enum": list(values)} if keys <= {"enum", "type"} and values:
                text = self._any_of([_literal(value) for value in values])
            case {"type": list(types)} if "const" not in keys and "enum" not in keys:
                text = self._any_of([self._written(_of_type(schema, kind)) for kind in types])
            case {"type": "integer"} if keys <= _OF_INTEGERS:
                text = self._rule(f"/{_integers(schema)}/")
            case {"type": "object"} if keys <= _OF_OBJECTS:
                text = self._object(schema)
            case {"type": "array"} if keys <= _OF_ARRAYS:
                text = self._array(schema)
            case _:
                raise NotExact
        return text

    def _is_inexact(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the schema, or one that it references, has an integer that would be rounded."""
        seen: set[str] = set()
        left: list[object] = [schema]
        while left:
            node = left.pop()
            for _, each in schemas_in(_without_definitions(node)):
                if has_inexact(each):
                    return True
                ref = each.get("$ref")
                if isinstance(ref, str) and ref not in seen:
                    seen.add(ref)
                    left.append(self._target(ref))
        return False

    def _target(self, ref: str) -> object:
        node: Any = self._root
        if ref != "#" and not ref.startswith("#/"):
            raise NotExact
        for key in filter(None, ref[1:].split("/")):
            node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node

    def _definition(self, ref: str) -> str:
        if ref not in self._refs:
            self._refs[ref] = name = self._rule("")
            self._rules[name] = self._written(_without_definitions(self._target(ref)))
        return self._refs[ref]

    def _self_contained(self, schema: object) -> dict[str, Any]:
        """Return a copy of the schema that llguidance can compile alone, with the definitions that it may reference."""
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"not": {}}
        if any(each.get("$ref") == "#" for _, each in schemas_in(schema)):
            raise NotExact
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**schema, **shared, "x-guidance": dict(self._options)}

    def _any_of(self, choices: list[str]) -> str:
        return self._rule(" | ".join(choices))

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return the name of a rule for JSON objects with the members that the schema describes, in its order."""
        members = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        for name in required:
            members.setdefault(name, schema.get("additionalProperties", True))
        if schema.get("minProperties", 0) > len(required):
            raise NotExact
        blanks = f"{self._prefix}_s"
        first, rest = f'{blanks} "}}"', f'{blanks} "}}"'  # what may follow the opening brace, and a member
        for name, value in reversed(members.items()):
            member = f'{blanks} {_literal(name)} {blanks} ":" {blanks} {self._rule(self._written(value))}'
            after = self._rule(rest)
            first_others, rest_others = ("", "") if name in required else (f" | {first}", f" | {rest}")
            first = f"( {member} {after}{first_others} )"
            rest = f'( {blanks} "," {member} {after}{rest_others} )'
            first, rest = self._rule(first), self._rule(rest)
        return self._rule(f'"{{" {first}')

    def _array(self, schema: Mapping[str, Any]) -> str:
        blanks = f"{self._prefix}_s"
        fixed = [self._rule(self._written(each)) for each in schema.get("prefixItems", [])]
        low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if (fixed and not low == len(fixed) == high) or isinstance(schema.get("items", {}), list):
            raise NotExact
        if fixed:
            inner = f' {blanks} "," {blanks} '.join(fixed)
            return self._rule(f'"[" {blanks} {inner} {blanks} "]"')
        item = self._rule(self._written(schema.get("items", True)))
        if high < max(1, low):
            raise NotExact
        limit = "" if high == math.inf else high - 1
        more = f'( {blanks} "," {blanks} {item} ){{{max(0, low - 1)},{limit}}}' if high > 1 else ""
        empty = ' | "[" ' + f'{blanks} "]"' if low == 0 else ""
        return self._rule(f'"[" {blanks} {item} {more} {blanks} "]"{empty}')


def _without_definitions(schema: object) -> object:
    if not isinstance(schema, dict):
        return schema
    return {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}


def _literal(value: object) -> str:
    """Return a string literal in Lark's notation that matches the value as compact JSON."""
    return json.dumps(json.dumps(value, ensure_ascii=False, separators=(",", ":")), ensure_ascii=False)


def _of_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a copy of the schema that allows only the type *kind*, without the keywords for other types."""
    about = {"integer": _OF_INTEGERS, "object": _OF_OBJECTS, "array": _OF_ARRAYS}
    others = frozenset().union(*(keys for name, keys in about.items() if name != kind)) - about.get(kind, frozenset())
    return {**{key: value for key, value in schema.items() if key not in others}, "type": kind}


def _integers(schema: Mapping[str, Any]) -> str:
    """Return a regular expression for the integers within the schema's bounds; raise `NotExact` if they allow none."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise NotExact
    return integer_range(low, high)
