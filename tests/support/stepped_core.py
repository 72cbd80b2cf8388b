"""An engine that a test steps by hand, with a model whose tokens are known."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from chaos import FakeClock
from small_models import VOCAB, byte_tokenizer
from transformers import PreTrainedModel

from kvtier import SamplingParams
from kvtier.engine import build_core as engine_build
from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.scheduler import Scheduler, Work
from kvtier.engine.stores import disk_store
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.store.record import Fault
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS

BLOCK_SIZE = 16


BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model, all groups together


MAX_STEPS = 2000  # of a test that ends; a step that has nothing to compute waits a moment


DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails


PLENTY = 200  # slots


class Gate:
    """What a test's reads of disks go through."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._lock = threading.Lock()
        self.num_waiting = 0

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def go_through(self) -> None:
        self._count(1)
        assert self._is_open.wait(DEADLINE_S), "the test never opened the gate"
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self.num_waiting += change


GATE = Gate()


class GatedStore(ReopeningStore):
    """A real store on a disk that hangs while the gate is closed."""

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        GATE.go_through()
        return super().read_many(keys, outs)


@pytest.fixture(autouse=True)
def _disk_with_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "ReopeningStore", GatedStore)


@contextmanager
def reads_hang() -> Iterator[None]:
    """Every disk of the test hangs."""
    GATE.close()
    try:
        yield
    finally:
        GATE.open()


def num_hanging() -> int:
    """Reads that wait for the gate."""
    return GATE.num_waiting


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """That of the engines which the test builds from now on: loads are late when the test says so."""
    clock = FakeClock()
    for part in (TieredCache, Scheduler):
        monkeypatch.setattr(engine_build, part.__name__, partial(part, clock=clock))
    return clock


@dataclass(frozen=True)
class Share:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    was_decoding: bool


def engine(
    model: PreTrainedModel,
    num_slots: int = PLENTY,
    folder: Path | None = None,
    num_host_slots: int = PLENTY,
    **scheduler: int,
) -> EngineCore:
    tables: dict[str, object] = {
        "device": {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": num_host_slots * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always", **scheduler},
    }
    if folder is not None:
        tables["disk"] = {"path": str(folder / "store"), "capacity": "64MiB", "read_timeout_s": DEADLINE_S}
    return build_core(model, byte_tokenizer(), as_config(tables))


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def add(core: EngineCore, prompt: Sequence[int], max_tokens: int = 8) -> Request:
    return core.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), NO_EXTRA_KEYS, arrived_at=0.0)


def step(core: EngineCore) -> list[Share]:
    """One step, and who computed how many tokens in it."""
    shares: list[Share] = []
    schedule = core.scheduler.schedule

    def seen() -> list[Work]:
        work = schedule()
        shares.extend(Share(item.request, item.num_tokens, item.request.is_decoding) for item in work)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", seen)
        core.step()
    return shares


def step_until(core: EngineCore, condition: Callable[[], bool]) -> list[list[Share]]:
    steps: list[list[Share]] = []
    while not condition():
        assert len(steps) < MAX_STEPS, "the engine makes no progress"
        steps.append(step(core))
    return steps


def finish(core: EngineCore) -> list[list[Share]]:
    return step_until(core, lambda: not core.has_work)


def finish_too_late(core: EngineCore, clock: FakeClock) -> None:
    """Go on until a read hangs, let the time of its load pass, and finish without it."""
    step_until(core, lambda: num_hanging() > 0)
    clock.now += 2 * DEADLINE_S
    finish(core)


def assert_nothing_leased(core: EngineCore) -> None:
    step_until(core, lambda: core.cache.num_in_flight == 0)
    core.cache.check()
    num_slots = core.config.device.capacity // BLOCK_BYTES
    assert core.cache.free_slots() == [num_slots] * len(core.cache.groups)


def store_prompt(model: PreTrainedModel, folder: Path, prompt: list[int]) -> None:
    """Have the prompt on disk, as an earlier process would have left it."""
    with engine(model, folder=folder) as core:
        add(core, prompt, max_tokens=1)
        finish(core)
