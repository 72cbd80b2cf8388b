"""JsonBlock: parses calls in JSON, which are an object with a name and arguments, or a list of such objects."""

import re

import msgspec

from kvtier.server.tool_calls.call_syntax import Block, NotACall, ParsedCall
from kvtier.server.tool_calls.json_extent import JsonExtent, NotJson

_FIRST_KEY = re.compile(r'\[?\s*\{\s*(?:"(?P<key>\w*)(?P<ended>")?)?')  # optional parts, as the text may end anywhere
_ABSENT = msgspec.Raw()
_KEYS = ("name", "arguments", "parameters", "id", "type")


class _Written(msgspec.Struct):
    """A tool call in JSON. Its arguments are in *arguments* or *parameters*. Other keys, such as "id", are ignored."""

    name: str
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


class JsonBlock:
    """A `BlockReader` of calls in JSON: an object with a name and arguments, or a list of such objects."""

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

    The first key must be one that a call may have, such as "name". So an ordinary answer in JSON is held back only
    until its first key has arrived.
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
    """Return the arguments as JSON text. *text* is a JSON object, or a JSON string that contains a JSON object.

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
    """Return the index of the first character at or after *place* that is not white space, or the text's length."""
    return len(text) - len(text[place:].lstrip())
