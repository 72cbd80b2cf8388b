"""`GroupCommit`: makes one change of the index for the payloads that several threads have written."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class HasKey(Protocol):
    """Something that a put stores under a key."""

    @property
    def key(self) -> bytes: ...


ItemT = TypeVar("ItemT", bound=HasKey)


@dataclass(eq=False, slots=True)
class _Call(Generic[ItemT]):
    """The items of one caller of `put`, and the result for that caller."""

    items: Sequence[ItemT]
    num_bytes: int
    done: bool = False
    evicted: list[bytes] = field(default_factory=list)
    error: Exception | None = None


class GroupCommit(Generic[ItemT]):
    """A group commit, which stores the items of concurrent `put` calls together in one change of the store.

    *act* makes one change, and returns the keys that it evicted. Calls that
    arrive during a change wait for the next one. One change stores at most *max_bytes*, or one call. The call that gets
    the *writer* lock makes changes until its own items are stored, together with those of the calls that wait. So there
    is no extra thread, and a single call does not wait for others. If that call is interrupted, the next one that gets
    the lock stores the items of the other calls.
    """

    def __init__(self, writer: threading.RLock, max_bytes: int, act: Callable[[Sequence[ItemT]], list[bytes]]) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._act = act
        self._waiting: list[_Call[ItemT]] = []  # each call appends itself and, with the writer lock, removes itself

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait or are in progress."""
        return len(self._waiting)

    def put(self, items: Sequence[ItemT], num_bytes: int) -> list[bytes]:
        """Store *items* of *num_bytes* in total, and return the keys that were evicted to make room.

        Raises the error if storing them fails. Once the call has returned or was interrupted, no other thread uses
        *items*.
        """
        call = _Call(items, num_bytes)
        try:
            self._waiting.append(call)
            with self._writer:
                while not call.done:
                    self._serve(self._gathered())
                self._waiting.remove(call)
        except BaseException:
            with self._writer, suppress(ValueError):
                self._waiting.remove(call)
            raise
        if call.error is not None:
            raise call.error
        return call.evicted

    def _gathered(self) -> list[_Call[ItemT]]:
        """Return the waiting calls to store in the next change. At least one call must be waiting.

        Together they have at most `max_bytes`, unless the first call alone is larger.
        """
        calls: list[_Call[ItemT]] = []
        num_bytes = 0
        for call in self._waiting.copy():  # other threads append meanwhile
            if not call.done:
                num_bytes += call.num_bytes
                if calls and num_bytes > self._max_bytes:
                    break
                calls.append(call)
        return calls

    def _serve(self, calls: Sequence[_Call[ItemT]]) -> None:
        try:
            evicted = self._act([item for call in calls for item in call.items])
        except Exception as error:  # raised again in the thread of each caller
            if len(calls) > 1:  # the items of one call may be the cause, so try each call by itself
                for call in calls:
                    self._serve([call])
                return
            calls[0].error, calls[0].done = error, True
            return
        for call in calls[1:]:
            own = {item.key for item in call.items}
            call.evicted = [key for key in evicted if key in own]
        others = {key for call in calls[1:] for key in call.evicted}
        calls[0].evicted = [key for key in evicted if key not in others]
        for call in calls:
            call.done = True
