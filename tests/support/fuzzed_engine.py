"""A whole engine in a world of mishaps: the real `EngineCore` over a small model, with lanes, time and a disk that a
seed decides about."""

import errno
import queue
import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from chaos import NAMESPACE, FakeClock
from small_models import byte_tokenizer
from store_cases import rot
from transformers import PreTrainedModel

from kvtier.engine import build_core as engine_build
from kvtier.engine import core as engine_core
from kvtier.engine.build_core import build_core
from kvtier.engine.config import SchedulerConfig, as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.model.paged_layout import layout_of
from kvtier.engine.model.poisoned_cache import PoisonedCache
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.loading import MAX_PROMOTIONS
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import Request, RequestOptions
from kvtier.engine.scheduling.scheduler import Scheduler
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.scheduling.timeline import Caller
from kvtier.engine.scheduling.trail import Trails
from kvtier.store.blob_store import Blob, BlobStore, Evicted, StoreStatistics
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers, lower_tiers
from kvtier.tiers.naming.block_hash import ExtraKeys
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.pins import Pin
from kvtier.tiers.up import uploads
from kvtier.tiers.up.promotion import Hit, Promotion
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_SIZE = 8
NUM_NEW = 6
STEP_S = 0.01  # of the clock, for a step
# A disk may hang for ever. A device does not: what it is being copied from can be given to nobody meanwhile.
HANGS_S = {Route.HOST_TO_DISK: 1000.0, Route.DISK_TO_HOST: 1000.0, Route.HOST_TO_DEVICE: 3.0, Route.DEVICE_TO_HOST: 3.0}
COPY_S = 0.0001  # that a copy is said to have taken
# For copies that make room or for a window of them to get out of the way: what is not a promotion's deadline.
PATIENCE_S = 10.0
WAIT = LayerGate.wait
DOCUMENTS = range(4)
LENGTHS = (20, 64, 90)  # tokens of a document that a prompt begins with
QUESTIONS = range(3)


def document(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(256) for _ in range(max(LENGTHS))]


def prompt_of(rng: random.Random) -> list[int]:
    """One of a few dozen prompts: a document's beginning and a question."""
    question = random.Random(100 + rng.choice(QUESTIONS))
    return document(rng.choice(DOCUMENTS))[: rng.choice(LENGTHS)] + [question.randrange(256) for _ in range(5)]


@dataclass(frozen=True)
class Odds:
    """How bad the world is: shares of copies that fail and that hang, and of calls to the store that fail."""

    failing: float
    hanging: float
    store_failing: float


class Lane:
    """Runs what it is given when stirred: in any order, some of it failing before or after the copy, some of it
    hanging for as long as *clock* has not come so far, or until `let_go`."""

    def __init__(
        self, finished: "StirringQueue", rng: random.Random, odds: Odds, clock: FakeClock, hangs_s: float
    ) -> None:
        self._hangs_s = hangs_s
        self._finished = finished
        self._rng = rng
        self._odds = odds
        self._clock = clock
        self._capacity = rng.choice([1, 2, 6, 64])
        self._held: list[tuple[float, Transfer]] = []  # with the time before which it hangs
        self.num_hung = 0

    @property
    def num_pending(self) -> int:
        return len(self._held)

    def submit(self, transfer: Transfer) -> bool:
        if len(self._held) >= self._capacity:
            return False
        hangs = self._rng.random() < self._odds.hanging
        self.num_hung += hangs
        self._held.append((self._clock.now + (self._hangs_s if hangs else 0.0), transfer))
        return True

    def stir(self, share: float) -> None:
        """Finish about that share of what does not hang."""
        self._rng.shuffle(self._held)
        kept = []
        for until, transfer in self._held:
            if until > self._clock.now or self._rng.random() >= share:
                kept.append((until, transfer))
                continue
            dice = self._rng.random()
            if dice >= self._odds.failing / 2:
                transfer.run()
            if dice < self._odds.failing:
                transfer.result, transfer.error = None, OSError("the copy failed")
            transfer.seconds, transfer.finished_at = COPY_S, self._clock.now  # no clock of the machine's
            self._finished.put(transfer)
        self._held = kept

    def let_go(self) -> None:
        """Nothing hangs or fails from now on."""
        self._odds = Odds(0.0, 0.0, 0.0)
        self._held = [(0.0, transfer) for _, transfer in self._held]

    def close(self) -> bool:
        for _, transfer in self._held:
            transfer.error = LaneClosed()
            self._finished.put(transfer)
        self._held = []
        return True


