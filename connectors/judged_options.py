"""`JudgedOptions`: which options of an engine decide the bytes of its KV cache, which do not, and why."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class JudgedOptions:
    """A verdict on every option of one engine.

    An option *decides* bytes if two engines that differ in it alone may compute other keys and values for the same
    tokens, or lay them out in another way. The order in which sums are made does not count: it changes with every
    batch. A verdict on `group.*`, or on a group that decides as a whole, holds for all options of the group.
    """

    decides: Mapping[str, str]  # option: why. Its value is part of the namespace
    shown: Mapping[str, Sequence[str]]  # what else in the namespace has their values: options
    harmless: Mapping[str, Sequence[str]]  # why: options
    _judged: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an option with two verdicts."""
        groups = [*self.shown.values(), *self.harmless.values()]
        options = [*self.decides, *(option for group in groups for option in group)]
        if twice := sorted({option for option in options if options.count(option) > 1}):
            raise ValueError(f"options with two verdicts: {', '.join(twice)}")
        object.__setattr__(self, "_judged", frozenset(options))

    @property
    def judged(self) -> frozenset[str]:
        """All options and groups with a verdict."""
        return self._judged

    def unjudged(self, options: Iterable[str]) -> list[str]:
        """Return those of *options* on which there is no verdict, in their order."""
        return [option for option in options if not self._judged.intersection(_names_of(option))]

    def values(self, read: Callable[[str], object]) -> dict[str, str]:
        """Return the values of the options that decide bytes, as text.

        Args:
            read: Returns the value of an option; None for one that this version of the engine does not have.
        """
        return {option: _text_of(read(option)) for option in self.decides}


def read_attribute(root: object, path: str) -> object:
    """Return what stands at a dotted *path* below *root*; None if any part of it is not there."""
    found: object = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _names_of(option: str) -> list[str]:
    """Return the option's own name, and those of the groups that it belongs to."""
    parts = option.split(".")
    groups = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [option, *groups, *(f"{group}.*" for group in groups)]


def _text_of(value: object) -> str:
    """Return a text that is equal for equal values in all processes."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return _ADDRESS.sub("", text)


def _plain(value: object) -> object:
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else str(value)
