"""JsonExtent: where an object or a list of JSON ends in a text that grows."""

import re

_OUTSIDE = re.compile(r"[\s,:0-9a-zA-Z.+-]*")  # of strings and brackets
_INSIDE = re.compile(r'[^"\\]*')  # of a string, up to what means something
_OPENING, _CLOSING = "{[", "}]"


class NotJson(ValueError):
    """The text is sure to be no JSON."""


class JsonExtent:
    """Follows brackets and strings; each character is looked at once. Whether what is between them is JSON it does not
    say. Owned by whoever reads the text."""

    def __init__(self, start: int) -> None:
        """The object or the list begins at *start*."""
        self._place = start
        self._depth = 0
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Where it ends in *text*, which may only have grown since the last call; None if that is still to come.

        `NotJson` if it begins with no bracket, or has between strings what JSON has not.
        """
        while self._place < len(text):
            if self._in_string:
                self._skip_string(text)
            elif self._skip_mark(text):
                return self._place
        return None

    def _skip_string(self, text: str) -> None:
        place = _end(_INSIDE, text, self._place)
        if place < len(text) and text[place] == "\\":
            place += 2  # the one behind it means nothing, also if it is still to come
        elif place < len(text):
            self._in_string = False
            place += 1
        self._place = place

    def _skip_mark(self, text: str) -> bool:
        """Go behind the next bracket or quote; whether the first bracket is closed now."""
        place = _end(_OUTSIDE, text, self._place) if self._depth else self._place
        if place < len(text):
            mark = text[place]
            if mark in _OPENING:
                self._depth += 1
            elif self._depth and mark in _CLOSING:
                self._depth -= 1
            elif self._depth and mark == '"':
                self._in_string = True
            else:
                raise NotJson
            place += 1
            self._place = place
            return not self._depth
        self._place = place
        return False


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    assert found is not None, "it matches no character too"
    return found.end()
