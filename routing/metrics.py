"""The Prometheus metrics that the router serves at `/metrics`."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtier.engine.observability.metrics.metric_name import MetricName, counter, gauge, histogram
from kvtier.routing.event_feed import EventFeed
from kvtier.routing.replica import Health
from kvtier.routing.router import Routed, RoutedPrompt, Router
from kvtier.routing.tokens import Tokens

REQUESTS = counter("kvtier_route_requests", "Requests sent to a replica, by reason.", "replica", "reason")
RETRIES = counter(
    "kvtier_route_retries", "Requests retried at another replica, by the previous replica's failure.", "why"
)
FAILURES = counter("kvtier_route_failures", "Requests that no replica answered completely, by reason.", "why")
PROMPT_TOKENS = counter("kvtier_route_prompt_tokens", "Prompt tokens sent to replicas, estimated if not known.")
MATCHED_TOKENS = counter("kvtier_route_matched_tokens", "Prompt tokens that the replica should have, by tier.", "tier")
CHOOSE_SECONDS = histogram("kvtier_route_choose_seconds", "Seconds to choose a replica from a prompt's tokens.")
REPLICAS = gauge("kvtier_route_replicas", "Replicas by health.", "health")
DRAINING = gauge("kvtier_route_draining_replicas", "Replicas that an operator drains.")
REPLICA_REQUESTS = gauge("kvtier_route_replica_requests", "Requests at a replica that have not ended.", "replica")
WAITING_TOKENS = gauge("kvtier_route_waiting_tokens", "Prompt tokens at a replica that wait to be computed.", "replica")
INDEX_BLOCKS = gauge("kvtier_route_index_blocks", "Blocks of prompts that a replica has, or that were sent to it.")
ORPHANS = counter("kvtier_route_orphan_blocks", "Reported blocks whose place in a prompt is not known.")
SESSIONS = gauge("kvtier_route_sessions", "Conversations whose replica the router knows.")
EVENT_BATCHES = counter("kvtier_route_event_batches", "Batches of KV events received.", "replica")
EVENT_GAPS = counter("kvtier_route_event_gaps", "Gaps in the sequence numbers of batches.", "replica")
EVENT_REPLAYS = counter("kvtier_route_event_replays", "Replays of batches requested from a replica.", "replica")
EVENT_LOSSES = counter("kvtier_route_event_losses", "Times that the router forgot a replica's blocks.", "replica")
OPERATORS_REFUSED = counter("kvtier_route_operators_refused", "Requests with a missing or wrong operator's token.")
TOKENIZE = counter("kvtier_route_tokenize", "Requests to replicas for a prompt's tokens, by result.", "result")

CATALOGUE: tuple[MetricName, ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, MetricName))
_CHOOSE_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class RouteMetrics:
    """The router's counters and histograms, which are updated as events happen.

    No label value comes from a client, so clients cannot create new time series. Owned by the event loop.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.retries = RETRIES.counter(self.registry)
        self.failures = FAILURES.counter(self.registry)
        self.choose_seconds = CHOOSE_SECONDS.histogram(self.registry, _CHOOSE_S)
        self.operators_refused = OPERATORS_REFUSED.counter(self.registry)
        self._requests = REQUESTS.counter(self.registry)
        self._prompt_tokens = PROMPT_TOKENS.counter(self.registry)
        self._matched_tokens = MATCHED_TOKENS.counter(self.registry)

    def sent(self, prompt: RoutedPrompt, routed: Routed) -> None:
        """Count a prompt that was sent to the chosen replica."""
        self._requests.labels(routed.choice.name, str(routed.choice.reason)).inc()
        self._prompt_tokens.inc(prompt.num_tokens)
        for tier in ("device", "host", "disk", "expected"):
            self._matched_tokens.labels(tier).inc(getattr(routed.matched, tier))

    def passed(self, replica: str) -> None:
        """Count a request that has no prompt and was sent to *replica*."""
        self._requests.labels(replica, "pass").inc()


class RouterCollector(Collector):
    """A Prometheus collector of the metrics that are read from the router's state at each scrape."""

    def __init__(self, router: Router, feeds: Mapping[str, EventFeed], tokens: Tokens) -> None:
        self._router = router
        self._feeds = feeds
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its current values."""
        router, feeds = self._router, self._feeds
        replicas = router.replicas.values()
        by_health = Counter(str(each.health) for each in replicas)
        yield REPLICAS.by({str(health): by_health[str(health)] for health in Health})
        yield DRAINING.of(sum(each.is_draining for each in replicas))
        yield REPLICA_REQUESTS.by({each.name: each.load.num_requests for each in replicas})
        yield WAITING_TOKENS.by({each.name: each.load.num_waiting_tokens for each in replicas})
        yield INDEX_BLOCKS.of(router.index.num_prefixes)
        yield ORPHANS.of(router.index.num_orphans)
        yield SESSIONS.of(len(router.sessions))
        yield EVENT_BATCHES.by({name: feed.num_batches for name, feed in feeds.items()})
        yield EVENT_GAPS.by({name: feed.num_gaps for name, feed in feeds.items()})
        yield EVENT_REPLAYS.by({name: feed.num_replays for name, feed in feeds.items()})
        yield EVENT_LOSSES.by({name: feed.num_losses for name, feed in feeds.items()})
        asked, failed = self._tokens.num_asked, self._tokens.num_failed
        yield TOKENIZE.by({"answered": asked - failed, "failed": failed})
