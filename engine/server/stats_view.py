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
    view: dict[str, object] = msgspec.to_builtins(replace(statistics, cache=cache, what_if={}), enc_hook=_plain)
    sizes = {
        tier.value: {f"{size:g}": hits for size, hits in each.items()} for tier, each in statistics.what_if.items()
    }
    return {**view, "what_if": sizes}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in statistics")
