"""HitRatio: totals, preempted requests apart, and the ratio of the last requests."""

from kvtier.tiers.hit_ratio import HitRatio


def test_queries_and_hits_are_counted_in_tokens() -> None:
    ratio = HitRatio()
    ratio.on_admitted(100, 0)
    ratio.on_admitted(300, 200)

    statistics = ratio.statistics()

    assert (statistics.num_requests, statistics.queries, statistics.hits) == (2, 400, 200)
    assert statistics.recent_hit_ratio == 0.5


def test_a_preempted_request_is_counted_apart() -> None:
    ratio = HitRatio()
    ratio.on_admitted(100, 50)
    ratio.on_readmitted(120, 96)

    statistics = ratio.statistics()

    assert (statistics.num_requests, statistics.queries, statistics.hits) == (1, 100, 50)
    assert (statistics.num_preempted, statistics.preempted_queries, statistics.preempted_hits) == (1, 120, 96)
    assert statistics.recent_hit_ratio == 0.5


def test_the_ratio_is_that_of_the_last_requests_only() -> None:
    ratio = HitRatio(num_recent=3)
    for hits in (0, 0, 0, 100, 50, 0):
        ratio.on_admitted(100, hits)

    assert ratio.statistics().recent_hit_ratio == 0.5
    assert ratio.statistics().hits == 150


def test_before_any_request_and_after_a_reset_there_is_no_ratio() -> None:
    ratio = HitRatio()
    assert ratio.statistics().recent_hit_ratio == 0

    ratio.on_admitted(10, 9)
    ratio.forget_recent()

    assert ratio.statistics().recent_hit_ratio == 0
    assert ratio.statistics().hits == 9
