"""What the router's `/metrics` answers."""

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

REQUESTS = counter("kvtier_route_requests", "Requests sent to a replica, by why it was chosen", "replica", "reason")
RETRIES = counter("kvtier_route_retries", "Requests that went on to another replica, by what the one before did", "why")
FAILURES = counter("kvtier_route_failures", "Requests that no replica answered, or not to the end, by why", "why")
PROMPT_TOKENS = counter("kvtier_route_prompt_tokens", "Tokens of prompts that were sent, estimated if not known")
MATCHED_TOKENS = counter("kvtier_route_matched_tokens", "Those that the replica should have, by where", "tier")
CHOOSE_SECONDS = histogram("kvtier_route_choose_seconds", "Seconds that choosing took, of a prompt's tokens")
REPLICAS = gauge("kvtier_route_replicas", "Replicas by health", "health")
DRAINING = gauge("kvtier_route_draining_replicas", "Replicas that an operator drains")
REPLICA_REQUESTS = gauge("kvtier_route_replica_requests", "Requests at a replica that have not ended", "replica")
WAITING_TOKENS = gauge("kvtier_route_waiting_tokens", "Prompt tokens at a replica that wait to be computed", "replica")
INDEX_BLOCKS = gauge("kvtier_route_index_blocks", "Blocks that some replica has, or was sent")
ORPHANS = counter("kvtier_route_orphan_blocks", "Blocks told of whose place in a prompt is not known")
SESSIONS = gauge("kvtier_route_sessions", "Conversations whose replica is known")
EVENT_BATCHES = counter("kvtier_route_event_batches", "Batches of KV events taken in", "replica")
EVENT_GAPS = counter("kvtier_route_event_gaps", "Gaps in the numbers of batches", "replica")
EVENT_REPLAYS = counter("kvtier_route_event_replays", "Times that a replica was asked for batches again", "replica")
EVENT_LOSSES = counter("kvtier_route_event_losses", "Times that a replica's blocks were forgotten", "replica")
OPERATORS_REFUSED = counter("kvtier_route_operators_refused", "Requests with no operator's token, or a wrong one.")
TOKENIZE = counter("kvtier_route_tokenize", "Questions to replicas for a prompt's tokens, by result", "result")

CATALOGUE: tuple[MetricName, ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, MetricName))
_CHOOSE_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class RouteMetrics:
    """What is counted as it happens. No label is a client's to choose. Owned by the event loop."""

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
        """A prompt was sent to the replica of the choice."""
        self._requests.labels(routed.choice.name, str(routed.choice.reason)).inc()
        self._prompt_tokens.inc(prompt.num_tokens)
        for tier in ("device", "host", "disk", "expected"):
            self._matched_tokens.labels(tier).inc(getattr(routed.matched, tier))

    def passed(self, replica: str) -> None:
        """A request without a prompt was sent there."""
        self._requests.labels(replica, "pass").inc()


class RouterCollector(Collector):
    """What is asked for when Prometheus asks."""

    def __init__(self, router: Router, feeds: Mapping[str, EventFeed], tokens: Tokens) -> None:
        self._router = router
        self._feeds = feeds
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        """Each metric, as it is now."""
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
