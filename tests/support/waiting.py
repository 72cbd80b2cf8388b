"""Waits for what other threads and processes do: until it is done, with an end that only a failing test reaches."""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 120.0  # for what takes milliseconds, or a start of a process


def wait_for(holds: Callable[[], bool], pause_s: float = 0.002, deadline_s: float = DEADLINE_S) -> None:
    """Return once *holds* does; it is looked at every *pause_s* seconds."""
    give_up_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(pause_s)


def join(*threads: threading.Thread) -> None:
    """Return once all have ended."""
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"{thread.name} does not end"


def has_ended(pid: int) -> bool:
    """Whether a child has ended with all of its threads: the first one is a zombie before the others are gone."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # who started it has been told
        return True


def stop(pid: int) -> None:
    """Have a process hang; it does once each of its threads has stopped, when that next looks for signals."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state_of(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()))


def state_of(process: Path) -> str:
    """The letter that Linux has for what a process, or a thread, does; *process* is its folder in /proc."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def is_in(thread_id: int, function: Callable[..., object]) -> bool:
    """Whether a thread is in that *function*, or in what it has called."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code is not inspect.unwrap(function).__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupted_once(holds: Callable[[], bool], then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ctrl-C for the calling thread, the main one, once *holds* does; *then* is called as it comes."""
    main = threading.get_ident()

    def handle(*_: object) -> None:
        then()
        raise KeyboardInterrupt

    def interrupt() -> None:
        wait_for(holds)
        signal.pthread_kill(main, signal.SIGALRM)

    handler = signal.signal(signal.SIGALRM, handle)
    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    try:
        yield
    finally:
        join(interrupting)
        signal.signal(signal.SIGALRM, handler)
