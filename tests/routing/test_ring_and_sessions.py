"""Consistent hashing, and which replica had which conversation."""

from collections import Counter

from kvtier.routing.router import HashRing, Sessions

NAMES = [f"replica {i}" for i in range(5)]
KEYS = [f"key {i}".encode() for i in range(4000)]


def test_every_replica_comes_once_for_every_key_and_each_is_the_first_for_about_its_share() -> None:
    ring = HashRing(NAMES)
    orders = [ring.order(key) for key in KEYS]

    assert all(sorted(order) == NAMES for order in orders)
    shares = Counter(order[0] for order in orders)
    assert min(shares.values()) > 0.6 * len(KEYS) / len(NAMES)
    assert max(shares.values()) < 1.5 * len(KEYS) / len(NAMES)


def test_without_a_replica_only_its_own_keys_move() -> None:
    ring, fewer = HashRing(NAMES), HashRing(NAMES[1:])

    for key in KEYS[:500]:
        assert fewer.order(key) == [name for name in ring.order(key) if name != NAMES[0]]


def test_the_order_does_not_depend_on_who_is_named_first() -> None:
    assert [HashRing(NAMES).order(key) for key in KEYS[:50]] == [HashRing(NAMES[::-1]).order(key) for key in KEYS[:50]]


def test_conversations_that_were_asked_for_last_are_known() -> None:
    sessions = Sessions(limit=2)
    for name in ("first", "second", "first", "third"):
        sessions.keep(name, "a")

    assert [sessions.replica_of(name) for name in ("first", "second", "third")] == ["a", None, "a"]


def test_a_dead_replica_has_no_conversation() -> None:
    sessions = Sessions(limit=10)
    sessions.keep("one", "a")
    sessions.keep("two", "b")
    sessions.forget("a")

    assert (sessions.replica_of("one"), sessions.replica_of("two"), len(sessions)) == (None, "b", 1)
