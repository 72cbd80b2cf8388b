"""Setting: what all questions of a run have in common."""

import random
from dataclasses import dataclass

from kvtier.cli.prove.cold import Cold
from kvtier.cli.prove.writing import Words, Writing


class Salts:
    """Makes them; *run* is this run's alone."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._num_made = 0

    def new(self) -> str:
        """One more, of characters that every connector takes."""
        self._num_made += 1
        return f"kvtier-prove-{self._run}-{self._num_made}"


@dataclass(frozen=True)
class Setting:
    """How prompts are drawn and written, and how they are asked so that they are computed as a whole: *cold*; None if
    there is no way. *words* write what token ids cannot."""

    source: random.Random
    salts: Salts
    writing: Writing
    words: Words
    cold: Cold | None
