"""Every result in `bench/results/`: the command that measures it, what the command needs, and its quick form."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / ".venv" / "foreign" / "bin" / "python"
_OF_ENGINES = ("--python", str(ENGINES))


class Need(StrEnum):
    """What a benchmark needs in addition to kvtier's development packages."""

    ENGINES = "the real vLLM and LMCache: make .venv/foreign/installed"
    REDIS = "redis-server or valkey-server on the path"
    HISTORY = "a clone with its history: it measures an earlier commit too"

    @property
    def is_met(self) -> bool:
        """Whether it is there."""
        match self:
            case Need.ENGINES:
                return ENGINES.exists()
            case Need.REDIS:
                return shutil.which("valkey-server") is not None or shutil.which("redis-server") is not None
            case Need.HISTORY:
                return (ROOT / ".git").exists()


@dataclass(frozen=True)
class Result:
    """One result file.

    Args:
        name: The file's name without its ending.
        module: Run as `python -m module`.
        arguments: Those of the measurement.
        quick: Arguments in place of *arguments* for a run of seconds, which shows that the benchmark still works; None
            if it has no such form.
        needs: What must be there.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    quick: Sequence[str] | None = None
    needs: Sequence[Need] = ()

    @property
    def missing(self) -> list[Need]:
        """What it needs and is not here."""
        return [need for need in self.needs if not need.is_met]


def _with_engines(name: str, module: str, *questions: str) -> Result:
    return Result(name, module, (*_OF_ENGINES, *questions), needs=[Need.ENGINES])


RESULTS = [
    Result("exactness", "bench.engine.exactness"),
    Result("demo_ttft", "bench.engine.demo_ttft", quick=["--runs", "1"]),
    Result("miss_cost", "bench.engine.miss_cost", quick=["--rounds", "1"]),
    Result("decoding", "bench.engine.decoding", quick=["--rounds", "1", "--steps", "1"], needs=[Need.HISTORY]),
    Result("sampling", "bench.engine.sampling", quick=["--rounds", "1"], needs=[Need.HISTORY]),
    Result("structured_output", "bench.engine.structured_output", quick=["--rounds", "1"]),
    Result("lora", "bench.engine.lora", quick=["--rounds", "1"]),
    Result("paged_attention", "bench.engine.paged_attention"),
    Result("load_or_recompute", "bench.engine.load_or_recompute", quick=["--prompts", "60"]),
    Result("slow_disk", "bench.engine.slow_disk", quick=["--rounds", "1"]),
    Result("routing", "bench.engine.routing", quick=["--indexed", "10000"]),
    Result("cache_control", "bench.engine.cache_control"),
    Result("serving", "bench.engine.serving", ("--vllm", str(ENGINES)), needs=[Need.ENGINES]),
    Result("strangers", "bench.engine.strangers", _OF_ENGINES, needs=[Need.ENGINES]),
    Result("last_copies", "bench.tiers.last_copies", quick=["--prompts", "300"]),
    Result(
        "owner_thread",
        "bench.tiers.owner_thread",
        quick=["--slots", "20000", "--on-disk", "20000", "--rounds", "1"],
    ),
    Result("prefix_core", "bench.tiers.prefix_core"),
    Result("purge", "bench.tiers.purge", quick=["--blocks", "4096", "--disk-blocks", "512"]),
    Result("what_if", "bench.tiers.what_if"),
    Result("store", "bench.store.store"),
    Result("store_peers", "bench.store.store_peers"),
    Result("store_bit_flips", "bench.store.store_bit_flips", quick=["--flips", "20"]),
    Result("object_requests", "bench.store.object_requests", quick=["--chains", "1"]),
    Result("remote_faults", "bench.store.remote_faults", needs=[Need.REDIS]),
    Result(
        "remote_speed", "bench.store.remote_speed", _OF_ENGINES, quick=["--quick"], needs=[Need.REDIS, Need.ENGINES]
    ),
    Result("attached", "bench.attached"),
    Result("observability_tokens", "bench.observability", ["balance", "explain"]),
    Result("observability_cardinality", "bench.observability", ["cardinality"]),
    Result("observability_remembering", "bench.observability", ["remembering"], quick=["remembering"]),
    Result("observability_page", "bench.observability", ["page"]),
    Result("observability_cost", "bench.observability", ["cost"]),
    Result("cluster", "bench.cluster", _OF_ENGINES, needs=[Need.REDIS, Need.ENGINES]),
    _with_engines("doors_cost", "bench.doors", "hits", "cost"),
    _with_engines("doors_faults", "bench.doors", "faults"),
    _with_engines("doors_tiers", "bench.doors", "tiers", "tier_cost", "tier_capacity"),
    _with_engines("doors_peers", "bench.doors", "lmcache_l2", "corruption_peers", "generate"),
    _with_engines("sidecar", "bench.sidecar", "reuse"),
    _with_engines("sidecar_faults", "bench.sidecar", "faults"),
    _with_engines("sidecar_speed", "bench.sidecar", "speed"),
    _with_engines("sidecar_crowd", "bench.sidecar", "crowd"),
    _with_engines("sidecar_killed_clients", "bench.sidecar", "killed_clients"),
    _with_engines("sidecar_foul_clients", "bench.sidecar", "foul_clients"),
]
