"""Group commit: who works for whom, and what an interruption of his leaves to the others."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from store_cases import blob_of, key_of

from kvtier.store.blob_store import Blob
from kvtier.store.lmdb.group_commit import GroupCommit

DEADLINE_S = 20.0  # reached only when a test fails
MOST_BYTES = 1 << 20


class Acts:
    """What a group commit does with its blobs: notes their keys, after *before* has been called."""

    def __init__(self) -> None:
        self.stored: list[list[bytes]] = []
        self.before: Callable[[Sequence[Blob]], None] = lambda _: None
        self.writer = threading.RLock()
        self.group = GroupCommit(self.writer, MOST_BYTES, self.act)

    def act(self, blobs: Sequence[Blob]) -> list[bytes]:
        self.before(blobs)
        self.stored.append([blob.key for blob in blobs])
        return []

    def put_beside(self, number: int) -> "Future[list[bytes]]":
        """Put a blob in another thread; returns once it waits or is at work."""
        done: Future[list[bytes]] = Future()

        def put() -> None:
            try:
                done.set_result(self.group.put([blob_of(number)]))
            except BaseException as error:
                done.set_exception(error)

        num_waiting = len(self.group._waiting)
        threading.Thread(target=put, daemon=True).start()
        give_up_at = time.monotonic() + DEADLINE_S
        while len(self.group._waiting) == num_waiting:
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        return done


def test_calls_that_wait_go_together() -> None:
    acts = Acts()

    with acts.writer:
        calls = [acts.put_beside(n) for n in range(3)]

    assert [call.result(DEADLINE_S) for call in calls] == [[]] * 3
    assert acts.stored == [[key_of(0), key_of(1), key_of(2)]]


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
    assert acts.group._waiting == []


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
    assert acts.group._waiting == []


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
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    threading.Timer(0.5, let_go.set).start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            acts.group.put([blob_of(1)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    holder.join(DEADLINE_S)

    acts.group.put([blob_of(2)])

    assert acts.stored == [[key_of(2)]]
