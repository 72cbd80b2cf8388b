"""Timeline: who asked for a request, and the moments of its life."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for a request. *request_id* is what the caller knows it by, "" if it gave none; *tenant* is the name of
    an API key's tenant; *traceparent* is W3C's, of the span that the request is a part of."""

    request_id: str = ""
    tenant: str | None = None
    traceparent: str | None = None


ANONYMOUS = Caller()


class Stage(StrEnum):
    """What a request waits for, or has done for it."""

    QUEUE = "queue"
    LOOKUP = "lookup"  # where its prefix is
    PLAN = "plan"  # which part of that is loaded
    SPILL = "spill"  # blocks are copied down to make room for it
    PROMOTE_HOST = "promote.host"  # blocks that were in host memory come up
    PROMOTE_DISK = "promote.disk"
    PROMOTE_REMOTE = "promote.remote"
    PREFILL = "prefill"
    DECODE = "decode"


class Stretch(NamedTuple):
    """For how long a stage lasted, in seconds since the request's arrival."""

    stage: Stage
    start_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """The moments of one request's life, all by one monotonic clock, as they are reached. Owned by the engine's thread.

    A preempted request begins and loads again: its first time counts, and it was preempted once more.
    """

    arrived_at: float
    caller: Caller = ANONYMOUS
    lookup_s: float = 0.0  # that looking its prefix up has taken, all times together
    num_preempted: int = 0
    begun_at: float | None = field(default=None, init=False)  # it left the queue
    loaded_at: float | None = field(default=None, init=False)  # its cached prefix had come
    first_token_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    token_gap_s: float | None = field(default=None, init=False)  # between the last two tokens; None before
    ended_at: float | None = field(default=None, init=False)
    _noted: dict[Stage, tuple[float, float]] = field(default_factory=dict, init=False)

    @property
    def queue_s(self) -> float | None:
        """Seconds in the queue; None before it has left it."""
        return _between(self.arrived_at, self.begun_at)

    @property
    def load_s(self) -> float | None:
        """Seconds until its cached prefix had come; None before that."""
        return _between(self.begun_at, self.loaded_at)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to its first token; None before that."""
        return _between(self.arrived_at, self.first_token_at)

    def on_begun(self, now: float) -> None:
        """The request left the queue, and its prefix begins to come."""
        self.begun_at = now if self.begun_at is None else self.begun_at

    def on_loaded(self, now: float) -> None:
        """The request has the cached prefix that it gets, which may be none."""
        self.loaded_at = now if self.loaded_at is None else self.loaded_at

    def on_token(self, now: float) -> None:
        """The request got a token."""
        self.first_token_at = now if self.first_token_at is None else self.first_token_at
        self.token_gap_s = _between(self.last_token_at, now)
        self.last_token_at = now

    def on_ended(self, now: float) -> None:
        """The request has its last token, or was aborted."""
        self.ended_at = now if self.ended_at is None else self.ended_at

    def note(self, stage: Stage, start: float, end: float) -> None:
        """A stage lasted from *start* to *end*, and is over. Of one that comes again the last time counts."""
        self._noted[stage] = start, end

    def stretches(self) -> tuple[Stretch, ...]:
        """The stages that the request has had, by when they began; some lie in others."""
        moments = {
            Stage.QUEUE: (self.arrived_at, self.begun_at),
            **self._noted,
            Stage.PREFILL: (self.loaded_at, self.first_token_at),
            Stage.DECODE: (self.first_token_at, self.ended_at),
        }
        arrived_at = self.arrived_at
        found = [
            Stretch(stage, start - arrived_at, end - arrived_at)
            for stage, (start, end) in moments.items()
            if start is not None and end is not None
        ]
        return tuple(sorted(found, key=lambda stretch: stretch.start_s))

    def check(self) -> None:
        """Raise AssertionError if the moments are out of order."""
        moments = [
            self.arrived_at,
            self.begun_at,
            self.loaded_at,
            self.first_token_at,
            self.last_token_at,
            self.ended_at,
        ]
        reached = [moment for moment in moments if moment is not None]
        assert reached == sorted(reached), f"moments out of order: {moments}"


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
