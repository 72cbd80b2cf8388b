"""Timelines: who sent a request, and the times of its events."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    *request_id* is the id that the caller gave the request, "" if none. *tenant* is the tenant of the
    caller's API key. *traceparent* is the W3C header of the span that the request belongs to.
    """

    request_id: str = ""
    tenant: str | None = None
    traceparent: str | None = None


ANONYMOUS = Caller()


class Stage(StrEnum):
    """A stage in a request's life."""

    QUEUE = "queue"
    LOOKUP = "lookup"  # find the tiers that hold blocks of the prompt
    PLAN = "plan"  # choose the part of the hit to load
    SPILL = "spill"  # copy other blocks down to make room for the hit
    PROMOTE_HOST = "promote.host"  # load blocks from host memory
    PROMOTE_DISK = "promote.disk"
    PROMOTE_REMOTE = "promote.remote"
    PREFILL = "prefill"
    DECODE = "decode"


class Stretch(NamedTuple):
    """A stage of a request with its start and end, in seconds since the request's arrival."""

    stage: Stage
    start_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """Times of one request's events on one monotonic clock. Owned by the engine's thread.

    If a request is preempted and starts again, *begun_at* and *loaded_at* remain those of its first start.
    """

    arrived_at: float
    caller: Caller = ANONYMOUS
    lookup_s: float = 0.0  # total time of its lookups
    num_preempted: int = 0
    begun_at: float | None = field(default=None, init=False)  # when it left the queue
    loaded_at: float | None = field(default=None, init=False)  # when its cached prefix was loaded
    first_token_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    token_gap_s: float | None = field(default=None, init=False)  # between the last two tokens; None before the second
    ended_at: float | None = field(default=None, init=False)
    _noted: dict[Stage, tuple[float, float]] = field(default_factory=dict, init=False)

    @property
    def queue_s(self) -> float | None:
        """Seconds that the request spent in the queue; None while it is still queued."""
        return _between(self.arrived_at, self.begun_at)

    @property
    def load_s(self) -> float | None:
        """Seconds from leaving the queue until the cached prefix was loaded; None until then."""
        return _between(self.begun_at, self.loaded_at)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None until then."""
        return _between(self.arrived_at, self.first_token_at)

    def on_begun(self, now: float) -> None:
        """Record that the request has left the queue, and that its cached prefix is being loaded."""
        self.begun_at = now if self.begun_at is None else self.begun_at

    def on_loaded(self, now: float) -> None:
        """Record that the request's cached prefix, which may be empty, has been loaded."""
        self.loaded_at = now if self.loaded_at is None else self.loaded_at

    def on_token(self, now: float) -> None:
        """Record that the request got a token."""
        self.first_token_at = now if self.first_token_at is None else self.first_token_at
        self.token_gap_s = _between(self.last_token_at, now)
        self.last_token_at = now

    def on_ended(self, now: float) -> None:
        """Record that the request has its last token, or was aborted."""
        self.ended_at = now if self.ended_at is None else self.ended_at

    def note(self, stage: Stage, start: float, end: float) -> None:
        """Record that *stage* lasted from *start* to *end*, replacing earlier times of the same stage."""
        self._noted[stage] = start, end

    def stretches(self) -> tuple[Stretch, ...]:
        """Return the request's stages so far, ordered by start. Stages may overlap."""
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
        """Raise AssertionError if the times are out of order."""
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
