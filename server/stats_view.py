"""What `/stats` answers: an engine's statistics as JSON."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from kvtier.engine.core import EngineStatistics


def stats_view(statistics: EngineStatistics) -> dict[str, object]:
    """Everything but tenants' bytes by the digests of their salts; by name they are there."""
    cache = replace(statistics.cache, host_tenants={})
    if cache.disk is not None:
        cache = replace(cache, disk=replace(cache.disk, tenants={}))
    what_if = {
        tier.value: {f"{size:g}": hits for size, hits in each.items()}
        for tier, each in statistics.requests.what_if.items()
    }
    requests = replace(statistics.requests, what_if={})  # whose keys are no texts
    view: dict[str, object] = msgspec.to_builtins(replace(statistics, cache=cache, requests=requests), enc_hook=_plain)
    return {**view, "what_if": what_if}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in statistics")
