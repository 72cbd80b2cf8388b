"""Every result in `bench/results/`: the command that measures it, and what the command needs."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / ".venv" / "foreign" / "bin" / "python"
LIFEBOAT = ENGINES.parents[1] / "lifeboatcache"  # a proprietary package, which no command here installs
_OF_ENGINES = ("--python", str(ENGINES))


class Need(StrEnum):
    """What a benchmark needs in addition to kvtier's development packages."""

    ENGINES = "the real vLLM and LMCache: make .venv/foreign/installed"
    REDIS = "redis-server or valkey-server on the path"
    HISTORY = "a clone with its history: it measures an earlier commit too"
    CUDA = "a CUDA device"

    @property
    def is_met(self) -> bool:
        """Whether it is there."""
        match self:
            case Need.ENGINES:
                return ENGINES.exists()
            case Need.REDIS:
                return shutil.which("valkey-server") is not None or shutil.which("redis-server") is not None
            case Need.HISTORY:
                return _git("rev-parse", "--is-shallow-repository") == "false"
            case Need.CUDA:
                return any(Path("/dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True)
class Result:
    """One result file.

    Args:
        name: The file's name without its ending.
        module: Run as `python -m module`.
        arguments: Those of the measurement; with --quick besides it takes seconds.
        needs: What must be there.
        is_sampled: Whether a quick run measures some of the rows only, since all of them take minutes at any size.
        reads_trace: Whether it replays a trace too, given with --trace.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    needs: Sequence[Need] = ()
    is_sampled: bool = False
    reads_trace: bool = False

    @property
    def missing(self) -> list[Need]:
        """What it needs and is not here."""
        return [need for need in self.needs if not need.is_met]


def _git(*command: str) -> str:
    """Return what git says of this repository; nothing where there is none, or no git."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _with_engines(name: str, module: str, *questions: str, is_sampled: bool = False) -> Result:
    return Result(name, module, (*_OF_ENGINES, *questions), [Need.ENGINES], is_sampled)


RESULTS = [
    Result("exactness", "bench.engine.exactness"),
    Result("demo_ttft", "bench.engine.demo_ttft"),
    Result("miss_cost", "bench.engine.miss_cost"),
    Result("decoding", "bench.engine.decoding", needs=[Need.HISTORY]),
    Result("sampling", "bench.engine.sampling", needs=[Need.HISTORY]),
    Result("structured_output", "bench.engine.structured_output"),
    Result("images", "bench.engine.images"),
    Result("latent", "bench.engine.latent"),
    Result("chosen_keys", "bench.engine.chosen_keys"),
    Result("hybrid_documents", "bench.engine.hybrid_documents"),
    Result("lora", "bench.engine.lora"),
    Result("model_coverage", "bench.engine.model_coverage"),
    Result("paged_attention", "bench.engine.paged_attention", needs=[Need.CUDA]),
    Result("load_or_recompute", "bench.engine.load_or_recompute", reads_trace=True),
    Result("slow_disk", "bench.engine.slow_disk"),
    Result("routing", "bench.routing.routing", reads_trace=True),
    Result("cache_control", "bench.server.cache_control"),
    Result("serving", "bench.server.serving", ("--vllm", str(ENGINES)), [Need.ENGINES], is_sampled=True),
    Result("strangers", "bench.server.strangers", _OF_ENGINES, [Need.ENGINES], is_sampled=True),
    Result("last_copies", "bench.tiers.last_copies", reads_trace=True),
    Result("owner_thread", "bench.tiers.owner_thread"),
    Result("prefix_core", "bench.tiers.prefix_core"),
    Result("purge", "bench.tiers.purge"),
    Result("what_if", "bench.tiers.what_if", reads_trace=True),
    Result("store", "bench.store.store"),
    Result("store_peers", "bench.store.store_peers"),
    Result("store_race", "bench.store.store_race", (*_OF_ENGINES, "--lifeboat", str(LIFEBOAT)), [Need.ENGINES]),
    Result("io_uring", "bench.store.io_uring"),
    Result("store_bit_flips", "bench.store.store_bit_flips"),
    Result("object_requests", "bench.store.object_requests"),
    Result("remote_faults", "bench.store.remote_faults", needs=[Need.REDIS], is_sampled=True),
    Result("remote_speed", "bench.store.remote_speed", _OF_ENGINES, needs=[Need.REDIS, Need.ENGINES]),
    Result("attached", "bench.attached"),
    Result("observability_tokens", "bench.observability", ["balance", "explain"]),
    Result("observability_cardinality", "bench.observability", ["cardinality"]),
    Result("observability_remembering", "bench.observability", ["remembering"]),
    Result("observability_page", "bench.observability", ["page"]),
    Result("observability_cost", "bench.observability", ["cost"]),
    Result("cluster", "bench.cluster", _OF_ENGINES, needs=[Need.REDIS, Need.ENGINES]),
    _with_engines("connectors_cost", "bench.connectors", "hits", "cost"),
    _with_engines("connectors_cold", "bench.connectors", "cold"),
    _with_engines("connectors_head_to_head", "bench.connectors", "head_to_head", "--busy", "--lifeboat", str(LIFEBOAT)),
    _with_engines("connectors_faults", "bench.connectors", "faults", is_sampled=True),
    _with_engines("connectors_tiers", "bench.connectors", "tiers", "tier_cost", "tier_capacity", "tier_room"),
    _with_engines(
        "connectors_peers", "bench.connectors", "lmcache_l2", "corruption_peers", "generate", is_sampled=True
    ),
    _with_engines("sidecar", "bench.sidecar", "reuse"),
    _with_engines("sidecar_faults", "bench.sidecar", "faults", is_sampled=True),
    _with_engines("sidecar_speed", "bench.sidecar", "speed"),
    _with_engines("sidecar_crowd", "bench.sidecar", "crowd"),
    _with_engines("sidecar_killed_clients", "bench.sidecar", "killed_clients"),
    _with_engines("sidecar_foul_clients", "bench.sidecar", "foul_clients", is_sampled=True),
]
