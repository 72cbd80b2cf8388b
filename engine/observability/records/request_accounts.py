"""RequestAccounts: statistics over all requests, updated with each token and with each request's end."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.engine.observability.explain.local_explainer import LocalExplainer
from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.records.request_log import LogCounts, RequestLog
from kvtier.engine.observability.records.served_requests import ServedRequests, ServedStatistics
from kvtier.engine.observability.records.tenant_tokens import TenantTokens
from kvtier.engine.observability.tracing.request_traces import RequestTraces
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Timeline
from kvtier.engine.scheduling.trail import Trail, Trails
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.what_if import HitRatios, WhatIf

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
NO_TIER = "none"  # all tokens were computed
COLDEST = (NO_TIER, *(tier.value for tier in Tier))


@dataclass(frozen=True, slots=True)
class TimesStatistics:
    """Histograms of request times in seconds.

    *ttft*, the time to the first token, has one histogram per tier. A request counts for the coldest tier that its
    tokens came from, or for NO_TIER if all tokens were computed.
    """

    ttft: Mapping[str, HistogramStatistics]
    queue: HistogramStatistics
    lookup: HistogramStatistics
    load: HistogramStatistics


class RequestTimes:
    """Histograms of request times, updated with each record. Owned by the thread that creates the records."""

    def __init__(self) -> None:
        self._ttft = {coldest: Histogram(SECONDS) for coldest in COLDEST}
        self._queue, self._lookup, self._load = (Histogram(SECONDS) for _ in range(3))

    def on_record(self, record: RequestRecord) -> None:
        """Count the times of a finished request, for the stages that it reached."""
        own = self._ttft[NO_TIER if record.coldest is None else record.coldest.value]
        for histogram, seconds in (
            (own, record.ttft_s),
            (self._queue, record.queue_s),
            (self._lookup, record.lookup_s),
            (self._load, record.load_s),
        ):
            if seconds is not None:
                histogram.add(seconds)

    def statistics(self) -> TimesStatistics:
        """Return a snapshot of the current counts."""
        return TimesStatistics(
            {coldest: each.statistics() for coldest, each in self._ttft.items()},
            self._queue.statistics(),
            self._lookup.statistics(),
            self._load.statistics(),
        )


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """Statistics of finished requests, except where a field says otherwise."""

    times: TimesStatistics
    served: ServedStatistics
    tenants: Mapping[str, TokenBalance]  # of the largest tenants, and of all other tenants together
    what_if: HitRatios  # hit ratios estimated for smaller and larger tiers
    log: LogCounts | None  # None without a request log


class RequestAccounts:
    """An observer of all requests, which updates their statistics, records, log, traces and explanations.

    Owned by the engine's thread.
    """

    def __init__(
        self,
        what_if: WhatIf,
        trails: Trails,
        request_log: RequestLog | None,
        traces: RequestTraces | None,
        explainer: LocalExplainer,
        *,
        block_tokens: int,
        block_bytes: int,
        top_tenants: int,
    ) -> None:
        """Take ownership of the log, the traces and the explainer.

        A block has *block_tokens* tokens, and takes *block_bytes* in all attention groups together. The *top_tenants*
        largest tenants are counted by name.
        """
        self._times, self._served, self._tenants = RequestTimes(), ServedRequests(), TenantTokens(top_tenants)
        self._what_if = what_if
        self._trails = trails
        self._log = request_log
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._traces = traces
        self.explainer = explainer
        self.records = RecentRecords(
            [self._times.on_record, self._served.on_record, self._tenants.on_record],
            [] if request_log is None else [request_log.on_record],
        )

    def on_added(self, request: Request) -> None:
        """Begin the trace of a new request."""
        if self._traces is not None:
            self._traces.begin(request, request.timeline.caller, request.chain.names)

    def on_token(self, timeline: Timeline) -> None:
        """Count a new token of a request."""
        if timeline.token_gap_s is not None:
            self._served.on_token(timeline.token_gap_s)
        elif timeline.ttft_s is not None:
            self._served.on_first_token(timeline.ttft_s)

    def on_ended(self, request: Request) -> None:
        """Count a request that has finished or was aborted. Its leases on blocks must have ended."""
        names = request.chain.names
        num_named = len(request.prompt_token_ids) // self._block_tokens
        trail = self._trails.end(request) or Trail(self._block_tokens, names[:num_named])
        record = request.record()
        self.records.add(record, trail)
        if self._traces is not None:
            self._traces.end(request, record)
        self.explainer.on_ended(record, trail, request.chain)
        if request.tokens is None:  # it never left the queue
            return
        num_asked = num_named if request.reads_cache else 0
        if num_asked:
            self._what_if.on_prompt(names[:num_asked], self._block_tokens, self._block_bytes, request.tokens)
        self._what_if.on_generated(names[num_asked:], self._block_bytes)

    def trace_spills(self) -> None:
        """Send the spans of spills that ended since the last call. A spill copies blocks to a lower tier."""
        if self._traces is not None:
            self._traces.go_on()

    def statistics(self, tiers: Mapping[Tier, TierStatistics]) -> RequestStatistics:
        """Return a snapshot of the current counts. *tiers* contains the current sizes of the tiers."""
        return RequestStatistics(
            self._times.statistics(),
            self._served.statistics(),
            self._tenants.statistics(),
            self._what_if.hit_ratios(tiers),
            None if self._log is None else self._log.counts(),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._what_if.check()

    def close(self) -> None:
        """Flush and close the explainer, the log and the traces."""
        self.explainer.close()
        if self._log is not None:
            self._log.close()
        if self._traces is not None:
            self._traces.close()
