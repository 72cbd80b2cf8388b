"""A circuit breaker: it suspends operations on a store that fails or hangs, then probes whether the store is back."""

from collections.abc import Callable
from enum import StrEnum
from typing import NewType

MAX_FAILURES = 3  # failures in a row that open a breaker; a single hang opens it too
REST_S = 1.0  # how long the store is not used after the breaker has opened, until the first probe
MAX_REST_S = 60.0  # limit on that time, which doubles with each failed probe
HUNG_S = 10.0  # an operation without its own deadline that takes longer than this counts as hung, not slow

Attempt = NewType("Attempt", int)


class BreakerState(StrEnum):
    """The state of a circuit breaker, which decides which operations on the store are allowed."""

    CLOSED = "closed"  # all operations
    OPEN = "open"  # none, for a while
    HALF_OPEN = "half_open"  # one operation, the probe; its outcome decides whether the breaker closes or opens again


class CircuitBreaker:
    """A circuit breaker for one kind of operation on one store: it tells the caller whether to use the store.

    Reads and writes have separate breakers, because a full disk can still be read. The caller calls `begin` before each
    operation, and reports its outcome with `on_succeeded`, `on_failed`, `on_hung` or `withdraw`. A half-open breaker
    allows a single operation, the *probe*, until its outcome is reported. The outcome of an operation is ignored if the
    breaker has opened or closed since the operation began.

    Used by the owner's thread only. A breaker starts no operations and does not block.
    """

    def __init__(
        self, clock: Callable[[], float], max_failures: int = MAX_FAILURES, max_rest_s: float = MAX_REST_S
    ) -> None:
        """Create a closed breaker, which opens after *max_failures* failures in a row.

        *max_rest_s* limits the time from the opening of the breaker to the next probe. Raises ValueError if
        *max_failures* is less than 1.
        """
        if max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, not {max_failures}")
        self.num_opened = 0  # how often the breaker has opened
        self._clock = clock
        self._max_failures = max_failures
        self._max_rest_s = max_rest_s
        self._num_failed = 0  # in a row, in this period
        self._period = 1
        self._next_rest_s = REST_S
        self.is_closed = True  # whether the breaker allows everything; False while half open
        self._rests_until = float("-inf")  # when the store may be probed, if the breaker is not closed
        self._is_probing = False  # whether a probe is in flight

    @property
    def state(self) -> BreakerState:
        """Current state. It changes from open to half-open by the passing of time alone."""
        if self.is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._rests_until else BreakerState.HALF_OPEN

    def allows(self) -> bool:
        """Return whether `begin` would grant an attempt now."""
        return self.is_closed or (self.state is BreakerState.HALF_OPEN and not self._is_probing)

    def begin(self) -> Attempt | None:
        """Allow one operation or batch, which is the probe if half-open; return None if the store must not be used."""
        if not self.allows():
            return None
        self._is_probing = not self.is_closed
        return Attempt(self._period)

    def on_succeeded(self, attempt: Attempt) -> None:
        """Record that the operation succeeded. A successful probe closes the breaker and clears earlier failures."""
        if attempt == self._period:
            self._num_failed = 0
            if self._is_probing:
                self._new_period()
                self.is_closed, self._next_rest_s = True, REST_S

    def on_failed(self, attempt: Attempt) -> None:
        """Record that the operation failed with an error of the store. A failed probe reopens the breaker."""
        if attempt == self._period:
            self._num_failed += 1
            if self._is_probing or self._num_failed == self._max_failures:
                self._open()

    def on_hung(self, attempt: Attempt) -> None:
        """Record that the operation exceeded its deadline, which opens the breaker at once.

        An outcome that is reported later is ignored.
        """
        if attempt == self._period:
            self._open()

    def withdraw(self, attempt: Attempt) -> None:
        """End an attempt that says nothing about the store, for example because its operation never started.

        If the attempt was a probe, another one may begin.
        """
        if attempt == self._period and self._is_probing:
            self._new_period()

    def check(self) -> None:
        """Raise AssertionError if the breaker's fields are inconsistent."""
        assert 0 <= self._num_failed < self._max_failures, f"{self._num_failed} failures have not opened the breaker"
        assert REST_S <= self._next_rest_s <= self._max_rest_s, f"the next rest would take {self._next_rest_s} s"
        if self.is_closed:
            assert not self._is_probing, "a closed breaker has a probe"
            assert self._next_rest_s == REST_S, "a closed breaker's next rest is not the shortest"
            return
        assert self.num_opened > 0, "an open breaker was never counted as opened"
        assert self._num_failed == 0, "an open breaker counts failures"
        assert self._rests_until - self._clock() <= self._max_rest_s, "the rest is longer than its limit"
        assert not self._is_probing or self._clock() >= self._rests_until, "a probe runs while the store rests"

    def _open(self) -> None:
        self._new_period()
        self.is_closed, self._rests_until = False, self._clock() + self._next_rest_s
        self._next_rest_s = min(2 * self._next_rest_s, self._max_rest_s)
        self.num_opened += 1

    def _new_period(self) -> None:
        self._period += 1
        self._num_failed = 0
        self._is_probing = False
