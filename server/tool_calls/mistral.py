"""MistralBlock: parses calls after [TOOL_CALLS]: a JSON list or, from newer models, a name, [ARGS] and arguments."""

import re

from kvtier.server.tool_calls.call_syntax import Block, BlockReader, NotACall, ParsedCall
from kvtier.server.tool_calls.json_block import JsonBlock, arguments_of, skip_space
from kvtier.server.tool_calls.json_extent import JsonExtent, NotJson

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.-]+")
_ID = re.compile(r"\w*")
_MAX_NAME = 256  # characters


class MistralBlock:
    """A `BlockReader` of Mistral's two call formats: JSON, and a name with [ARGS]."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._form: BlockReader | None = None

    def read(self, text: str) -> Block | None:
        if self._form is None:
            self._start = skip_space(text, self._start)
            head = text[self._start : self._start + 1]
            if not head:
                return None
            self._form = JsonBlock(self._start) if head in "[{" else _NamedBlock(self._start)
        return self._form.read(text)


class _NamedBlock:
    """A parser of a call in the format of newer Mistral models: a name, an optional id, [ARGS] and arguments."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._name: str | None = None
        self._place = start  # of the arguments
        self._extent: JsonExtent | None = None

    def read(self, text: str) -> Block | None:
        if self._extent is None and not self._read_name(text):
            return None
        assert self._extent is not None, "set with the name"
        try:
            end = self._extent.end_in(text)
        except NotJson:
            raise NotACall from None
        if end is None:
            return None
        assert self._name is not None, "read before"
        return Block(end, [ParsedCall(self._name, arguments_of(text[self._place : end]))])

    def _read_name(self, text: str) -> bool:
        """Parse the name and the optional id. Return whether the arguments have begun to arrive."""
        name = _NAME.match(text, self._start)
        if name is None or len(name[0]) > _MAX_NAME:
            raise NotACall
        place, rest = name.end(), text[name.end() :]
        if rest.startswith(CALL_ID):
            found = _ID.match(text, place + len(CALL_ID))
            assert found is not None, "the pattern matches the empty text"
            place = found.end()
            rest = text[place:]
        if rest.startswith(ARGS):
            place += len(ARGS)
        elif any(mark.startswith(rest) for mark in (ARGS, CALL_ID)):  # an empty rest too: the name may continue
            return False
        place = skip_space(text, place)
        if place == len(text):
            return False
        self._name, self._place, self._extent = name[0], place, JsonExtent(place)
        return True
