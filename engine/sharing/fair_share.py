"""FairShare: how much each tenant may have of a resource that all tenants share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FairShare:
    """Each of *num_tenants* is sure of an equal share of *total* units, and of one unit at least.

    How far a tenant may go beyond its share depends on how the resource comes back. A resource that is held for long
    (pinned host memory) ends at the share, so that a tenant learns nothing of the others. A resource that comes back by
    itself but cannot be taken away (a tokenizing thread) may be had up to `most_of_one`. A place in a queue, which can
    be taken away, may be had as long as no tenant with less than its share wants it.
    """

    total: int
    num_tenants: int

    @property
    def each(self) -> int:
        """The units that a tenant is sure of, however many the other tenants have."""
        return max(1, self.total // max(1, self.num_tenants))

    @property
    def most_of_one(self) -> int:
        """The most units of one tenant: all but one, which is kept for the others; all, if it is alone."""
        return self.total if self.num_tenants <= 1 else max(1, self.total - 1)
