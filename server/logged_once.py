"""`LoggedOnce`: a bounded memory of the names that clients sent and that the log has already."""

from collections.abc import Iterable

MAX_NAMES = 100  # because clients may make up any number of names


class LoggedOnce:
    """A memory of names, so that each name is logged once, and at most `MAX_NAMES` names in all."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def new(self, names: Iterable[str]) -> list[str]:
        """Return the *names* to log now, sorted, and remember them as logged."""
        new = sorted({*names} - self._names)[: MAX_NAMES - len(self._names)]
        self._names.update(new)
        return new

    def clear(self) -> None:
        """Forget all names, so that each may be logged again."""
        self._names.clear()
