"""Inquiries: lookups in tiers that cannot answer at once."""

from collections.abc import Sequence
from typing import Protocol


class Inquiry(Protocol):
    """A lookup that is in flight or answered."""

    @property
    def is_done(self) -> bool:
        """Whether `LowerTiers.find` knows the answer by now, or it would come too late for the request."""


class Answered:
    """The inquiry of tiers that answer at once; implements `Inquiry`."""

    is_done = True


class AllOf:
    """Several inquiries as one; implements `Inquiry`."""

    def __init__(self, inquiries: Sequence[Inquiry]) -> None:
        self._inquiries = inquiries

    @property
    def is_done(self) -> bool:
        return all(inquiry.is_done for inquiry in self._inquiries)


NOTHING_TO_ASK = Answered()
