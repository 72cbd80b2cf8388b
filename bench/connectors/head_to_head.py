"""Measures our connector beside others in the real vLLM: a few documents, read by the engines in turns, cold and again.

vLLM's own cache holds one and a half of the documents. So an engine without a connector computes each document anew,
and is asked about each only once. All connectors have only host memory, except Lifeboat Cache, which needs a disk.

Half of vLLM's CPU time in a cold prompt is its OpenMP threads' busy waiting for each other, which grows with anything
else that runs on the machine. So the CPU time of a connector is measured once more with engines whose waiting threads
sleep (OMP_WAIT_POLICY=passive).

The progress is printed to stderr. A measurement takes about seven minutes, and about twelve with the busy loops.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foreign.offloading import offloading_vllm
from foreign.running import Vllm, make_model, transfer_config

from bench.connectors.connector_bed import Prompts, started_sidecar
from bench.connectors.vllm_engines import HOST_BYTES, Started, VllmEngines
from bench.gpu_progress import Clock
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

WAIT_POLICY = "OMP_WAIT_POLICY"
QUIET_CPU_S, QUIET_FOR_S, QUIET_WITHIN_S = 0.005, 0.05, 1.0  # an engine with so little CPU time in so long is idle


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
class Asked:
    """An engine, and the ids of the processes that were started for it: those of the engine and of its server."""

    engine: Vllm
    processes: Collection[int]

    def answer(self, document: list[int]) -> tuple[float, float, list[int]]:
        """Ask about the document. Return the TTFT, the CPU seconds until the engine is idle again, and the tokens."""
        before = self._cpu_s()
        answer = self.engine.generate([document], 1)
        self.engine.settle()
        self._wait_quiet()
        return answer["ttft_s"][0], self._cpu_s() - before, answer["tokens"][0]

    def _wait_quiet(self) -> None:
        """Wait until the processes are idle."""
        give_up_at, before = time.monotonic() + QUIET_WITHIN_S, self._cpu_s()
        while time.monotonic() < give_up_at:
            time.sleep(QUIET_FOR_S)
            now = self._cpu_s()
            if now - before < QUIET_CPU_S:
                return
            before = now

    def _cpu_s(self) -> float:
        return sum(map(_cpu_s_of, _descendants(self.processes)))


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of one engine about the documents, in the same order for all engines."""

    cold_s: list[float] = field(default_factory=list)  # until a document's first token, at its first reading
    cold_cpu_s: list[float] = field(default_factory=list)  # of the engine and its servers
    cold_tokens: list[list[int]] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)  # at each further reading
    warm_cpu_s: list[float] = field(default_factory=list)
    warm_tokens: list[list[int]] = field(default_factory=list)

    def num_wrong(self, right: Sequence[list[int]]) -> int:
        """Return how many answers differ from those in *right*, which has one answer per document."""
        times = len(self.warm_tokens) // len(right)
        sets = [list(right[start : start + NUM_DOCUMENTS]) for start in range(0, len(right), NUM_DOCUMENTS)]
        again = [tokens for of_set in sets for tokens in of_set * times]
        wrong = sum(mine != its for mine, its in zip(self.cold_tokens, right, strict=True))
        return wrong + sum(
            mine != its for mine, its in zip(self.warm_tokens, again[: len(self.warm_tokens)], strict=True)
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of sets of documents, and how often each set is read again."""

    num_sets: int
    num_readings: int


def head_to_head_rows(effort: Effort, python: str, folder: Path, is_busy: bool, lifeboat: Path | None) -> list[Row]:
    """Rows of all engines on a machine that does nothing else, and if *is_busy* also beside busy loops.

    *lifeboat* is the folder of the package lifeboatcache; without it that engine is not measured.
    """
    sizes, clock = effort.of(Sizes(3, 3), quick=Sizes(1, 1)), Clock.of(0)
    model, rows = make_model(python, folder), list[Row]()
    kinds: dict[str, Started] = dict(ENGINES)
    if lifeboat is not None:
        kinds[LIFEBOAT] = partial(_lifeboat, lifeboat)
    prompts = Prompts(DOCUMENT_TOKENS + QUESTION_TOKENS)
    with _running(kinds, python, model, folder / "spinning", prompts, clock) as engines:
        rows += _rows("quiet", _read(engines, prompts, sizes, clock))
        if is_busy:
            where = f"beside {NUM_BUSY_LOOPS} busy loops"
            clock.note(where)
            with _busy_loops():
                rows += _rows(where, _read(engines, prompts, sizes, clock))
    with _sleeping_threads(), _running(kinds, python, model, folder / "sleeping", prompts, clock) as engines:
        rows += _cpu_rows("waiting threads sleep", _read(engines, prompts, Sizes(sizes.num_sets, 0), clock))
    return rows


@contextmanager
def _running(
    kinds: Mapping[str, Started], python: str, model: Path, folder: Path, prompts: Prompts, clock: Clock
) -> Iterator[dict[str, Asked]]:
    """Start an engine of each kind, and ask each of them once, because the first prompt takes longer."""
    first, engines = prompts.next(), dict[str, Asked]()
    with ExitStack() as stack:
        for number, (name, started) in enumerate(kinds.items()):
            (own := folder / f"engine-{number}").mkdir(parents=True)
            before = _children(os.getpid())
            engine = stack.enter_context(started(python, model, own))
            engines[name] = Asked(engine, _children(os.getpid()) - before)
            engines[name].answer(first)
            clock.note(f"{name} runs")
        yield engines


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Set OMP_WAIT_POLICY=passive for engines that are started meanwhile, so that their waiting threads sleep."""
    before = os.environ.get(WAIT_POLICY)
    os.environ[WAIT_POLICY] = "passive"
    try:
        yield
    finally:
        os.environ.pop(WAIT_POLICY)
        if before is not None:
            os.environ[WAIT_POLICY] = before


def _read(engines: Mapping[str, Asked], prompts: Prompts, sizes: Sizes, clock: Clock) -> Mapping[str, Seen]:
    """Ask all engines about the same documents, each document in another random order of the engines."""
    seen, rng = {name: Seen() for name in engines}, random.Random(0)
    for number in range(sizes.num_sets):
        documents = [prompts.next() for _ in range(NUM_DOCUMENTS)]
        for reading in range(1 + sizes.num_readings):
            asked = [name for name in engines if not reading or name != ALONE]
            for document in documents:
                for name in rng.sample(asked, len(asked)):
                    ttft_s, cpu_s, tokens = engines[name].answer(document)
                    each = seen[name]
                    (each.warm_s if reading else each.cold_s).append(ttft_s)
                    (each.warm_cpu_s if reading else each.cold_cpu_s).append(cpu_s)
                    (each.warm_tokens if reading else each.cold_tokens).append(tokens)
        clock.note(f"set {number + 1} of {sizes.num_sets} is read")
    return seen


def _rows(where: str, seen: Mapping[str, Seen]) -> list[Row]:
    others = {name: each for name, each in seen.items() if name not in (ALONE, OURS)}
    ours, alone, native = seen[OURS], seen[ALONE], seen[NATIVE]
    best = min(statistics.mean(each.warm_s) for each in others.values())
    rows = []
    for name, each in seen.items():
        figures = {
            "cold, mean TTFT": (1e3 * statistics.mean(each.cold_s), "ms"),
            "cold, CPU seconds per document": (statistics.mean(each.cold_cpu_s), "s"),
        }
        if name != ALONE:
            figures |= {
                "warm, mean TTFT": (1e3 * statistics.mean(each.warm_s), "ms"),
                "warm, median TTFT": (1e3 * statistics.median(each.warm_s), "ms"),
                "warm, p99 of TTFT": (1e3 * _p99(each.warm_s), "ms"),
                "warm, CPU seconds per document": (statistics.mean(each.warm_cpu_s), "s"),
            }
        rows += [Row(f"{where}, {name}: {what}", value, unit) for what, (value, unit) in figures.items()]
        if name not in (ALONE, OURS):
            rows.append(Row(f"{where}, {name}: cold TTFT of that alone", ratio_of(each.cold_s, alone.cold_s), ""))
    wrong = sum(each.num_wrong(alone.cold_tokens) for each in seen.values())
    return [
        *rows,
        at_most(f"{where}: cold TTFT of that alone", ratio_of(ours.cold_s, alone.cold_s), "", 1.05),
        Row(f"{where}: CPU seconds, cold, of those alone", ratio_of(ours.cold_cpu_s, alone.cold_cpu_s), ""),
        at_most(f"{where}: warm, mean TTFT of the best other", statistics.mean(ours.warm_s) / best, "", 1),
        at_most(f"{where}: warm, p99 of vLLM's offloading's", _p99(ours.warm_s) / _p99(native.warm_s), "", 1),
        never(f"{where}: outputs that differ from vLLM's alone", wrong),
    ]


def _cpu_rows(where: str, seen: Mapping[str, Seen]) -> list[Row]:
    """Rows of the CPU seconds of cold documents."""
    alone, rows = seen[ALONE], list[Row]()
    for name, each in seen.items():
        mean = statistics.mean(each.cold_cpu_s)
        rows.append(Row(f"{where}, {name}: cold, CPU seconds per document", mean, "s"))
        if name not in (ALONE, OURS):
            ratio = ratio_of(each.cold_cpu_s, alone.cold_cpu_s)
            rows.append(Row(f"{where}, {name}: CPU seconds, cold, of those alone", ratio, ""))
    ours = ratio_of(seen[OURS].cold_cpu_s, alone.cold_cpu_s)
    return [
        *rows,
        at_most(f"{where}: CPU seconds, cold, of those alone", ours, "", 1.05),
        never(
            f"{where}: outputs that differ from vLLM's alone",
            sum(each.num_wrong(alone.cold_tokens) for each in seen.values()),
        ),
    ]


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


@contextmanager
def _busy_loops() -> Iterator[None]:
    """Run processes that compute without a pause."""
    with ExitStack() as stack:
        for _ in range(NUM_BUSY_LOOPS):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


def _cpu_s_of(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
    except OSError:  # it has ended
        return 0.0


def _children(pid: int) -> set[int]:
    """Return the ids of the processes that *pid* has started."""
    return _started().get(pid, set())


def _descendants(pids: Collection[int]) -> set[int]:
    """Return *pids* and the ids of all their descendants."""
    found, pending, started = set(pids), list(pids), _started()
    while pending:
        new = started.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


def _started() -> dict[int, set[int]]:
    """Return the ids of all processes, by the id of the process that has started them."""
    started: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            started.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), set()).add(int(stat.parent.name))
    return started
