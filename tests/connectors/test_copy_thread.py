"""A thread of copies: jobs in their order, ends that are told once, and waiting that ends with the copy."""

from collections.abc import Iterator
from threading import Event, Thread, current_thread

import pytest

from kvtier.connectors.vllm_offloading.copy_thread import CopyThread

SOON_S = 60.0  # reached by defects only


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    running = CopyThread("copies")
    yield running
    running.close()


def test_jobs_run_in_their_order_on_another_thread_and_are_told_once(thread: CopyThread) -> None:
    ran: list[tuple[int, str]] = []

    def job(number: int) -> int:
        ran.append((number, current_thread().name))
        return 10 * number

    for number in range(5):
        thread.submit(number, lambda number=number: job(number))  # type: ignore[misc]
    thread.wait(range(5))

    assert ran == [(number, "copies") for number in range(5)]
    assert [(each.job_id, each.num_bytes) for each in thread.take_ended()] == [(n, 10 * n) for n in range(5)]
    assert thread.take_ended() == []


def test_waiting_ends_once_the_job_has_and_not_before(thread: CopyThread) -> None:
    may_end, has_ended = Event(), Event()

    def job() -> int:
        assert may_end.wait(SOON_S)
        has_ended.set()
        return 1

    def wait() -> None:
        thread.wait([1])
        seen.append(has_ended.is_set())

    seen: list[bool] = []
    thread.submit(1, job)
    waiting = Thread(target=wait)
    waiting.start()
    assert thread.take_ended() == []
    may_end.set()
    waiting.join(SOON_S)

    assert seen == [True]
    assert [each.job_id for each in thread.take_ended()] == [1]
    thread.wait([1, 2])  # taken, and never submitted: neither is waited for


def test_a_job_that_fails_is_told_as_failed_and_those_behind_it_run(
    thread: CopyThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise IndexError("page 7 of 5")

    thread.submit(1, fail)
    thread.submit(2, lambda: 8)
    thread.wait([1, 2])

    assert [(each.job_id, each.num_bytes) for each in thread.take_ended()] == [(1, None), (2, 8)]
    assert "page 7 of 5" in caplog.text


def test_closing_runs_what_was_submitted() -> None:
    thread, ran = CopyThread("copies"), []

    def job() -> int:
        ran.append(1)
        return 0

    thread.submit(1, job)
    thread.close()

    assert ran == [1]
