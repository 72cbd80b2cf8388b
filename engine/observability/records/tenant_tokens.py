"""TenantTokens: where the tokens of each tenant came from, for the largest tenants, and for all others together."""

from collections.abc import Mapping

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.lower.statistics import TokenBalance

OTHER = "other"
SKETCHED = 8  # times as many tenants are watched as are shown
MUCH_LARGER = 2  # so many times the smallest shown tenant's tokens have others before they take its place


class TenantTokens:
    """At most *num_shown* tenants are shown by name, however many there are. A tenant's count begins when it is shown;
    what it had before is counted for all others together, so no count ever shrinks.

    Who is large among those not shown is estimated (Space-Saving: the one with the fewest tokens makes way, and the new
    one takes its count over). Requests without a tenant count for none. Owned by the thread that records are made in.
    """

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._shown: dict[str, TokenBalance] = {}
        self._other = TokenBalance()
        self._watched: dict[str, int] = {}  # tokens of tenants that are not shown, at least

    def on_record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        tenant = record.tenant
        if tenant is None:
            return
        if tenant not in self._shown and not self._is_now_shown(tenant, record.tokens.num_tokens):
            self._other = self._other.plus(record.tokens)
            return
        self._shown[tenant] = self._shown[tenant].plus(record.tokens)

    def statistics(self) -> Mapping[str, TokenBalance]:
        """The shown tenants' tokens by name, and those of all others as OTHER, if there are any."""
        other = {OTHER: self._other} if self._other.num_tokens else {}
        return {**self._shown, **other}

    def _is_now_shown(self, tenant: str, num_tokens: int) -> bool:
        """Show a tenant if there is room, or if it is much larger than the smallest that is shown."""
        if tenant == OTHER or not self._num_shown:
            return False
        if len(self._shown) < self._num_shown:
            self._shown[tenant] = TokenBalance()
            return True
        num_seen = self._watch(tenant, num_tokens)
        smallest = min(self._shown, key=lambda each: self._shown[each].num_tokens)
        if num_seen <= MUCH_LARGER * self._shown[smallest].num_tokens:
            return False
        del self._shown[smallest], self._watched[tenant]
        self._shown[tenant] = TokenBalance()
        return True

    def _watch(self, tenant: str, num_tokens: int) -> int:
        """Add to the tokens of a tenant that is not shown; about how many it has."""
        if tenant not in self._watched and len(self._watched) >= SKETCHED * self._num_shown:
            fewest = min(self._watched, key=self._watched.__getitem__)
            self._watched[tenant] = self._watched.pop(fewest)
        self._watched[tenant] = self._watched.get(tenant, 0) + num_tokens
        return self._watched[tenant]
