"""JsonBlock: reads calls in JSON, an object or a list of objects with a name and arguments."""

import re

import msgspec

from kvtier.server.tool_calls.call_syntax import Block, NotACall, ParsedCall
from kvtier.server.tool_calls.json_extent import JsonExtent, NotJson

_FIRST_KEY = re.compile(r'\[?\s*\{\s*(?:"(?P<key>\w*)(?P<ended>")?)?')  # optional parts, as the text may end anywhere
_ABSENT = msgspec.Raw()
_KEYS = ("name", "arguments", "parameters", "id", "type")


class _Written(msgspec.Struct):
    """A call in JSON. Families differ in the key of the arguments, and may add an id or a type."""

    name: str
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


class JsonBlock:
    """A `BlockReader` of a JSON object, or a list of them, with name and arguments."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._extent: JsonExtent | None = None

    def read(self, text: str) -> Block | None:
        if self._extent is None:
            self._start = skip_space(text, self._start)
            if self._start == len(text):
                return None
            self._extent = JsonExtent(self._start)
        try:
            end = self._extent.end_in(text)
        except NotJson:
            raise NotACall from None
        return None if end is None else Block(end, _calls(text[self._start : end]))


class BareBlock(JsonBlock):
    """A `BlockReader` of a JSON block without a marker. Only its keys distinguish it from an ordinary answer in JSON.

    The first key must be one that calls have, or else the text is not a call. So the first key of an ordinary answer
    shows that the answer need not be held back.
    """

    def read(self, text: str) -> Block | None:
        first = _FIRST_KEY.match(text, self._start)
        if first is not None and first["key"] is not None:
            fits = first["key"] in _KEYS if first["ended"] else any(key.startswith(first["key"]) for key in _KEYS)
            if not fits:
                raise NotACall
        return super().read(text)


def _calls(text: str) -> list[ParsedCall]:
    try:
        written = msgspec.json.decode(text, type=_Written | list[_Written])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise NotACall from None
    calls = [_call(each) for each in (written if isinstance(written, list) else [written])]
    if not calls:
        raise NotACall
    return calls


def _call(written: _Written) -> ParsedCall:
    raw = bytes(written.arguments) or bytes(written.parameters)
    if not raw:
        raise NotACall
    return ParsedCall(written.name, arguments_of(raw.decode()))


def arguments_of(text: str) -> str:
    """Return the JSON text of the arguments in *text*, which is a JSON object, or a JSON string with an object in it.

    Raises `NotACall` if *text* is neither.
    """
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return text.strip()


def skip_space(text: str, place: int) -> int:
    """Return the index of the first character from *place* on that is not white space; the length if there is none."""
    return len(text) - len(text[place:].lstrip())
