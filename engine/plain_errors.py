"""Plain wording for msgspec's messages about values of a wrong type or range."""

import re

_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "null",
}
_COMPARED = {">=": "{} or more", ">": "more than {}", "<=": "{} or less", "<": "less than {}"}


def plain_error(what: str, *, table: str = "a table") -> str:
    """Return *what*, a message of msgspec such as "Expected `int` >= 1", as "must be a whole number, 1 or more".

    *table* is the word for an object with named values. Other messages are returned as they are.
    """
    if found := re.fullmatch(r"Expected `([a-z]+)` (>=|>|<=|<) (\S+)", what):
        return f"must be {_named(found[1], table)}, {_COMPARED[found[2]].format(found[3].removesuffix('.0'))}"
    if found := re.fullmatch(r"Expected `([a-z]+)` of length (>=|<=) (\d+)", what):
        return _length(found[1], found[2], int(found[3]))
    if found := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", what):
        return f"must be {_named(found[1], table)}, not {_named(found[2], table)}"
    return what


def _length(kind: str, relation: str, limit: int) -> str:
    unit = "characters" if kind == "str" else "items"
    if relation == ">=" and limit == 1:
        return "must not be empty"
    return f"must have at {'least' if relation == '>=' else 'most'} {limit:,} {unit}"


def _named(kinds: str, table: str) -> str:
    """Return words for *kinds*, types of msgspec such as "int | str". Null is left out if there is another type."""
    words = [table if kind == "object" else _NAMES.get(kind, kind) for kind in kinds.split(" | ")]
    others = [word for word in words if word != "null"] or words
    *front, last = dict.fromkeys(others)
    return f"{', '.join(front)} or {last}" if front else last
