"""Setting: what all questions of a run have in common."""

import random
from dataclasses import dataclass

from kvtier.cli.prove.cold import Cold
from kvtier.cli.prove.salts import Salts
from kvtier.cli.prove.writing import Words, Writing


@dataclass(frozen=True)
class Setting:
    """How prompts are drawn and written, and how they are asked so that they are computed as a whole: *cold*; None if
    there is no way. *words* write what token ids cannot."""

    source: random.Random
    salts: Salts
    writing: Writing
    words: Words
    cold: Cold | None
