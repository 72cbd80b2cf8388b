"""JsonExtent: finds the end of a JSON object or list in a growing text."""

import re

_OUTSIDE = re.compile(r"[\s,:0-9a-zA-Z.+-]*")  # characters outside of strings and brackets
_INSIDE = re.compile(r'[^"\\]*')  # characters of a string, up to a quote or backslash
_OPENING, _CLOSING = "{[", "}]"


class NotJson(ValueError):
    """Error for a text that is certainly not JSON."""


class JsonExtent:
    """A scanner that finds the end of a JSON object or list, and looks at each character once.

    It only follows brackets and strings, and does not check whether the text is valid JSON.
    """

    def __init__(self, start: int) -> None:
        """Create a scanner of the object or list that begins at index *start* of the text."""
        self._place = start
        self._depth = 0
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Return the index behind the end of the object or list, or None if *text* does not contain the end yet.

        Each *text* must begin with the *text* that was passed before. Raises `NotJson` if there is no opening bracket
        at the start, or if a character outside of strings is not allowed in JSON.
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
            place += 2  # skip the escaped character, even if it has not arrived yet
        elif place < len(text):
            self._in_string = False
            place += 1
        self._place = place

    def _skip_mark(self, text: str) -> bool:
        """Move past the next bracket or quote, and return whether it ends the whole object or list."""
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
    assert found is not None, "the pattern matches the empty text"
    return found.end()
