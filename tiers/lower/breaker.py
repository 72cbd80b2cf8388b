"""CircuitBreaker: leaves a store that fails or hangs alone for a while, then tries it once: is it back?"""

from collections.abc import Callable
from enum import StrEnum
from typing import NewType

MAX_FAILURES = 3  # in a row; a hang is enough by itself
REST_S = 1.0
MAX_REST_S = 60.0  # the rest doubles up to this while probes fail
HUNG_S = 10.0  # an operation without a deadline of its own that takes longer is not slow: it hangs

Attempt = NewType("Attempt", int)


class BreakerState(StrEnum):
    """What a circuit breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing: the disk rests
    HALF_OPEN = "half_open"  # one attempt, the probe, whose outcome decides


class CircuitBreaker:
    """Says whether one kind of operation on one disk is worth trying: reads, or writes, since a full disk still reads.

    The caller begins an attempt before it uses the disk, and ends it with one of `on_succeeded`, `on_failed`, `on_hung`
    and `withdraw`; without that no other probe is ever let through. An attempt counts in the period in which it began;
    opening and closing begin a new one. So what is still under way when the breaker opens can neither close it nor
    lengthen its rest, nor spoil the time after. Touched by the owner's thread only; starts nothing, waits for nothing.
    """

    def __init__(
        self, clock: Callable[[], float], max_failures: int = MAX_FAILURES, max_rest_s: float = MAX_REST_S
    ) -> None:
        """*max_failures* in a row open it; ValueError if that is not at least one. It rests *max_rest_s* at most."""
        if max_failures < 1:
            raise ValueError(f"a breaker that opens after {max_failures} failures; need at least 1")
        self.num_opened = 0
        self._clock = clock
        self._max_failures = max_failures
        self._max_rest_s = max_rest_s
        self._num_failed = 0  # in a row, in this period
        self._period = 1
        self._next_rest_s = REST_S
        self._rests_until: float | None = None  # None: closed
        self._is_probing = False

    @property
    def state(self) -> BreakerState:
        """What the breaker lets through now. Time alone takes it from open to half-open."""
        if self._rests_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._rests_until else BreakerState.HALF_OPEN

    @property
    def is_closed(self) -> bool:
        """Whether the breaker lets everything through."""
        return self._rests_until is None

    def allows(self) -> bool:
        """Whether `begin` would give an attempt now."""
        return self.is_closed or (self.state is BreakerState.HALF_OPEN and not self._is_probing)

    def begin(self) -> Attempt | None:
        """Permission for one operation or batch, half-open for the probe; None if the disk is to be left alone."""
        if not self.allows():
            return None
        self._is_probing = self._rests_until is not None
        return Attempt(self._period)

    def on_succeeded(self, attempt: Attempt) -> None:
        """Note that the operation succeeded. A probe's success closes the breaker and forgets earlier failures."""
        if attempt == self._period:
            self._num_failed = 0
            if self._is_probing:
                self._new_period()
                self._rests_until, self._next_rest_s = None, REST_S

    def on_failed(self, attempt: Attempt) -> None:
        """Note that the operation ended with an error of the disk's. A probe's failure opens the breaker again."""
        if attempt == self._period:
            self._num_failed += 1
            if self._is_probing or self._num_failed == self._max_failures:
                self._open()

    def on_hung(self, attempt: Attempt) -> None:
        """Note that the operation has outlived its deadline, which opens the breaker at once.

        Should the operation ever end, its outcome may be told or not: it counts no more.
        """
        if attempt == self._period:
            self._open()

    def withdraw(self, attempt: Attempt) -> None:
        """End an attempt that was never started: it says nothing about the disk. A probe may be tried again."""
        if attempt == self._period and self._is_probing:
            self._new_period()

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        assert 0 <= self._num_failed < self._max_failures, f"{self._num_failed} failures, and it has not opened"
        assert REST_S <= self._next_rest_s <= self._max_rest_s, f"the next rest would take {self._next_rest_s} s"
        if self._rests_until is None:
            assert not self._is_probing, "a probe of a disk that is in use"
            assert self._next_rest_s == REST_S, "closed, and the next rest is not the shortest"
            return
        assert self.num_opened > 0, "open, and never opened"
        assert self._num_failed == 0, "failures are counted while the disk is not in use"
        assert self._rests_until - self._clock() <= self._max_rest_s, "it rests longer than it may"
        assert not self._is_probing or self._clock() >= self._rests_until, "a probe while the disk rests"

    def _open(self) -> None:
        self._new_period()
        self._rests_until = self._clock() + self._next_rest_s
        self._next_rest_s = min(2 * self._next_rest_s, self._max_rest_s)
        self.num_opened += 1

    def _new_period(self) -> None:
        self._period += 1
        self._num_failed = 0
        self._is_probing = False
