"""Plans for hits: which part of a hit to load, and how long that takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.naming.groups import alignment
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.residency import GroupTiers
from kvtier.tiers.up.load_planner import Demand, LoadPlan, LoadPlanner, LoadSpeeds
from kvtier.tiers.up.promoter import Hits
from kvtier.tiers.up.promotion import Hit
from kvtier.transfer.transfer_engine import Route, TransferEngine


class HitPlans:
    """Plans for hits: each plan shortens a hit to the part that is faster to load than to recompute.

    No method has side effects, except that `plan_load` counts the plans. Owned by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[GroupTiers],
        hits: Hits,
        lower: LowerTiers,
        transfers: TransferEngine,
        planner: LoadPlanner | None,
    ) -> None:
        """Create plans that follow *planner*. If it is None, every hit is loaded as a whole."""
        self._groups = groups
        self._hits = hits
        self._lower = lower
        self._transfers = transfers
        self._planner = planner
        self._alignment = alignment([group.attention for group in groups])

    def worth_loading(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """Shorten the hit to the part that is faster to load than to recompute. Has no side effects.

        The result may be a split hit. Then a promotion loads only the blocks after the first `Hit.start` tokens. In the
        meantime, the request computes those tokens, except for the part that is `on_device`.

        Args:
            hit: Hit to shorten.
            num_tokens: Number of tokens in the prompt.
            busy_s: Seconds that the device is busy with other requests before it can compute this one.
        """
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.best)

    def plan_load(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """Return the same as `worth_loading`, and count the plan."""
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.choose)

    def load_seconds(self, hit: Hit, planner: LoadPlanner) -> float | None:
        """Return the seconds until the whole hit is loaded, including the loads that are queued before it.

        Returns None while the speed of a required lane (the queue of copies between two tiers) is unknown.
        """
        demand = self._hits.demand(hit, self._step(hit))
        return 0.0 if demand is None else planner.load_seconds(demand, self._speeds)

    def limit_load(self, hit: Hit, num_tokens: int) -> Hit:
        """Shorten the hit so that at most *num_tokens* tokens must be loaded from lower tiers."""
        limit = self._hits.on_device(hit).num_tokens + num_tokens
        if hit.num_tokens <= limit:
            return hit
        return replace(self._hits.shorter(hit, limit), misses=hit.misses.cut(hit.num_tokens, Reason.SKIPPED))

    def limit_hit(self, hit: Hit, num_tokens: int, reason: Reason) -> Hit:
        """Shorten the hit to the first *num_tokens* tokens, and record *reason* for computing the rest."""
        num_found = hit.num_tokens + (0 if hit.partial is None else hit.partial.num_tokens)
        if num_found <= num_tokens:
            return hit
        shorter = self._hits.shorter(hit, num_tokens)
        return replace(shorter, partial=None, misses=hit.misses.cut(num_found, reason))

    def on_device(self, hit: Hit) -> Hit:
        """Shorten the hit to the part that is on the device, and so need not be loaded."""
        return self._hits.on_device(hit)

    def computed(self, hit: Hit) -> range:
        """Return the cached blocks that the request computes itself while the rest of a split hit is loaded.

        The result is a range of indices of `hit.chain.names`. It is empty if the hit is not split.
        """
        return self._hits.computed(hit)

    def num_leased(self, hit: Hit) -> list[int]:
        """Return for each group how many of the hit's blocks are in device slots that are already leased."""
        slots = self._hits.device_slots(hit)
        return [g.pool.num_leased(found[found != ABSENT]) for g, found in zip(self._groups, slots, strict=True)]

    def _planned(
        self,
        hit: Hit,
        num_tokens: int,
        busy_s: float,
        choose: Callable[[Demand, int, float, LoadSpeeds], LoadPlan],
    ) -> Hit:
        demand = self._hits.demand(hit, self._step(hit))
        if demand is None:
            return hit
        plan = choose(demand, num_tokens, busy_s, self._speeds)
        if plan.end == hit.num_tokens:
            return replace(hit, start=plan.start) if plan.start else hit
        return replace(self._hits.shorter(hit, plan.end), misses=hit.misses.cut(hit.num_tokens, Reason.COST))

    def _step(self, hit: Hit) -> int:
        """Return by how many tokens the hit may be shortened: if it has recurrent states, only as a whole."""
        has_states = any(group.attention.keeps_states for group in self._groups)
        return max(hit.num_tokens, self._alignment) if has_states else self._alignment

    @property
    def _speeds(self) -> LoadSpeeds:
        return {
            Route.DISK_TO_HOST: self._lower.status.read_speed(Tier.DISK),
            Route.REMOTE_TO_HOST: self._lower.status.read_speed(Tier.REMOTE),
            Route.HOST_TO_DEVICE: self._transfers.speed(Route.HOST_TO_DEVICE),
        }