class StirringQueue:
    """The queue of finished transfers, for a `TransferEngine`: who waits for one lets the world go on instead."""

    def __init__(self, rng: random.Random, clock: FakeClock) -> None:
        self._rng = rng
        self._clock = clock
        self._done: deque[Transfer] = deque()
        self.lanes: dict[Route, Lane] = {}

    def put(self, transfer: Transfer) -> None:
        self._done.append(transfer)

    def empty(self) -> bool:
        return not self._done

    def get_nowait(self) -> Transfer:
        if not self._done:
            raise queue.Empty
        return self._done.popleft()

    def get(self, timeout: float) -> Transfer:
        if not self._done:
            self._clock.now += timeout
            self.stir()
        return self.get_nowait()

    def stir(self) -> None:
        for lane in self.lanes.values():
            if self._rng.random() < 0.7:
                lane.stir(self._rng.choice([0.3, 1.0]))


class FaultyStore:
    """A real store on a disk that fails now and then, before or after the work is done, and is full for a while."""

    def __init__(self, store: BlobStore, rng: random.Random, odds: Odds) -> None:
        self.store = store
        self._rng = rng
        self.odds = odds
        self.is_full = False
        self.is_gone = False

    def contains(self, key: bytes) -> bool:
        return self.store.contains(key)

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        self._may_fail()
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.store.put_many(blobs)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        self._may_fail()
        return self.store.read_many(keys, outs)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._may_fail()
        self.store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._may_fail()
        return self.store.delete(keys)

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        self._may_fail()
        return self.store.evict(num_bytes, limit, tenant)

    def keys(self) -> Iterator[bytes]:
        self._may_fail()
        return self.store.keys()

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        return self.store.verify()

    def sync(self) -> None:
        self.store.sync()

    def statistics(self) -> StoreStatistics:
        return self.store.statistics()

    def check(self) -> None:
        self.store.check()

    def close(self) -> None:
        self.store.close()

    def rot(self) -> None:
        """Flip a bit of some payload."""
        keys = list(self.store.keys())
        if not keys:
            return
        key = self._rng.choice(keys)
        if isinstance(self.store, MemoryStore):
            rot(self.store, key, self._rng)
        elif isinstance(self.store, LmdbStore) and (place := self.store.place(key)) is not None:
            path, offset, num_bytes = place
            with path.open("r+b") as file:
                at = offset + self._rng.randrange(num_bytes)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    def lose(self) -> None:
        """Delete some record behind the engine's back."""
        if keys := list(self.store.keys()):
            self.store.delete([self._rng.choice(keys)])

    def _may_fail(self) -> None:
        if self.is_gone or self._rng.random() < self.odds.store_failing:
            raise OSError(errno.EIO, "Input/output error")


