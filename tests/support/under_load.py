"""Load beside a test: something is asked again and again, from another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raw_engine import NUM_CHUNKS, Engine
from waiting import join


@contextmanager
def under_load(ask: Callable[[int], object]) -> Iterator[None]:
    """Ask again and again from another thread, each time with the next number."""
    is_over = threading.Event()
    failed: list[BaseException] = []

    def go_on() -> None:
        number = 0
        try:
            while not is_over.is_set():
                ask(number)
                number += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        join(thread)
    assert not failed, failed


def store_and_load(engine: Engine, number: int) -> None:
    """Have a foreign engine store chunks at a sidecar, and load some that it has stored before."""
    engine.salt = str(number)
    engine.store(f"cold {number}", fill=number % 200)
    engine.salt = str(max(0, number - 100))
    if engine.lookup(f"warm {number}") == NUM_CHUNKS:
        engine.retrieve(f"warm {number}")
