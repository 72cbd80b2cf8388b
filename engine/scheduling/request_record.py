"""RequestRecord: what one request has taken, once it has ended."""

from dataclasses import dataclass

from kvtier.engine.scheduling.timeline import Stretch, Timeline
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Names and numbers only: no text, no token. An endpoint that cannot know a number has None there.

    *tokens* add up to the prompt. Seconds are of one request: in the queue, until its cached prefix had come, until its
    first token from its arrival, and from its arrival to its end.
    """

    request_id: str
    tenant: str | None
    model: str | None  # the adapter's name, or that of a foreign engine's model; None: the engine's own
    arrived_at: float  # in seconds since the Unix epoch
    tokens: TokenBalance
    num_generated: int | None = None
    finish_reason: str | None = None
    queue_s: float | None = None
    lookup_s: float | None = None
    load_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    num_preempted: int = 0
    traceparent: str | None = None
    timeline: Timeline | None = None  # of its stages; it has ended, and changes no more

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Its stages, as far as they are known."""
        return () if self.timeline is None else self.timeline.stretches()

    @property
    def coldest(self) -> Tier | None:
        """The coldest tier that any token came from; None if all were computed."""
        return next((tier for tier in reversed(Tier) if getattr(self.tokens, tier)), None)

    @property
    def slowness_s(self) -> float:
        """What the slowest requests are sorted by: the time to the first token, without one all that it took."""
        return next((seconds for seconds in (self.ttft_s, self.total_s) if seconds is not None), 0.0)
