"""Records of ended requests: token counts and times."""

from dataclasses import dataclass

from kvtier.engine.scheduling.timeline import Stretch, Timeline
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A summary of an ended request for logs, metrics and traces, without its text or token ids.

    *tokens* adds up to the prompt's length. *queue_s* is the time in the queue, *load_s* the time from then until the
    cached prefix was loaded. *ttft_s* and *total_s* are the times from arrival to the first token and to the end. A
    number is None if the process that made the record cannot know it. A sidecar, for example, knows only the lookup.
    """

    request_id: str
    tenant: str | None
    model: str | None  # name of the adapter, or of a foreign engine's model; None: the engine's own model
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
    timeline: Timeline | None = None  # does not change any more, because the request has ended

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Start and end of each stage of the request, as far as known."""
        return () if self.timeline is None else self.timeline.stretches()

    @property
    def coldest(self) -> Tier | None:
        """Lowest tier that any token came from; None if all tokens were computed."""
        return next((tier for tier in reversed(Tier) if getattr(self.tokens, tier)), None)

    @property
    def slowness_s(self) -> float:
        """Seconds by which slow requests are ranked: the time to the first token, else the total time, else 0."""
        return next((seconds for seconds in (self.ttft_s, self.total_s) if seconds is not None), 0.0)
