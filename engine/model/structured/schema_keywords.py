"""Detection and removal of JSON schema keywords that llguidance cannot enforce."""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

MAX_EXACT = 1 << 53  # llguidance computes with doubles, which represent all integers up to this one
_IN_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_MAY_BE_NULL = frozenset({"const", "default"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
REMARKS = frozenset(
    {"$defs", "definitions", "$schema", "$id", "$comment", "id", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "discriminator", "x-guidance"}
)  # keywords that do not constrain a value
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")  # in the order in which they are dropped


def schemas_in(schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema and all its subschemas, each with its path.

    The path of the schema itself is empty. Other paths end in a dot, for example `properties.name.`.
    """
    left = [("", schema)]
    while left:
        path, node = left.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        inner: list[tuple[str, object]] = []
        for key, value in node.items():
            if key in _IN_OBJECTS and isinstance(value, dict):
                inner += [(f"{path}{key}.{name}.", each) for name, each in value.items()]
            elif key in _IN_LISTS and isinstance(value, list):
                inner += [(f"{path}{key}[{number}].", each) for number, each in enumerate(value)]
            elif key in _ALONE:
                inner.append((f"{path}{key}.", value))
        left += reversed(inner)


def drop_nulls(schema: object) -> None:
    """Remove keywords whose value is null. Clients write null for keywords that they do not set."""
    for _, node in schemas_in(schema):
        for key in [key for key, value in node.items() if value is None and key not in _MAY_BE_NULL]:
            del node[key]


def has_inexact(node: dict[str, Any]) -> bool:
    """Return whether a keyword of this schema, not of a subschema, has a number that llguidance may round."""
    return any(_inexact_keywords(node))


def drop_inexact(schema: object) -> Iterator[str]:
    """Remove keywords with numbers that llguidance may round. Yield the paths of these keywords."""
    for path, node in schemas_in(schema):
        for key in list(_inexact_keywords(node)):
            given = node.pop(key)
            if key in ("const", "enum") and all(isinstance(each, int) for each in _values(given)):
                node.setdefault("type", "integer")
            yield path + key


def _inexact_keywords(node: dict[str, Any]) -> Iterator[str]:
    bounds = () if node.get("type") == "number" else _BOUNDS  # the bounds of a number are doubles anyway
    return (key for key in (*bounds, "const", "enum") if _is_inexact(node.get(key)))


def drop_what_fails(schema: object, compiles: Callable[[dict[str, Any]], bool]) -> Iterator[str]:
    """Remove keywords that llguidance cannot compile, and yield their paths.

    Only numeric bounds, string keywords and property patterns are tested, each kind in a small schema of its own.
    *compiles* returns whether llguidance can compile a schema.
    """
    for path, node in schemas_in(schema):
        for kind, keywords in (("number", _BOUNDS), ("string", _OF_STRINGS)):
            yield from (path + key for key in _failing(kind, node, keywords, compiles) if _drop(node, key))
        if isinstance(patterns := node.get("patternProperties"), dict):
            for pattern in [each for each in patterns if not compiles({"type": "string", "pattern": each})]:
                del patterns[pattern]
                yield f"{path}patternProperties.{pattern}"


def warned_of(schema: object, warnings: Collection[str]) -> Iterator[str]:
    """Yield the paths of the keywords that llguidance ignores according to its *warnings*."""
    unknown = {
        key for text in warnings if text.startswith("Unimplemented keys") for key in re.findall(r'"([^"]*)"', text)
    }
    formats = {text.partition(": ")[2] for text in warnings if text.startswith("Unknown format")}
    if any(text.startswith("oneOf") for text in warnings):
        unknown.add("oneOf")
    for path, node in schemas_in(schema):
        yield from (path + key for key in node if key in unknown)
        if str(node.get("format")) in formats:
            yield path + "format"


def _failing(
    kind: str, node: dict[str, Any], keywords: Collection[str], compiles: Callable[[dict[str, Any]], bool]
) -> Iterator[str]:
    """Yield those *keywords* of *node* that must be removed so that the remaining ones compile."""
    given = {key: node[key] for key in keywords if key in node}
    for key in list(given):
        if not given or compiles({"type": kind, **given}):
            return
        if len(given) == 1 or not compiles({"type": kind, key: given[key]}):
            del given[key]
            yield key
    if given and not compiles({"type": kind, **given}):  # each compiles alone, but not all together
        yield from given


def _values(given: object) -> list[object]:
    return given if isinstance(given, list) else [given]


def _drop(node: dict[str, Any], key: str) -> bool:
    del node[key]
    return True


def _is_inexact(value: object) -> bool:
    """Return whether a JSON value contains a number beyond 2**53, which llguidance may round."""
    match value:
        case bool() | str() | None:
            return False
        case int() | float():
            return abs(value) > MAX_EXACT
        case list():
            return any(map(_is_inexact, value))
        case dict():
            return any(map(_is_inexact, value.values()))
    return False
