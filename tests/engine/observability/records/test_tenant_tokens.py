"""TenantTokens: the largest tenants by name, all others together, whatever comes."""

import random
from dataclasses import replace

from kvtier.engine.observability.records.tenant_tokens import OTHER, TenantTokens
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.lower.statistics import TokenBalance

RECORD = RequestRecord("a", None, None, 1000.0, TokenBalance(device=2, recomputed=1))


def test_few_tenants_are_all_shown_and_requests_without_one_are_not() -> None:
    tokens = TenantTokens(3)

    for tenant in ("a", "b", "a", None):
        tokens.on_record(replace(RECORD, tenant=tenant))

    assert {tenant: each.num_tokens for tenant, each in tokens.statistics().items()} == {"a": 6, "b": 3}


def test_a_million_requests_of_ten_thousand_tenants_show_twenty_and_others() -> None:
    tokens, rng = TenantTokens(20), random.Random(1)
    limit = set()

    for _ in range(50_000):
        tokens.on_record(replace(RECORD, tenant=str(rng.randrange(10_000))))
        limit.add(len(tokens.statistics()))

    assert max(limit) == 21


def test_tokens_add_up_and_no_count_shrinks() -> None:
    tokens, rng = TenantTokens(4), random.Random(2)
    before: dict[str, int] = {}
    counted = 0

    for number in range(5000):
        tokens.on_record(replace(RECORD, tenant=str(int(rng.paretovariate(0.7)))))
        now = {tenant: each.num_tokens for tenant, each in tokens.statistics().items()}
        counted += sum(n - before.get(tenant, 0) for tenant, n in now.items())
        assert all(now[tenant] >= n for tenant, n in before.items() if tenant in now)
        before = now
        assert counted == 3 * (number + 1)


def test_a_tenant_that_becomes_the_largest_takes_the_place_of_the_smallest() -> None:
    tokens = TenantTokens(2)
    for tenant in ("small", "large", "large", "large"):
        tokens.on_record(replace(RECORD, tenant=tenant))

    for _ in range(10):
        tokens.on_record(replace(RECORD, tenant="new"))

    found = tokens.statistics()
    assert set(found) == {"large", "new", OTHER}
    assert found["new"].num_tokens + found[OTHER].num_tokens == 30


def test_no_tenant_is_shown_by_name_if_none_is_to_be() -> None:
    tokens = TenantTokens(0)

    tokens.on_record(replace(RECORD, tenant="a"))

    assert set(tokens.statistics()) == {OTHER}
