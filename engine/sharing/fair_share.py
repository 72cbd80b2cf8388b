"""FairShare: what each tenant may have of something that all share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairShare:
    """Of *total* units each of *num_tenants* has an equal share for sure, and one unit at least.

    How far a tenant may go beyond it depends on how the resource comes back. What nobody gives back soon (pinned host
    memory) ends at the share, so what one has says nothing to the others. What ends by itself, but cannot be
    interrupted (the threads that tokenize), may be taken up to `most_of_one`. A place in a queue, which can be taken
    back, may be had by a tenant as long as nobody who has less than a share wants it.
    """

    total: int
    num_tenants: int

    @property
    def each(self) -> int:
        """What a tenant can have whatever the others do."""
        return max(1, self.total // max(1, self.num_tenants))

    @property
    def most_of_one(self) -> int:
        """All but one unit, which is kept for others; all, where there are none."""
        return self.total if self.num_tenants <= 1 else max(1, self.total - 1)
