"""TenantTokens: token counts, by source, of the largest tenants and of all other tenants together."""

from collections.abc import Mapping

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.lower.statistics import TokenBalance

OTHER = "other"
SKETCHED = 8  # number of other tenants with an estimated count, for each shown tenant
MUCH_LARGER = 2  # to replace the smallest shown tenant, a watched tenant needs more than this many times its tokens


class TenantTokens:
    """Token counts by name for at most *num_shown* tenants, and one count, OTHER, for all other tenants together.

    The tenants counted by name are called shown. A tenant's count begins when it becomes shown; its earlier tokens stay
    in OTHER. The tokens of tenants that are not shown are estimated, to find large ones. The Space-Saving algorithm is
    used for this: a new tenant replaces the one with the fewest tokens and inherits its count. Requests without a
    tenant are not counted. Owned by the thread that creates the records.
    """

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._shown: dict[str, TokenBalance] = {}
        self._other = TokenBalance()
        self._watched: dict[str, int] = {}  # estimated tokens of tenants that are not shown

    def on_record(self, record: RequestRecord) -> None:
        """Count a finished request."""
        tenant = record.tenant
        if tenant is None:
            return
        if tenant not in self._shown and not self._is_now_shown(tenant, record.tokens.num_tokens):
            self._other = self._other.plus(record.tokens)
            return
        self._shown[tenant] = self._shown[tenant].plus(record.tokens)

    def statistics(self) -> Mapping[str, TokenBalance]:
        """Return, by tenant, how many prompt tokens came from each tier. OTHER has all tenants not counted by name."""
        other = {OTHER: self._other} if self._other.num_tokens else {}
        return {**self._shown, **other}

    def _is_now_shown(self, tenant: str, num_tokens: int) -> bool:
        """Begin to count a tenant by name, if allowed, and return whether that happened.

        It is allowed if fewer than `num_shown` tenants are counted by name. Otherwise, a tenant that is much larger
        than the smallest of them replaces it.
        """
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
        """Add *num_tokens* to the estimated total of a tenant without an exact count, and return the new total."""
        if tenant not in self._watched and len(self._watched) >= SKETCHED * self._num_shown:
            fewest = min(self._watched, key=self._watched.__getitem__)
            self._watched[tenant] = self._watched.pop(fewest)
        self._watched[tenant] = self._watched.get(tenant, 0) + num_tokens
        return self._watched[tenant]
