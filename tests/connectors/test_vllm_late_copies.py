"""`LateStores`: a thread makes a step's copies once it is told to, and the worker those that it has not begun."""

import threading
from collections.abc import Iterator

import pytest

from kvtier.connectors.vllm_connector.late_stores import LateStores

WITHIN_S = 60.0


@pytest.fixture
def stores() -> Iterator[LateStores]:
    stores = LateStores()
    yield stores
    stores.close()


def test_nothing_is_copied_before_it_must_be(stores: LateStores) -> None:
    made = list[int]()
    stores.submit(1, [lambda: made.append(1), lambda: made.append(2)])
    before = list(made)

    stores.end()

    assert not before
    assert made == [1, 2]
    assert stores.pop_ended() == [(1, True)]
    assert stores.pop_ended() == []


def test_a_thread_copies_once_it_is_told_to(stores: LateStores) -> None:
    threads = list[threading.Thread]()
    has_copied = threading.Event()
    stores.submit(1, [lambda: threads.append(threading.current_thread()), has_copied.set])
    stores.begin()

    assert has_copied.wait(WITHIN_S)

    stores.end()
    assert threads[0] is not threading.current_thread()
    assert stores.pop_ended() == [(1, True)]


def test_the_worker_waits_for_the_copy_that_the_thread_makes(stores: LateStores) -> None:
    made = list[str]()
    has_begun, may_go_on = threading.Event(), threading.Event()

    def held() -> None:
        has_begun.set()
        may_go_on.wait(WITHIN_S)
        made.append("by the thread")

    stores.submit(1, [held])
    stores.begin()
    assert has_begun.wait(WITHIN_S)
    threading.Timer(0, may_go_on.set).start()

    stores.end()

    assert made == ["by the thread"]
    assert stores.pop_ended() == [(1, True)]


def test_a_copy_that_fails_is_told_and_the_others_are_made(stores: LateStores) -> None:
    made = list[int]()
    stores.submit(1, [lambda: made.append(1 // 0), lambda: made.append(2)])
    stores.submit(2, [lambda: made.append(3)])

    stores.end()

    assert made == [2, 3]
    assert stores.pop_ended() == [(1, False), (2, True)]


def test_a_step_without_late_copies_has_ended_at_once(stores: LateStores) -> None:
    stores.submit(1, [])
    stores.submit(2, [], has_failed=True)

    assert stores.pop_ended() == [(1, True), (2, False)]


def test_what_has_not_begun_when_it_closes_is_never_copied() -> None:
    made = list[int]()
    stores = LateStores()
    stores.submit(1, [lambda: made.append(1)])

    stores.close()
    stores.begin()
    stores.end()

    assert not made
