"""What does the prefix cache's bookkeeping cost, next to vLLM's in the same process? No bytes are moved.

Times are processor time of the one thread: nothing here waits, and other processes disturb that less.

vLLM is measured too if it can be imported. The Python files of its wheel suffice, together with the packages that they
import:

    unzip vllm-0.33.0-*.whl '*.py' 'vllm-*.dist-info/*' -d vllm_files
    PYTHONPATH=vllm_files:. .venv/foreign/bin/python -m bench.tiers.prefix_core
"""

import gc
import hashlib
import importlib.util
import mmap
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from vllm_core import VllmCore, VllmOffloadingCore, vllm_naming, vllm_small_calls, vllm_version

from bench.report import Row, arguments, publish
from bench.rounds import at_most, spread
from kvtier.engine.config import SchedulerConfig
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.scheduler import Scheduler
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.naming.block_hash import BlockChain, HashAlgorithm
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup, FullAttention, SlidingWindow
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, InlineLane, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # of a long prompt; "per block" means per block of the prompt, whatever the number of groups
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
SUFFIX_TOKENS = 5  # of the prompt, behind its last full block: left to compute after a hit
VOCAB = 128_256
NUM_SLOTS = 10_000  # of a pool: one long prompt fits, another evicts it
WINDOWS = (None, 4096, 4096)  # of the hybrid model's three groups
BLOCK_BYTES = 64  # copied by a spill only
LOAD_TIMEOUT_S = 10.0  # any value: nothing is loaded here
SMALL_CALLS = 2000  # timed together, as one
NUM_RUNNING = 64
# vLLM's times where it is not installed: two EPYC cores, Python 3.11. Except for the hybrid hit and those with a host
# tier, they were measured on a day on which everything took 1.4 times as long as on other days. So no promise is judged
# by them.
SOURCE = "vLLM 0.33.0, measured earlier"

Work = Callable[[], object]
Prepare = Callable[[], Work]  # makes new input, untimed, and returns the work to time


class ApartLane(InlineLane):
    """A lane that works in the caller's thread and counts the seconds: a real lane's thread would do it meanwhile."""

    seconds = 0.0

    def submit(self, transfer: Transfer) -> bool:
        started = time.thread_time()
        submitted = super().submit(transfer)
        self.seconds += time.thread_time() - started
        return submitted


