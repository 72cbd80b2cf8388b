"""RecentRecords: bounded, the newest and the slowest, and what listeners are told."""

import random
from dataclasses import replace

from kvtier.engine.observability.records.recent_records import NUM_NEWEST, NUM_SLOWEST, SLOWEST_S, RecentRecords
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Tier

RECORD = RequestRecord("a", None, None, 1000.0, TokenBalance(device=2, disk=3, recomputed=1), ttft_s=1.0)


def test_the_newest_are_kept_newest_first() -> None:
    records = RecentRecords()

    for number in range(NUM_NEWEST + 10):
        records.add(replace(RECORD, request_id=str(number)))

    assert [each.request_id for each in records.newest()] == [str(n) for n in range(NUM_NEWEST + 9, 9, -1)]


def test_the_slowest_are_those_that_sorting_all_of_the_last_hour_gives() -> None:
    records, rng = RecentRecords(), random.Random(1)
    added = [
        replace(RECORD, request_id=str(number), arrived_at=20.0 * number, ttft_s=rng.random()) for number in range(900)
    ]

    for record in added:
        records.add(record)

    since = added[-1].arrived_at - SLOWEST_S
    of_the_hour = [record for record in added if record.arrived_at >= since]
    assert list(records.slowest()) == sorted(of_the_hour, key=lambda each: -each.slowness_s)[:NUM_SLOWEST]


def test_a_slow_request_is_kept_after_many_others() -> None:
    records = RecentRecords()
    records.add(replace(RECORD, request_id="slow", ttft_s=100.0))

    for _ in range(NUM_NEWEST):
        records.add(RECORD)

    assert "slow" not in {each.request_id for each in records.newest()}
    assert (records.slowest()[0].request_id, records.slowest()[0].ttft_s) == ("slow", 100.0)


def test_a_request_without_a_first_token_is_as_slow_as_all_that_it_took() -> None:
    assert replace(RECORD, ttft_s=None, total_s=7.0).slowness_s == 7.0


def test_the_coldest_tier_is_the_last_that_has_a_token() -> None:
    assert RECORD.coldest is Tier.DISK
    assert replace(RECORD, tokens=TokenBalance(recomputed=4)).coldest is None


def test_listeners_are_told_of_each_record_once() -> None:
    told: list[RequestRecord] = []
    records = RecentRecords([told.append])

    records.add(RECORD)

    assert told == [RECORD]
