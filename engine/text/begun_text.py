"""num_begun: how much of a text's end may be the beginning of something that has to be seen whole."""

from collections.abc import Sequence


def num_begun(text: str, wholes: Sequence[str]) -> int:
    """The length of the longest ending of *text* that one of the *wholes*, which are longer, begins with."""
    longest = max(map(len, wholes), default=1) - 1
    endings = (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in wholes))
    return next(endings, 0)
