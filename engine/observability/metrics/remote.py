"""Metrics of the remote tier: an engine's and a sidecar's."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvtier.engine.observability.metrics import names
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics


def remote_metrics(remote: RemoteStatistics) -> Iterator[Metric]:
    """What only a remote tier has."""
    usage = remote.usage
    yield names.REMOTE_ASKED.of(remote.num_asked)
    yield names.REMOTE_LATE.of(remote.num_late)
    yield names.REMOTE_ASK_SECONDS.of(remote.ask_s)
    yield names.REMOTE_BLOCKS.by(
        {"stored": remote.num_stored, "there": remote.num_there, "refused": remote.num_refused}
    )
    yield names.REMOTE_WANTED_BLOCKS.of(remote.num_wanted)
    yield names.REMOTE_KNOWN_BLOCKS.of(remote.known_blocks)
    yield names.REMOTE_REQUESTS.by({"read": usage.num_reads, "write": usage.num_writes, "ask": usage.num_questions})
    yield names.REMOTE_BYTES.by({"read": usage.read_bytes, "written": usage.written_bytes})
    yield names.REMOTE_BREAKER.by(
        {(side, state): state is now for side, now in remote.breakers.items() for state in BreakerState}
    )
    yield names.REMOTE_BREAKER_OPENED.by(remote.num_opened)
