"""The page docs/reference/metrics.md, made from the catalogues of metrics."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields

from page_text import bullet

from kvtier.connectors.vllm_connector import counts
from kvtier.connectors.vllm_offloading import tier_counts
from kvtier.engine.observability.metrics import names
from kvtier.engine.observability.metrics.metric_name import Kind, MetricName
from kvtier.routing import metrics as routing

INTRODUCTION = """# Metrics

kvtier exports metrics for Prometheus. `kvtier serve`, `kvtier sidecar` and `kvtier route` serve them at `/metrics`. The
library serves them at a port of its own if its configuration has one, for example `metrics_port = 9400`.

[How to read the metrics](../explanation/metrics.md) explains the labels. [Why a prompt was not
cached](../how-to/why-not-cached.md#reasons) lists the reasons why a token was computed.
[Metrics under other names](metrics-compat.md) lists the names of vLLM and LMCache under which kvtier exports metrics.

In Prometheus, names of counters end in `_total`, and those of histograms in `_bucket`, `_sum` and `_count`. Below, the
labels of a metric follow its name in braces.

This page is generated from the code by `make reference`.
"""
ROUTER = """
## `kvtier route`

A *replica* is a server that the router sends requests to.
"""
VLLM = """
## vLLM with kvtier's connector

vLLM exports these counters in addition to its own, with vLLM's labels, if it attaches to a sidecar with
`KVTierConnector`.
"""
TIER = """
## vLLM with kvtier's disk tier

vLLM exports these metrics in addition to its own if its offloading has the secondary tier `KVTier`.
"""
MORE = {  # what a help text has no room for
    "kvtier_hit_tokens": "The tiers are `device`, `host`, `disk` and `remote`.",
    "kvtier_preempted_tokens": "The results are `hit` (found in the cache) and `miss`.",
    "kvtier_ttft_seconds": 'With `coldest="none"`, all tokens were computed.',
    "kvtier_copied_tokens": "kvtier copies these tokens from the cached block into the request's own block.",
    "kvtier_tenant_tokens": "The source is a tier or `recomputed`. At most `[metrics] top_tenants` tenants are counted "
    "by name, each from the time when it became one of the largest. All other tokens have the tenant `other`.",
    "kvtier_requests": "The states are `waiting`, `promoting` (the request's prefix is being loaded) and `running`.",
    "kvtier_images": "The sources are `encoder`, `host` and `disk`.",
    "kvtier_request_log_lines": "The results are `written` and `dropped`.",
    "kvtier_evicted_blocks": "A larger tier would reduce only the evictions with the cause `room`.",
    "kvtier_eviction_age_seconds": "If the age of most blocks is less than ten minutes, a larger tier would have more "
    "hits.",
    "kvtier_leased_slots": "Requests, copies, or engines on a sidecar use them.",
    "kvtier_what_if_hit_ratio": "The size is `0.5`, `1`, `2` or `4` times the actual size.",
    "kvtier_dropped_spills": "If this number grows, the lower tier is too slow or full, and hits are lost.",
    "kvtier_moved_bytes": "A route is a pair of tiers, such as `host_to_disk`.",
    "kvtier_remote_breaker": "The side `ask` is for lookups.",
    "kvtier_load_plans": "With `split`, the front of the hit was computed while the rest was loaded. With `part`, only "
    "the front was loaded.",
    "kvtier_disk_open": "kvtier then retries to open the store.",
    "kvtier_remote_blocks": "The outcomes are `stored`, `there` (the store already had the block) and `refused`.",
    "kvtier_remote_requests": "The kinds are `read`, `write` and `ask` (a lookup).",
    "kvtier_remote_bytes": "The directions are `read` and `written`.",
    "kvtier_sidecar_attachments": "If the number is more than 1, the engine has lost its sidecar and attached again.",
    "kvtier_sidecar_quarantined_chunks": "Quarantine ends when the client's processes have ended, or when the client "
    "attaches again.",
    "kvtier_sidecar_lost_chunks": "The reasons are `corrupt`, `late`, `over_share` (the engine has already leased its "
    "share of host memory), `without_room` (no slot was free) and `given_up` (the engine reserved a slot but stored "
    "nothing in it).",
    "kvtier_route_requests": "The reasons are `prefix` (the replica has most of the prompt), `load` (another replica "
    "has more of the prompt, but too much load), `session` (the replica had the conversation before), `hash` (no "
    "replica has any of the prompt) and `pass` (the request has no prompt, so the API key decides).",
    "kvtier_route_matched_tokens": "The tiers are `device`, `host`, `disk` and `expected` (sent to the replica before, "
    "but not reported by it yet).",
    "kvtier_route_retries": "The failures are `connect` (not reachable), `died` (the connection ended) and `refused` "
    "(status 503).",
    "kvtier_route_failures": "The reasons are `no_replica`, `timeout`, `died` (the connection ended) and `broken` (a "
    "stream ended early). Refused connections count, too.",
    "kvtier_route_orphan_blocks": "The router does not know the blocks before them.",
    "kvtier_route_event_losses": "This happens when events were lost, or when their numbers start anew.",
    "kvtier_route_operators_refused": "The audit log reports them, too, at most once per minute.",
    "kvtier_route_tokenize": "The results are `answered` and `failed`.",
    "kvtier_vllm_late_loads": "If this number grows, the disk is slow: raise `deadline_ms`.",
}


def metrics_page() -> str:
    """Return the page."""
    by_variable = {value.name: value for value in vars(names).values() if isinstance(value, MetricName)}
    parts = [INTRODUCTION]
    for title, found in _groups():
        parts.append(f"\n## {title}\n\n")
        parts += [_item(by_variable[name]) for name in found]
    parts += [ROUTER, "\n", *map(_item, routing.CATALOGUE)]
    parts += [VLLM, "\n", *map(_item, connector_metrics())]
    parts += [TIER, "\n", *map(_item, tier_metrics())]
    return "".join(parts)


def connector_metrics() -> Sequence[MetricName]:
    """The metrics of our connector in vLLM."""
    return [
        MetricName(
            f"{counts.METRIC_PREFIX}{each.name}",
            Kind.COUNTER,
            counts.DOCUMENTATION[each.name],
            ("reason",) if each.name == counts.UNSTORED else (),
        )
        for each in fields(counts.Counts)
    ]


def tier_metrics() -> Sequence[MetricName]:
    """The metrics of our tier in vLLM's offloading."""
    prefix = tier_counts.METRIC_PREFIX
    counters = [(each.name, Kind.COUNTER, tier_counts.DOCUMENTATION) for each in fields(tier_counts.TierCounts)]
    gauges = [(name, Kind.GAUGE, tier_counts.GAUGES) for name in tier_counts.GAUGES]
    return [MetricName(f"{prefix}{name}", kind, texts[name]) for name, kind, texts in (*counters, *gauges)]


def metrics_on_page() -> Sequence[MetricName]:
    """All metrics of the page."""
    return [*names.CATALOGUE, *routing.CATALOGUE, *connector_metrics(), *tier_metrics()]


def names_on_page() -> set[str]:
    """The names of all metrics of the page; counters also have the name that Prometheus shows."""
    counters = {f"{each.name}_total" for each in metrics_on_page() if each.kind is Kind.COUNTER}
    return counters | {each.name for each in metrics_on_page()}


def _groups() -> list[tuple[str, list[str]]]:
    """The headings in the source of the catalogue, each with the names of its metrics in order."""
    groups: list[tuple[str, list[str]]] = []
    for line in inspect.getsource(names).splitlines():
        if heading := re.fullmatch(r"# (.+)\.", line):
            groups.append((heading[1], []))
        elif name := re.search(r'"(kvtier_\w+)"', line):
            groups[-1][1].append(name[1])
    return groups


def _item(metric: MetricName) -> str:
    labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
    more = f" {MORE[metric.name]}" if metric.name in MORE else ""
    return bullet(f"`{metric.name}{labels}` ({metric.kind})", f"{metric.help}{more}")
