"""Settings that all questions of a run share."""

import random
from dataclasses import dataclass

from kvtier.cli.prove.cold import CacheBypass
from kvtier.cli.prove.writing import PromptFormat, Words


class Salts:
    """A generator of salts. *run* is unique to this run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._num_made = 0

    def new(self) -> str:
        """Return a new salt, of characters that every server accepts."""
        self._num_made += 1
        return f"kvtier-prove-{self._run}-{self._num_made}"


@dataclass(frozen=True)
class RunSettings:
    """The ways to draw and write prompts, and to bypass the server's cache.

    *words* writes prompts that cannot be token ids. *cold* is None if no way to bypass the cache is known.
    """

    source: random.Random
    salts: Salts
    writing: PromptFormat
    words: Words
    cold: CacheBypass | None
