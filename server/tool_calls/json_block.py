"""JsonBlock: calls in JSON, an object or a list of them, with a name and arguments."""

import re

import msgspec

from kvtier.server.tool_calls.call_syntax import Block, Call, NotACall
from kvtier.server.tool_calls.json_extent import JsonExtent, NotJson

_FIRST_KEY = re.compile(r'\[?\s*\{\s*(?:"(?P<key>\w*)(?P<ended>")?)?')  # of a text that may end anywhere in it
_ABSENT = msgspec.Raw()
_KEYS = ("name", "arguments", "parameters", "id", "type")


class _Written(msgspec.Struct):
    """A call in JSON; families differ in the key of the arguments, and may have an id or a type beside it."""

    name: str
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


class JsonBlock:
    """A `BlockReader` of a JSON object, or a list of them, with name and arguments."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._extent: JsonExtent | None = None

    def read(self, text: str) -> Block | None:
        """The block, see `BlockReader`."""
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
    """One that no marker tells apart from an answer in JSON: its first key has to be one of a call's, or the answer
    would be held back for nothing."""

    def read(self, text: str) -> Block | None:
        """The block, see `BlockReader`."""
        first = _FIRST_KEY.match(text, self._start)
        if first is not None and first["key"] is not None:
            fits = first["key"] in _KEYS if first["ended"] else any(key.startswith(first["key"]) for key in _KEYS)
            if not fits:
                raise NotACall
        return super().read(text)


def _calls(text: str) -> list[Call]:
    try:
        written = msgspec.json.decode(text, type=_Written | list[_Written])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise NotACall from None
    calls = [_call(each) for each in (written if isinstance(written, list) else [written])]
    if not calls:
        raise NotACall
    return calls


def _call(written: _Written) -> Call:
    raw = bytes(written.arguments) or bytes(written.parameters)
    if not raw:
        raise NotACall
    return Call(written.name, arguments_of(raw.decode()))


def arguments_of(text: str) -> str:
    """The arguments that *text*, which is JSON, says: an object, or a text that is one. Else `NotACall`."""
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
    """The first place from *place* on that is no white space."""
    return len(text) - len(text[place:].lstrip())