class KvtierCore:
    """A `TieredCache` called as the engine's scheduler calls it, over memory of tiny blocks. Like `VllmCore`."""

    def __init__(
        self,
        num_slots: int,
        windows: Sequence[int | None] = (None,),
        events: bool = False,
        num_host_slots: int = 0,
        step_tokens: int = 512,
    ) -> None:
        groups: list[AttentionGroup] = [
            FullAttention(BLOCK_SIZE) if window is None else SlidingWindow(BLOCK_SIZE, window) for window in windows
        ]
        memories = [CpuMemory(np.zeros((num_slots, BLOCK_BYTES), np.uint8), num_host_slots) for _ in groups]
        finished = Finished()
        self._lanes = {route: ApartLane(finished) for route in Route}
        lanes = dict(self._lanes)
        self._events = EventLog() if events else None
        transfers = TransferEngine(lanes, finished)
        lower = lower_tiers(groups, memories, transfers, events=self._events)
        options = CacheOptions(min_clean_ahead=2 * step_tokens // BLOCK_SIZE)  # as the engine sets it
        self.cache = TieredCache(groups, memories, transfers, lower, options=options, events=self._events)

    @staticmethod
    def prompt(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> BlockChain:
        """The prompt's names as new objects, whose hashes no dict has cached."""
        chain = BlockChain(BLOCK_SIZE)
        chain.extend(token_ids)
        return chain

    def serve(self, prompt: BlockChain) -> int:
        """Admit a request, allocate its slots, commit its full blocks, release them; returns the tokens that hit."""
        cache, num_tokens = self.cache, NUM_TOKENS + SUFFIX_TOKENS
        hit = cache.lookup(prompt, num_tokens)
        cache.plans.num_leased(hit)
        cache.free_slots()
        cache.make_room(hit)
        junction = cache.lookups.junction(hit)
        promotion = cache.promote(hit)
        assert promotion.done, "a block was not on the device"
        num_hit, tables = promotion.num_tokens, promotion.tables
        cache.forget_read(tables, num_hit)
        slots = cache.allocate([-(-num_tokens // BLOCK_SIZE) - len(table) for table in tables])
        assert slots is not None, "the pool is too small for the prompt"
        for table, new in zip(tables, slots, strict=True):
            table.extend(new)
        if num_hit < NUM_TOKENS:
            boundaries = [num_tokens - 1] if junction is None else [num_tokens - 1, junction]
            cache.commit(tables, prompt, num_hit, num_tokens, boundaries)
        if self._events is not None:
            self._events.take()
        cache.release(tables)
        return num_hit

    def serve_by_chunks(self, prompt: BlockChain, chunk_tokens: int) -> int:
        """As `serve`, for a prompt computed *chunk_tokens* a step, with a step's calls of poll and spill."""
        cache, num_tokens = self.cache, NUM_TOKENS + SUFFIX_TOKENS
        hit = cache.lookup(prompt, num_tokens)
        cache.plans.num_leased(hit)
        cache.free_slots()
        cache.make_room(hit)
        cache.lookups.junction(hit)
        promotion = cache.promote(hit)
        done, tables = promotion.num_tokens, promotion.tables
        while done < num_tokens:
            end = min(num_tokens, done + chunk_tokens)
            cache.poll()
            cache.forget_read(tables, done)
            slots = cache.allocate([-(-end // BLOCK_SIZE) - len(table) for table in tables])
            assert slots is not None, "the pool is too small for the prompt"
            for table, new in zip(tables, slots, strict=True):
                table.extend(new)
            if end // BLOCK_SIZE > done // BLOCK_SIZE:
                cache.commit(tables, prompt, done, end, [num_tokens - 1])
            cache.spill()
            done = end
        cache.release(tables)
        return promotion.num_tokens

    @property
    def lane_seconds(self) -> float:
        """Processor time of the copies, which are the work of other threads."""
        return sum(lane.seconds for lane in self._lanes.values())

    @property
    def num_lost(self) -> int:
        """Number of blocks that left the device without the copy in host memory that they should have had."""
        return self.cache.statistics().tiers[Tier.DEVICE].dropped_spills


def naming(token_ids: Sequence[int] | npt.NDArray[np.int32], algorithm: HashAlgorithm) -> Work:
    """Work that names all full blocks of a new prompt."""
    chain = BlockChain(BLOCK_SIZE, algorithm=algorithm)
    return lambda: chain.extend(token_ids)


def small_calls(num_slots: int, num_times: int) -> Work:
    """Work that allocates, leases and twice releases *num_slots* blank slots of a pool, *num_times* times."""
    pool = BlockPool(NUM_SLOTS)

    def calls() -> None:
        for _ in range(num_times):
            slots = pool.allocate(num_slots)
            assert slots is not None
            pool.lease(slots)
            pool.release(slots)
            pool.release(slots)

    return calls


@dataclass(frozen=True)
class Comparison:
    """One operation, of kvtier (*ours*) and of vLLM.

    *min_factor* is how much faster kvtier's was promised to be, None without a promise. *earlier* is vLLM's time as
    measured before, for machines without it.
    """

    name: str
    unit: str
    per_second: float  # how many of *unit* a second is
    min_factor: float | None
    earlier: float
    ours: Prepare
    vllm: Prepare | None
    hits: int | None = None  # tokens that must hit, of both
    apart: Callable[[], float] = lambda: 0.0  # seconds in *ours* so far that do not count


def comparisons(with_vllm: bool, events: bool) -> list[Comparison]:
    """All comparisons, with or without KV *events*. Fills the caches."""
    token_ids = random_tokens(0)[:NUM_TOKENS]
    as_list = token_ids.tolist()
    per_token, per_block = 1e9 / NUM_TOKENS, 1e9 / NUM_BLOCKS

    def naming_of(name: str, tokens: Any, ours: HashAlgorithm, vllms: str, factor: float, earlier: float) -> Comparison:
        vllm = partial(vllm_naming, as_list, vllms) if with_vllm else None
        unit = "ns/token"
        return Comparison(f"naming, {name}", unit, per_token, factor, earlier, partial(naming, tokens, ours), vllm)

    def serving(
        name: str, num_slots: int, windows: Sequence[int | None], new: bool, factor: float, earlier: float
    ) -> Comparison:
        ours = serving_work(KvtierCore(num_slots, windows, events=events), new)
        # vLLM's groups share one pool.
        vllm = serving_work(VllmCore(num_slots * len(windows), windows, events=events), new) if with_vllm else None
        hits = 0 if new else NUM_TOKENS
        if events:  # four fifths of vLLM's cold cost: nothing is promised
            return Comparison(f"{name}, events", "ns/block", per_block, None, earlier, ours, vllm, hits)
        return Comparison(name, "ns/block", per_block, factor, earlier, ours, vllm, hits)

    def chunked(chunk_tokens: int, num_host_slots: int, factor: float, earlier: float) -> Comparison:
        core = KvtierCore(NUM_SLOTS, num_host_slots=num_host_slots, step_tokens=chunk_tokens)
        ours = chunked_work(core, chunk_tokens)
        vllm = None
        if with_vllm:
            vllms = VllmOffloadingCore(NUM_SLOTS, num_host_slots) if num_host_slots else VllmCore(NUM_SLOTS)
            vllm = chunked_work(vllms, chunk_tokens)
        tiers = "device and host, spilling" if num_host_slots else "device"
        name = f"cold, {chunk_tokens} tokens a step, {tiers}"
        return Comparison(name, "ns/block", per_block, factor, earlier, ours, vllm, 0, lambda: core.lane_seconds)

    def small(num_blocks: int, earlier: float) -> Comparison:
        vllm = partial(vllm_small_calls, num_blocks, SMALL_CALLS) if with_vllm else None
        ours = partial(small_calls, num_blocks, SMALL_CALLS)
        name = f"take, touch, 2 x free of {num_blocks} blocks"
        return Comparison(name, "us", 1e6 / SMALL_CALLS, 1.5, earlier, ours, vllm)

    return [
        naming_of("sha256, list", as_list, HashAlgorithm.SHA256, "sha256", 2.2, 87),
        naming_of("sha256, int32 array (vLLM: list)", token_ids, HashAlgorithm.SHA256, "sha256", 3.8, 87),
        serving("hit", NUM_SLOTS, (None,), False, 8.0, 1077),
        serving("cold", NUM_SLOTS, (None,), True, 6.0, 1646),
        serving("hybrid hit", NUM_SLOTS, WINDOWS, False, 4.0, 811),
        *(
            ()
            if events
            else (
                chunked(512, 0, 1.6, 2200),
                chunked(2048, 0, 2.8, 1800),
                chunked(512, 2 * NUM_SLOTS, 3.5, 18_800),
                chunked(2048, 2 * NUM_SLOTS, 3.5, 17_700),
            )
        ),
        small(1, 1.54),
        small(4, 3.2),
        small(16, 8.9),
        small(64, 32),
    ]


def keyed_naming(num_rounds: int) -> list[Row]:
    """Rows of naming by keyed hashes, next to sha256: an unkeyed hash must be cryptographic to be safe."""
    key = bytes(range(32))
    hashes: dict[str, Callable[[bytes], Any]] = {
        "sha256": hashlib.sha256,
        "blake2b with a key": partial(hashlib.blake2b, digest_size=32, key=key),
    }
    if importlib.util.find_spec("blake3") is not None:
        hashes["blake3 with a key"] = partial(importlib.import_module("blake3").blake3, key=key)
    token_ids = random_tokens(0)[:NUM_TOKENS]
    cases = [
        (f"{kind}, blocks of {block_size}", tokens, block_size)
        for kind, tokens in (("list", token_ids.tolist()), ("int32 array", token_ids))
        for block_size in (16, 32)
    ]
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(num_rounds):
        for case, tokens, block_size in cases:
            for name, new in hashes.items():
                took = seconds(partial(running_names, new, tokens, block_size))
                times.setdefault((case, name), []).append(1e9 * took / NUM_TOKENS)
    return [
        Row(f"hash alone, {case}: {name}", statistics.median(took), "ns/token") for (case, name), took in times.items()
    ]


def running_names(
    new: Callable[[bytes], Any], tokens: list[int] | npt.NDArray[np.int32], block_size: int
) -> list[bytes]:
    """Names as `BlockChain` makes them for a prompt without extra keys, by the hash *new*."""
    ids = np.frombuffer(array("I", tokens), "<u4") if isinstance(tokens, list) else tokens
    hasher = new(bytes(32))
    return [hasher.digest() for _ in map(hasher.update, ids.view(f"V{4 * block_size}").tolist())]


def serving_work(core: KvtierCore | VllmCore, new: bool) -> Prepare:
    """Work that serves the same prompt each time, all of it cached and free, or, if *new*, another each time."""
    numbers: Iterator[int] = count() if new else iter(lambda: 0, 1)

    def prepare() -> Work:
        return partial(core.serve, core.prompt(random_tokens(next(numbers)).tolist()))

    for _ in range(3):  # fills the pool
        prepare()()
    return prepare


def chunked_work(core: KvtierCore | VllmCore, chunk_tokens: int) -> Prepare:
    """Work that computes another prompt each time, *chunk_tokens* a step."""
    numbers = count()

    def prepare() -> Work:
        prompt = core.prompt(random_tokens(next(numbers)).tolist())
        assert not core.num_lost, f"{core.num_lost} blocks were not copied to host memory"
        return lambda: core.serve_by_chunks(prompt, chunk_tokens)

    for _ in range(3):  # fills the pool
        prepare()()
    return prepare


def random_tokens(seed: int) -> npt.NDArray[np.int32]:
    """The token ids of a long prompt."""
    return np.random.default_rng(seed).integers(VOCAB, size=NUM_TOKENS + SUFFIX_TOKENS, dtype=np.int32)


def seconds(work: Work, hits: int | None = None) -> float:
    """Processor time of *work*, with garbage collection off. AssertionError unless it gives *hits*."""
    gc.collect()
    gc.disable()
    started = time.thread_time()
    result = work()
    took = time.thread_time() - started
    gc.enable()
    assert hits is None or result == hits, f"{result} tokens hit, not {hits}"
    return took


def compare(all_of_them: Sequence[Comparison], num_rounds: int, version: str | None) -> list[Row]:
    """Run each comparison once a round, kvtier and vLLM in random order; gives medians of the factors in a round."""
    rng = random.Random(0)
    ours: dict[str, list[float]] = {it.name: [] for it in all_of_them}
    theirs: dict[str, list[float]] = {it.name: [] for it in all_of_them}
    for round_id in range(num_rounds + 1):  # the first one does not count
        for it in all_of_them:
            both = [(ours, it.ours)] if it.vllm is None else [(ours, it.ours), (theirs, it.vllm)]
            for times, prepare in rng.sample(both, len(both)):
                work, apart = prepare(), it.apart()
                took = (seconds(work, it.hits) - (it.apart() - apart)) * it.per_second
                if round_id:
                    times[it.name].append(took)
    rows = []
    for it in all_of_them:
        other = theirs[it.name] or [it.earlier] * num_rounds
        factors = [theirs_ / ours_ for theirs_, ours_ in zip(other, ours[it.name], strict=True)]
        factor = statistics.median(factors)
        target = "" if it.min_factor is None else f">= {it.min_factor:g}"
        kept = None if it.min_factor is None or it.vllm is None else factor >= it.min_factor
        rows += [
            Row(f"{it.name}: {SOURCE if version is None else f'vLLM {version}'}", statistics.median(other), it.unit),
            Row(f"{it.name}: kvtier", statistics.median(ours[it.name]), it.unit),
            Row(f"{it.name}: kvtier is faster", factor, "times", target, kept, varies=True),
            Row(f"{it.name}: spread of that", spread(factors), "%"),
        ]
    return rows


def scale(num_rounds: int, many_slots: int) -> list[Row]:
    """Rows of hit and cold, per block, in a full pool of *many_slots* and in one of ten thousand."""
    pools = {num_slots: ManyPrompts(num_slots) for num_slots in (NUM_SLOTS, many_slots)}
    gc.freeze()  # as engines do, lest each collection walks through a million slots
    times: dict[tuple[str, int], list[float]] = {}
    rng = random.Random(0)
    for _ in range(num_rounds):
        for num_slots, prompts in rng.sample(list(pools.items()), 2):
            for name, took in (("cold", prompts.cold()), ("hit", prompts.hit())):
                times.setdefault((name, num_slots), []).append(1e9 * took / NUM_BLOCKS)
    gc.unfreeze()
    rows = []
    for name in ("hit", "cold"):
        few, many = times[name, NUM_SLOTS], times[name, many_slots]
        factors = [large / small for small, large in zip(few, many, strict=True)]
        factor = statistics.median(factors)
        rows += [
            Row(f"{name}, {NUM_SLOTS:,} slots: kvtier", statistics.median(few), "ns/block"),
            Row(f"{name}, {many_slots:,} slots: kvtier", statistics.median(many), "ns/block"),
            at_most(f"{name}, the large pool / the small one", factor, "", 1.5),
            Row(f"{name}, spread of that", spread(factors), "%"),
        ]
    return rows


class ManyPrompts:
    """A full pool. Prompts that hit are neither new nor about to be evicted, so no CPU cache has their bookkeeping."""

    def __init__(self, num_slots: int) -> None:
        self._core = KvtierCore(num_slots)
        self._num_served = 0
        self._age = num_slots // (NUM_BLOCKS + 1) // 2  # in prompts; where only one fits it is the newest
        for _ in range(num_slots // NUM_BLOCKS + 3):
            self.cold()

    def cold(self) -> float:
        """Seconds for a new prompt."""
        self._num_served += 1
        return seconds(partial(self._core.serve, self._prompt(self._num_served)), 0)

    def hit(self) -> float:
        """Seconds for a cached prompt."""
        return seconds(partial(self._core.serve, self._prompt(self._num_served - self._age)), NUM_TOKENS)

    def _prompt(self, number: int) -> BlockChain:
        return self._core.prompt(random_tokens(number))


def memory(many_slots: int) -> list[Row]:
    """Rows of the memory of *many_slots* named slots, after filling them once and three times."""
    rows = []
    for what, target, make in (
        ("a BlockPool", 200, partial(PoolAlone, many_slots)),
        ("all of the device tier", None, partial(KvtierCore, many_slots)),
    ):
        tracemalloc.start()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0] + mapped_bytes()
        core = make()
        apart = 0 if isinstance(core, PoolAlone) else many_slots * BLOCK_BYTES  # bytes of the blocks themselves
        numbers = count()
        for when, num_contents in (("full", 1), ("after two turnovers", 2)):
            for _ in range(num_contents * -(-many_slots // NUM_BLOCKS)):
                core.serve(KvtierCore.prompt(random_tokens(next(numbers))))
            gc.collect()
            num_bytes = (tracemalloc.get_traced_memory()[0] + mapped_bytes() - before - apart) / many_slots
            kept = None if target is None else num_bytes <= target
            promised = "" if target is None else f"<= {target}"
            rows.append(Row(f"memory of {what}, {when}", num_bytes, "bytes/slot", promised, kept, varies=True))
        tracemalloc.stop()
    return rows


def mapped_bytes() -> int:
    """Size of all memory maps, which `tracemalloc` does not count."""
    maps = [each for each in gc.get_objects() if type(each) is mmap.mmap]  # isinstance() would ask lazy modules
    return sum(len(each) for each in maps if not each.closed)


class PoolAlone:
    """One `BlockPool` without the rest of a tier."""

    def __init__(self, num_slots: int) -> None:
        self._pool = BlockPool(num_slots)

    def serve(self, prompt: BlockChain) -> None:
        """Commit the prompt's blocks and release them."""
        slots = self._pool.allocate(len(prompt.names))
        assert slots is not None
        self._pool.commit(slots, prompt.names)
        self._pool.release(slots[::-1])


class Stopwatch:
    """Wraps a `TieredCache` and adds up the seconds in its methods; it adds half a microsecond a call itself."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        if not callable(value):
            return value

        def timed(*args: Any, **named: Any) -> Any:
            started = time.thread_time()
            result = value(*args, **named)
            self.seconds += time.thread_time() - started
            return result

        setattr(self, name, timed)
        return timed


class Steps:
    """The engine's scheduler with requests that decode, and a model whose every token is 1."""

    def __init__(self) -> None:
        self.watch = Stopwatch(KvtierCore(2 * NUM_SLOTS, num_host_slots=2 * NUM_SLOTS).cache)
        cache, config = cast(TieredCache, self.watch), SchedulerConfig(max_running=2 * NUM_RUNNING)
        self._scheduler = Scheduler(cache, config, LOAD_TIMEOUT_S)
        for i in range(NUM_RUNNING):  # lengths one apart: in each step some of them fill a block
            self._scheduler.add(request(random_tokens(1 + i)[: 512 + i]))
        first = request(random_tokens(0))
        self._scheduler.add(first)
        while not first.is_decoding:
            self._step()
        self._scheduler.retire(first)

    def admit_and_retire(self) -> tuple[float, float]:
        """Seconds in tiers/ of the step that admits a long prompt, and of retiring it after that."""
        long = request(random_tokens(0))
        self._scheduler.add(long)
        gc.collect()
        gc.disable()
        self.watch.seconds = 0.0
        self._step()
        admitted = self.watch.seconds
        gc.enable()
        assert long.is_decoding, "a hit took more than one step to its first token"
        assert len(self._scheduler.running) == NUM_RUNNING + 1, "a request was preempted"
        self.watch.seconds = 0.0
        self._scheduler.retire(long)
        return admitted, self.watch.seconds

    def _step(self) -> None:
        work = self._scheduler.schedule()
        self._scheduler.on_computed(work)
        for item in work:
            if item.request.num_to_compute == 0:
                item.request.token_ids.append(1)
        self.watch.spill()


def request(token_ids: npt.NDArray[np.int32]) -> Request:
    """A request as the engine queues it, with names; it needs no detokenizer here."""
    chain = BlockChain(BLOCK_SIZE)
    chain.extend(token_ids)
    return Request(token_ids.tolist(), SamplingParams(max_tokens=NUM_SLOTS), chain, detokenizer=None)  # type: ignore[arg-type]


def whole_step(num_rounds: int) -> list[Row]:
    """Rows of the time in tiers/ of one step of the engine's scheduler."""
    steps = Steps()
    times = [steps.admit_and_retire() for _ in range(num_rounds + 1)][1:]
    admitted = [1000 * step for step, _ in times]
    median = statistics.median(admitted)
    what = f"step, {NUM_RUNNING} running, 1 admitted with a 128k hit"
    return [
        at_most(f"{what}: in tiers/, naming apart", median, "ms", 2),
        Row(f"{what}: spread of that", spread(admitted), "%"),
        Row("retiring that request: in tiers/", 1000 * statistics.median(end for _, end in times), "ms"),
    ]


def main() -> None:
    """Compare kvtier with vLLM, then measure kvtier alone."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="of each measurement (11); 7 at least")
    parser.add_argument("--events", action="store_true", help="hit and cold of both with KV events recorded and taken")
    options = parser.parse_args()
    num_rounds = options.effort.of(max(7, options.rounds or 11), quick=2)
    many_slots = options.effort.of(1_000_000, quick=50_000)
    version = vllm_version()
    if options.events and version is None:
        parser.error("--events: nothing to compare with; vLLM was not measured with events earlier, install it")
    compared = comparisons(version is not None, options.events)
    gc.freeze()  # as both engines' processes could; vLLM does
    rows = compare(compared, num_rounds, version)
    gc.unfreeze()
    del compared
    rows += keyed_naming(num_rounds) + whole_step(num_rounds) + scale(num_rounds, many_slots) + memory(many_slots)
    publish("prefix_core", rows, options.json)


if __name__ == "__main__":
    main()
