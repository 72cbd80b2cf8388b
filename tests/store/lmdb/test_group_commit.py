"""Group commit: which call works for which, and what an interruption of one leaves to the others."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from store_cases import blob_of, key_of
from waiting import DEADLINE_S, interrupted_once, join, wait_for

from kvtier.store.blob_store import Blob
from kvtier.store.lmdb.group_commit import GroupCommit

MAX_BYTES = 1 << 20


class Acts:
    """What a group commit does with its blobs: notes their keys, after *before* has been called."""

    def __init__(self) -> None:
        self.stored: list[list[bytes]] = []
        self.evicted: list[bytes] = []
        self.before: Callable[[Sequence[Blob]], None] = lambda _: None
        self.writer = threading.RLock()
        self.group = GroupCommit(self.writer, MAX_BYTES, self.act)

    def act(self, blobs: Sequence[Blob]) -> list[bytes]:
        self.before(blobs)
        self.stored.append([blob.key for blob in blobs])
        return self.evicted

    def put_beside(self, number: int) -> "Future[list[bytes]]":
        """Put a blob in another thread; returns once it waits or is at work."""
        done: Future[list[bytes]] = Future()

        def put() -> None:
            try:
                done.set_result(self.group.put([blob_of(number)], 20_000))
            except BaseException as error:
                done.set_exception(error)

        num_waiting = self.group.num_waiting
        threading.Thread(target=put, daemon=True).start()
        wait_for(lambda: self.group.num_waiting > num_waiting)
        return done


def test_calls_that_wait_go_together() -> None:
    acts = Acts()

    with acts.writer:
        calls = [acts.put_beside(n) for n in range(3)]

    assert [call.result(DEADLINE_S) for call in calls] == [[]] * 3
    assert acts.stored == [[key_of(0), key_of(1), key_of(2)]]


def test_each_evicted_key_is_told_to_one_call() -> None:
    acts = Acts()
    acts.evicted = [key_of(7), key_of(1), key_of(8)]

    with acts.writer:
        calls = [acts.put_beside(n) for n in range(3)]

    told = [call.result(DEADLINE_S) for call in calls]
    assert told == [[key_of(7), key_of(8)], [key_of(1)], []]  # a call is told of its own, the first of all others


@pytest.mark.parametrize("num_calls", [2, 3])
def test_the_error_of_one_call_is_not_that_of_those_that_were_stored_with_it(num_calls: int) -> None:
    acts = Acts()

    def fail(blobs: Sequence[Blob]) -> None:
        if any(blob.key == key_of(1) for blob in blobs):
            raise OSError("no")

    acts.before = fail
    with acts.writer:
        calls = [acts.put_beside(n) for n in range(num_calls)]

    errors = [call.exception(DEADLINE_S) for call in calls]
    assert [isinstance(error, OSError) for error in errors] == [n == 1 for n in range(num_calls)]
    assert sorted(key for keys in acts.stored for key in keys) == [key_of(n) for n in range(num_calls) if n != 1]


def test_a_call_interrupted_at_its_work_for_all_leaves_the_others_theirs() -> None:
    acts = Acts()

    def interrupt(_: Sequence[Blob]) -> None:
        acts.before = lambda _: None
        raise KeyboardInterrupt

    acts.before = interrupt
    with acts.writer:
        calls = [acts.put_beside(n) for n in range(3)]

    outcomes = [call.exception(DEADLINE_S) for call in calls]
    (interrupted,) = [n for n, outcome in enumerate(outcomes) if outcome is not None]
    assert isinstance(outcomes[interrupted], KeyboardInterrupt)
    stored = [key for keys in acts.stored for key in keys]
    assert sorted(stored) in (
        [key_of(n) for n in range(3) if n != interrupted],
        [key_of(n) for n in range(3)],  # by another, before the interrupted one took it back
    )
    assert acts.group.num_waiting == 0


def test_what_was_done_before_the_interruption_is_not_done_twice() -> None:
    acts = Acts()

    def fail_together_then_interrupt(blobs: Sequence[Blob]) -> None:
        if len(blobs) > 1:
            raise OSError("one of them is to blame")
        if blobs[0].key == key_of(1):
            acts.before = lambda _: None
            raise KeyboardInterrupt

    acts.before = fail_together_then_interrupt
    with acts.writer:
        calls = [acts.put_beside(n) for n in range(3)]

    for call in calls:
        call.exception(DEADLINE_S)
    stored = [key for keys in acts.stored for key in keys]
    assert stored.count(key_of(0)) == 1
    assert stored.count(key_of(2)) == 1
    assert acts.group.num_waiting == 0


def test_a_call_interrupted_in_line_takes_its_blobs_with_it() -> None:
    acts = Acts()
    has_writer, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with acts.writer:
            has_writer.set()
            let_go.wait(DEADLINE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    has_writer.wait(DEADLINE_S)

    with interrupted_once(lambda: acts.group.num_waiting == 1, then=let_go.set), pytest.raises(KeyboardInterrupt):
        acts.group.put([blob_of(1)], 20_000)
    join(holder)

    acts.group.put([blob_of(2)], 20_000)

    assert acts.stored == [[key_of(2)]]
