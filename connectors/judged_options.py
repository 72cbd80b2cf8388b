"""`ClassifiedOptions`: for each option of an engine, whether it affects the bytes of the engine's KV cache."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class ClassifiedOptions:
    """A verdict on each option of one engine: whether the option decides the bytes of the engine's KV cache.

    An option *decides* bytes if two engines that differ only in this option may compute different keys and values for
    the same tokens, or lay them out differently. Rounding differences from the order of summation do not count, because
    this order changes with every batch anyway.

    Options have dotted names, such as `group.option`. A verdict on `group.*`, or on `group` itself, holds for all
    options of the group.
    """

    decides: Mapping[str, str]  # options that decide bytes, with the reason; their values are part of the namespace
    shown: Mapping[str, Sequence[str]]  # options whose values another part of the namespace covers, by that part
    harmless: Mapping[str, Sequence[str]]  # options that do not decide bytes, by the reason
    _judged: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an option that is classified more than once."""
        groups = [*self.shown.values(), *self.harmless.values()]
        options = [*self.decides, *(option for group in groups for option in group)]
        if twice := sorted({option for option in options if options.count(option) > 1}):
            raise ValueError(
                "an option may be listed only once in all of decides, shown and harmless; these have two verdicts: "
                f"{', '.join(twice)}"
            )
        object.__setattr__(self, "_judged", frozenset(options))

    @property
    def classified(self) -> frozenset[str]:
        """The names of all options and groups of options whose effect on the bytes of the KV cache is known."""
        return self._judged

    def unclassified(self, options: Iterable[str]) -> list[str]:
        """Return those of *options* whose effect on the bytes of the KV cache is not known, in their order."""
        return [option for option in options if not self._judged.intersection(_names_of(option))]

    def values(self, read: Callable[[str], object]) -> dict[str, str]:
        """Return the options that affect the bytes of the KV cache, by name, with their values as text.

        Args:
            read: Returns the value of an option, or None if this version of the engine does not have the option.
        """
        return {option: _text_of(read(option)) for option in self.decides}


def read_attribute(root: object, path: str) -> object:
    """Return the attribute of *root* at a dotted *path*, or None if any part of the path is missing."""
    found: object = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _names_of(option: str) -> list[str]:
    # For `a.b.c`: itself, `a`, `a.b`, `a.*` and `a.b.*`.
    parts = option.split(".")
    groups = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [option, *groups, *(f"{group}.*" for group in groups)]


def _text_of(value: object) -> str:
    """Return a text for *value* that is the same in all processes."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return _ADDRESS.sub("", text)


def _plain(value: object) -> object:
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else str(value)
