"""Measures our connector beside others in the real vLLM: a few documents, read by the engines in turns, cold and again.

vLLM's own cache holds one and a half of the documents, so an engine without a connector computes each anew. All have
host memory alone, except Lifeboat Cache, which cannot be without a disk.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foreign.offloading import offloading_vllm
from foreign.running import Vllm, make_model, transfer_config

from bench.connectors.connector_bed import Prompts, started_sidecar
from bench.connectors.vllm_engines import HOST_BYTES, Started, VllmEngines
from bench.report import Effort, Row
from bench.rounds import at_most, never, ratio_of

DOCUMENT_TOKENS = 3072
NUM_DOCUMENTS = 6
QUESTION_TOKENS = 2
KV_BYTES = 19 << 20  # one and a half documents of 12 MiB, and the block that vLLM keeps for itself
NUM_BUSY_LOOPS = 2
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": KV_BYTES}

ALONE, OURS, NATIVE = "vLLM alone", "connector", "vLLM's offloading"
LMCACHE, LMCACHE_ON_OURS, LIFEBOAT = "LMCache", "LMCache's client on our sidecar", "Lifeboat Cache"

QUIET_CPU_S, QUIET_FOR_S, QUIET_WITHIN_S = 0.01, 0.1, 5.0  # so little in so long: what an engine has begun is over


@contextmanager
def _lmcache_on_ours(python: str, model: Path, folder: Path) -> Iterator[Vllm]:
    sidecar, _ = started_sidecar(folder, disk=None)
    with sidecar, Vllm(python, model, transfer_config(sidecar.endpoint), **OPTIONS) as engine:
        yield engine


@contextmanager
def _lifeboat(package: Path, python: str, model: Path, folder: Path) -> Iterator[Vllm]:
    disk = {"name": "disk", "type": "filesystem", "scope": "node", "enabled": True, "capacity_gb": 1.0}
    ladder = dict.fromkeys(("gpu", "cpu", "local_nvme", "shared", "archive"), "none")
    configuration = {
        "storage": {"tiers": [disk | {"path": str(folder / "lifeboat")}]},
        "compression": {"ladder": ladder},
        "dashboard": {"enabled": False},
    }
    module = "lifeboat_cache.integrations.vllm_tier"
    tier = {"type": "LifeboatTier", "module_path": module, "lifeboat_config": configuration}
    with offloading_vllm(python, model, [tier], HOST_BYTES, path=[package], **OPTIONS) as engine:
        yield engine


_VLLM = VllmEngines(OPTIONS, disk=None)
ENGINES: Mapping[str, Started] = {
    ALONE: _VLLM.alone,
    OURS: _VLLM.ours,
    NATIVE: _VLLM.native,
    LMCACHE: _VLLM.lmcache,
    LMCACHE_ON_OURS: _lmcache_on_ours,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of one engine, in the order in which the engines were asked."""

    cold_s: list[float] = field(default_factory=list)  # until a document's first token, at its first reading
    cold_cpu_s: list[float] = field(default_factory=list)  # of the engine and its servers
    warm_s: list[float] = field(default_factory=list)  # at each further reading
    warm_cpu_s: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # of all answers


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of sets of documents, and how often each set is read again."""

    num_sets: int
    num_readings: int


def head_to_head_rows(effort: Effort, python: str, folder: Path, is_busy: bool, lifeboat: Path | None) -> list[Row]:
    """Rows of all engines on a machine that does nothing else, and if *is_busy* also beside busy loops.

    *lifeboat* is the folder of the package lifeboatcache; without it that engine is not measured.
    """
    sizes = effort.of(Sizes(2, 4), quick=Sizes(1, 1))
    model, rows = make_model(python, folder), list[Row]()
    kinds: dict[str, Started] = dict(ENGINES)
    if lifeboat is not None:
        kinds[LIFEBOAT] = partial(_lifeboat, lifeboat)
    prompts = Prompts(DOCUMENT_TOKENS + QUESTION_TOKENS)
    with ExitStack() as stack:
        engines: dict[str, Vllm] = {}
        for number, (name, started) in enumerate(kinds.items()):
            (own := folder / f"engine-{number}").mkdir()
            engines[name] = stack.enter_context(started(python, model, own))
        first = prompts.next()
        for engine in engines.values():  # what comes first takes longer
            engine.generate([first], 1)
            _wait_quiet()
        rows += _rows("quiet", _read(engines, prompts, sizes))
        if is_busy:
            with _busy_loops() as pids:
                rows += _rows(f"beside {NUM_BUSY_LOOPS} busy loops", _read(engines, prompts, sizes, pids))
    return rows


def _read(
    engines: Mapping[str, Vllm], prompts: Prompts, sizes: Sizes, others: Sequence[int] = ()
) -> Mapping[str, Seen]:
    """Ask all engines about the same documents in turns. *others* are pids of processes that are not theirs."""
    seen = {name: Seen() for name in engines}
    number = 0
    for _ in range(sizes.num_sets):
        documents = [prompts.next() for _ in range(NUM_DOCUMENTS)]
        for reading in range(1 + sizes.num_readings):
            for document in documents:
                for name in sorted(engines, reverse=bool(number % 2)):
                    cpu_before = _cpu_s(others)
                    answer = engines[name].generate([document], 1)
                    engines[name].settle()
                    _wait_quiet(others)
                    cpu_s = _cpu_s(others) - cpu_before
                    (seen[name].warm_s if reading else seen[name].cold_s).append(answer["ttft_s"][0])
                    (seen[name].warm_cpu_s if reading else seen[name].cold_cpu_s).append(cpu_s)
                    seen[name].tokens.append(answer["tokens"][0])
                number += 1
    return seen


def _rows(where: str, seen: Mapping[str, Seen]) -> list[Row]:
    others = {name: each for name, each in seen.items() if name not in (ALONE, OURS)}
    ours, alone, native = seen[OURS], seen[ALONE], seen[NATIVE]
    best = min(statistics.mean(each.warm_s) for each in others.values())
    wrong = sum(mine != right for each in seen.values() for mine, right in zip(each.tokens, alone.tokens, strict=True))
    rows = []
    for name, each in seen.items():
        figures = {
            "cold, mean TTFT": (1e3 * statistics.mean(each.cold_s), "ms"),
            "cold, CPU seconds per document": (statistics.mean(each.cold_cpu_s), "s"),
            "warm, mean TTFT": (1e3 * statistics.mean(each.warm_s), "ms"),
            "warm, median TTFT": (1e3 * statistics.median(each.warm_s), "ms"),
            "warm, p99 of TTFT": (1e3 * _p99(each.warm_s), "ms"),
            "warm, CPU seconds per document": (statistics.mean(each.warm_cpu_s), "s"),
        }
        rows += [Row(f"{where}, {name}: {what}", value, unit) for what, (value, unit) in figures.items()]
        if name not in (ALONE, OURS):
            rows.append(Row(f"{where}, {name}: cold TTFT of that alone", ratio_of(each.cold_s, alone.cold_s), ""))
    return [
        *rows,
        at_most(f"{where}: cold TTFT of that alone", ratio_of(ours.cold_s, alone.cold_s), "", 1.05),
        at_most(f"{where}: CPU seconds, cold, of those alone", ratio_of(ours.cold_cpu_s, alone.cold_cpu_s), "", 1.05),
        at_most(f"{where}: warm, mean TTFT of the best other", statistics.mean(ours.warm_s) / best, "", 1),
        at_most(f"{where}: warm, p99 of vLLM's offloading's", _p99(ours.warm_s) / _p99(native.warm_s), "", 1),
        never(f"{where}: outputs that differ from vLLM's alone", wrong),
    ]


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


@contextmanager
def _busy_loops() -> Iterator[list[int]]:
    """Processes that compute without a pause; their ids."""
    with ExitStack() as stack:
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY_LOOPS)]
        for loop in loops:
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield [loop.pid for loop in loops]


def _wait_quiet(others: Sequence[int] = ()) -> None:
    """Return once the engines and their servers have hardly anything to do any more."""
    give_up_at = time.monotonic() + QUIET_WITHIN_S
    before = _cpu_s(others)
    while time.monotonic() < give_up_at:
        time.sleep(QUIET_FOR_S)
        now = _cpu_s(others)
        if now - before < QUIET_CPU_S:
            return
        before = now


def _cpu_s(others: Sequence[int]) -> float:
    """CPU seconds that the processes below this one have had, less the processes *others*."""
    return sum(_cpu_s_of(pid) for pid in _descendants(os.getpid()) if pid not in others)


def _cpu_s_of(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
    except OSError:  # it has ended
        return 0.0


def _descendants(root: int) -> list[int]:
    """Ids of all processes that *root* has started, and of those that these have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, pending = list[int](), [root]
    while pending:
        started = children.get(pending.pop(), [])
        found += started
        pending += started
    return found