class EngineTime:
    """The clock as the engine's own module sees it: each look at it takes a moment, so that a step does."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        self._clock.now += 1e-3
        return self._clock.now

    def sleep(self, seconds: float) -> None:
        self._clock.now += seconds


@dataclass(eq=False)
class Asked:
    """A request, and what plain decoding of its model answers."""

    request: Request
    lora: str | None


@dataclass
class Tally:
    """What a run has met, so that it can be seen that runs are worth something."""

    num_answers: int = 0
    num_aborted: int = 0
    num_hung: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("device", "host", "disk", "recomputed"), 0))
    num_late: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    num_missed_layers: int = 0

    def plus(self, other: "Tally") -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                setattr(self, name, {key: mine[key] + value[key] for key in value})
            else:
                setattr(self, name, mine + value)


class FuzzedEngine:
    """One run: an engine, and random things that happen to it. `run` raises AssertionError for whatever is wrong."""

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        folder: Path,
        patch: pytest.MonkeyPatch,
        adapters: dict[str, Path],
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = FakeClock()
        self.tally = Tally()
        self._asked: list[Asked] = []
        self._promotions: list[Promotion] = []
        self._pins: list[Pin] = []
        self._loras = [None, *adapters]
        self.odds = Odds(rng.choice([0.0, 0.02, 0.2]), rng.choice([0.0, 0.0, 0.03]), rng.choice([0.0, 0.02, 0.2]))
        self.timeout_s = rng.choice([0.3, 2.0])
        self._patch = patch
        self._model = model
        self._adapters = adapters
        forgets = any(group.forgets for group in layout_of(model, BLOCK_SIZE).groups)
        retention = rng.choice([None, None, *([0, 8, 32] if forgets else [0])])
        layout = layout_of(model, BLOCK_SIZE, state_interval=retention)
        num_device = rng.choice([15, 18, 24, 36])  # 15: the longest request alone
        num_host = rng.choice([0, 3, 10, 24, 24, 80, 80])
        self._host_bytes = layout.capacity_for(num_host, rng.choice([1, 4, 20])) if num_host else 0
        self._block_bytes = max(layout.block_bytes)
        self.store = self._new_store(folder) if num_host and rng.random() < 0.75 else None
        self._options = {
            "by_layers": rng.random() < 0.5,
            "load": rng.choice(["always", "split", "cost"]),
            "prefill_chunk": rng.choice([8, 13, 32]),
            "token_budget": rng.choice([16, 40, 128]),
            "max_running": rng.choice([1, 3, 8]),
        }
        self._device = {
            "capacity": layout.capacity_for(num_device, rng.choice([2, 3, 8])),
            "block_size": BLOCK_SIZE,
            "partial_blocks": rng.random() < 0.7,
            "poison": rng.random() < 0.3,
        }
        if retention is not None:
            self._device["retention_tokens"] = retention
        self._look_ahead = rng.choice([0.0, 0.3])
        self._max_at_once = rng.choice([2, 4, 8])
        self._budget = rng.choice([None, None, 4 * self._block_bytes])
        self.core = self._start()
        self._num_slots = self.core.cache.free_slots()

    def run(self, num_steps: int) -> None:
        """Let so many things happen, then let all requests finish, and look at what is left."""
        for _ in range(num_steps):
            self._something_happens()
        self._finish()

    def restart(self) -> None:
        """End the engine and start another on the same store, in a world without mishaps."""
        self.core.close(self._let_a_moment_pass)
        self.odds = Odds(0.0, 0.0, 0.0)
        self.core = self._start()

    def flush(self) -> None:
        """Write what is cached to disk, as far as that works."""
        self.core.cache.drain.flush(PATIENCE_S, self._let_a_moment_pass)
        self._settle()

    def close(self) -> None:
        """End the engine and its store."""
        self.core.close(self._let_a_moment_pass)
        if self.store is not None:
            self.store.close()

    def ask(self) -> None:
        """A request comes. The queue may refuse it."""
        rng = self.rng
        options = RequestOptions(
            priority=rng.choice([0, 0, 0, -1, 5]),
            reads_cache=rng.random() > 0.05,
            max_load_tokens=rng.choice([0, 16]) if rng.random() < 0.1 else None,
        )
        lora = rng.choice(self._loras) if rng.random() < 0.3 else None
        extra = ExtraKeys(
            cache_salt=rng.choice([None] * 7 + ["b"]), lora=None if lora is None else self.core.lora_key(lora)
        )
        sampling = SamplingParams(
            max_tokens=rng.choice([1, NUM_NEW]), ignore_eos=True, prompt_logprobs=1 if rng.random() < 0.1 else None
        )
        caller = Caller(str(len(self._asked)))
        self._asked.append(Asked(self.core.add(prompt_of(rng), sampling, extra, self.clock.now, options, caller), lora))

    def step(self) -> None:
        """One step, and all that must be true after it."""
        self.clock.now += STEP_S
        polled_at = self.clock.now
        self.core.step()
        self._timed_pins.tick()
        self.core.check()
        self._promotions = [promotion for promotion in self._promotions if not promotion.done]
        for promotion in self._promotions:
            assert promotion.deadline is not None, "a promotion without a deadline"
            assert promotion.deadline > polled_at, f"a promotion is late by {polled_at - promotion.deadline:.2f} s"

    def answers(self) -> list[tuple[Asked, bool]]:
        """All requests so far, each with whether it was answered to its end."""
        return [(asked, asked.request.finish_reason == "length") for asked in self._asked]

    def assert_nothing_leased(self) -> None:
        """Every lease is back, on device and host, and nothing is under way."""
        cache = self.core.cache
        cache.check()
        assert not self.core.has_work
        assert cache.num_in_flight == 0, "copies are under way that nobody runs"
        assert cache.free_slots() == self._num_slots, "a device slot leaked"
        for pool in (slots.pool for slots in self._host_slots):
            assert pool.num_free == pool.num_slots, "a host slot leaked"

    def _something_happens(self) -> None:
        happenings = [
            (30, self.ask if len(self._unfinished()) < self._max_at_once else self.step),
            (100, self.step),
            (80, self._queue.stir),
            (4, self._abort),
            (4, self._rot_a_host_block),
            (3, self._let_time_pass),
            (3, self._hold_or_let_go),
            (0.3, self.core.reset),
        ]
        if self.store is not None:
            happenings += [(4, self.store.rot), (2, self.store.lose), (2, self._change_the_disk)]
        weights, choices = zip(*happenings, strict=True)
        self.rng.choices(choices, weights)[0]()

    def _finish(self) -> None:
        """The world gets no better, and every request ends all the same; then what hangs is let go."""
        worked_at = self.clock.now
        patience_s = MAX_PROMOTIONS * self.timeout_s + PATIENCE_S
        while self.core.has_work:
            before = self._progress()
            self.step()
            if self._progress() != before:
                worked_at = self.clock.now
            assert self.clock.now - worked_at < patience_s, f"nothing goes on for {patience_s} s: {self._stuck()}"
        for lane in self._queue.lanes.values():
            self.tally.num_hung += lane.num_hung
            lane.let_go()
        for asked, is_answered in self.answers():
            scores = asked.request.scores
            assert scores is None or scores.is_complete or not is_answered, "an answer without all its scores"
        for pin in self._pins:
            self.core.cache.pins.unpin(pin)
        self._pins.clear()
        self._settle()
        self.assert_nothing_leased()
        self._count()

    def _settle(self) -> None:
        """Let every copy end."""
        for _ in range(1000):
            for lane in self._queue.lanes.values():
                lane.stir(1.0)
            self.core.cache.poll()
            if not any(lane.num_pending for lane in self._queue.lanes.values()):
                return
        raise AssertionError("copies never end")

    def _progress(self) -> tuple[int, ...]:
        requests = [asked.request for asked in self._asked]
        num_done = sum(request.finish_reason is not None for request in requests)
        return num_done, sum(request.num_computed for request in requests), sum(len(r.generated) for r in requests)

    def _stuck(self) -> str:
        statistics = self.core.statistics
        return f"{statistics.num_waiting} wait, {statistics.num_promoting} are promoted, {statistics.num_running} run"

    def _unfinished(self) -> list[Request]:
        return [asked.request for asked in self._asked if asked.request.finish_reason is None]

    def _abort(self) -> None:
        if requests := self._unfinished():
            self.core.abort(self.rng.choice(requests))

    @property
    def _host_slots(self) -> Sequence[GroupSlots]:
        """Of each group, if there is host memory."""
        lower = self.core.cache.lower
        return lower.index.host if isinstance(lower, LocalTiers) else ()

    def _rot_a_host_block(self) -> None:
        group_id, host = self.rng.randrange(len(self.core.cache.groups)), self._host_slots
        slots = host[group_id].pool.cached_slots() if host else []
        if slots:
            block = self.core.cache.residency.groups[group_id].memory.host_block(self.rng.choice(slots))
            block[self.rng.randrange(len(block))] ^= 1 << self.rng.randrange(8)

    def _let_a_moment_pass(self, num_left: int) -> None:
        self.clock.now += STEP_S

    def _let_time_pass(self) -> None:
        self.clock.now += self.rng.choice([0.1, 1.0, 30.0])

    def _hold_or_let_go(self) -> None:
        if self._pins and self.rng.random() < 0.5:
            self.core.cache.pins.unpin(self._pins.pop(self.rng.randrange(len(self._pins))))
            return
        token_ids = prompt_of(self.rng)
        pin = self.core.cache.pins.pin(self.core.chain(token_ids, ExtraKeys()), len(token_ids))
        if pin is not None:
            self._pins.append(pin)

    def _change_the_disk(self) -> None:
        assert self.store is not None
        self.store.is_full, self.store.is_gone = self.rng.choice([(False, False), (True, False), (False, True)])

    def _count(self) -> None:
        tally, cache = self.tally, self.core.cache.statistics()
        for asked, is_answered in self.answers():
            tally.num_answers += is_answered
            tally.num_aborted += not is_answered
            if (tokens := asked.request.tokens) is not None:
                assert tokens.num_tokens == len(asked.request.prompt_token_ids), "tokens that come from nowhere"
                assert sum(tokens.reasons.values()) == tokens.recomputed, "tokens without a reason"
                for tier in tally.tokens:
                    tally.tokens[tier] += getattr(tokens, tier)
                tally.num_late += "deadline" in tokens.reasons
            for past in self.core.explainer.find(asked.request.timeline.caller.request_id, None):
                found = self.core.explainer.evidence(past).explanation()
                told = [sum(row.end - row.start for row in found.rows if row.tier is tier) for tier in Tier]
                balance = asked.request.balance()
                assert told == [balance.device, balance.host, balance.disk, balance.remote], (
                    "an explanation that is not the balance"
                )
        tally.num_corrupt += sum(sum(tier.corrupt.values()) for tier in cache.tiers.values())
        tally.num_failed += sum(route.num_failed for route in cache.routes.values())

    def _new_store(self, folder: Path) -> FaultyStore:
        rng = self.rng
        num_blocks = rng.choice([12, 40, 400])
        if rng.random() < 0.2:
            shutil.rmtree(folder, ignore_errors=True)
            return FaultyStore(LmdbStore(folder, 400 * charged_bytes(self._block_bytes)), rng, self.odds)
        return FaultyStore(MemoryStore(num_blocks * charged_bytes(self._block_bytes)), rng, self.odds)

    def _start(self) -> EngineCore:
        """An engine whose lanes, clock and disk are this run's."""
        self._queue = StirringQueue(self.rng, self.clock)
        self._queue.lanes = {
            route: Lane(self._queue, self.rng, self.odds, self.clock, hangs_s) for route, hangs_s in HANGS_S.items()
        }
        if self.store is not None:
            self.store.odds, self.store.is_full, self.store.is_gone = self.odds, False, False
        transfers = TransferEngine(self._queue.lanes, self._queue)  # type: ignore[arg-type]  # what it uses of a queue
        self._patch.setattr(engine_build, "ThreadLane", lambda *_, **__: None)
        self._patch.setattr(engine_build, "TransferEngine", lambda *_: transfers)
        self._patch.setattr(engine_core, "time", EngineTime(self.clock))
        self._patch.setattr(engine_build, "time", EngineTime(self.clock))
        self._patch.setattr(engine_build, "TieredCache", partial(self._cache, TieredCache))
        self._patch.setattr(engine_build, "PoisonedCache", partial(self._cache, PoisonedCache))
        self._patch.setattr(engine_build, "Scheduler", self._scheduler)
        self._patch.setattr(uploads, "BY_LAYERS_BYTES", 0)
        self._patch.setattr(LayerGate, "wait", self._waiting())
        tables = {
            "device": self._device,
            "host": {"capacity": self._host_bytes},
            "scheduler": self._options,
            "lora": {name: {"path": str(folder)} for name, folder in self._adapters.items()},
        }
        return build_core(self._model, byte_tokenizer(), as_config(tables))

    def _cache(self, kind: type[TieredCache], *parts: object, **options: object) -> TieredCache:
        """What the engine makes, with this run's disk and clock; its promotions are noted."""
        groups, memories, transfers, _ = parts
        disk = None if self.store is None else DiskTier(self.store, NAMESPACE, self.clock, self._budget)
        lower = lower_tiers(groups, memories, transfers, disk, self.clock)  # type: ignore[arg-type]
        cache = kind(groups, memories, transfers, lower, self.clock, **options)  # type: ignore[arg-type]
        promote = cache.promote

        def noted(hit: Hit, timeout_s: float | None = None) -> Promotion:
            self._promotions.append(promote(hit, timeout_s))
            return self._promotions[-1]

        cache.promote = noted  # type: ignore[method-assign]
        return cache

    def _scheduler(  # type: ignore[no-untyped-def]
        self,
        cache: TieredCache,
        config: SchedulerConfig,
        timeout_s: object,
        *parts: object,
        trails: Trails,
        **_: object,
    ):
        """What the engine makes, with this run's clock, and a deadline although the engine knows of no disk."""
        self._timed_pins, look_ahead = TimedPins(cache, self.clock), None
        if self.store is not None and self._look_ahead:
            max_bytes = int(self._look_ahead * self._host_bytes)
            look_ahead = LookAhead(cache, self._timed_pins, lambda: max_bytes, lasts_s=5.0)
        return Scheduler(cache, config, self.timeout_s, *parts, clock=self.clock, look_ahead=look_ahead, trails=trails)  # type: ignore[arg-type]

    def _waiting(self) -> Callable[[LayerGate, int, int, float], None]:
        """How computing waits for a layer here: some copies go on, and if it has not come then, time is over."""

        def wait(gate: LayerGate, layer: int, num_layers: int, give_up_at: float) -> None:
            self._queue.stir()
            before = gate.missed
            WAIT(gate, layer, num_layers, 0.0)
            self.tally.num_missed_layers += gate.missed and not before

        return wait
