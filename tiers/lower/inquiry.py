"""Inquiry: a question to tiers that cannot tell at once what they have."""

from collections.abc import Sequence
from typing import Protocol


class Inquiry(Protocol):
    """A question that is under way, or answered."""

    @property
    def is_done(self) -> bool:
        """Whether `LowerTiers.find` knows the answer by now, or it will come too late for who asked."""


class Answered:
    """See `Inquiry`: what is asked of tiers that know at once what they have."""

    is_done = True


class AllOf:
    """See `Inquiry`: several as one."""

    def __init__(self, inquiries: Sequence[Inquiry]) -> None:
        self._inquiries = inquiries

    @property
    def is_done(self) -> bool:
        return all(inquiry.is_done for inquiry in self._inquiries)


NOTHING_TO_ASK = Answered()
