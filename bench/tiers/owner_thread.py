"""How long is the longest call of the thread that owns the cache, with everything at full size?

A device of a million slots full of blocks, a host of a million, eight million names on disk, a million salts that came
and went, prompts of 8,192 blocks. Times are processor time of that one thread, without the lanes' work. Blocks have
64 bytes, so that all fit in memory: only the number of blocks in a batch, which is bounded, depends on their size.

Several processes make the same calls, one process after the other. For each call, the shortest of its times counts:
processor time includes interrupts and a hypervisor's pauses, which add milliseconds to a few calls in ten thousand.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.report import Effort, Row, arguments, publish
from kvtier.engine.config import SchedulerConfig, as_config
from kvtier.engine.garbage import Garbage
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.scheduler import SharedPrefill
from kvtier.engine.scheduling.slot_demand import SlotDemand, max_blocks
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.scheduling.waiting_queue import WaitingQueue
from kvtier.server.documents.document import Document, Form
from kvtier.server.documents.pin_shares import PinShares
from kvtier.server.documents.pins import RENEW_S, DocumentPins
from kvtier.store.blob_store import Blob, StoreStatistics
from kvtier.store.record import digest
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.lower.disk_tier import PAGE_KEYS, DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.lower_tiers import Deletion
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.events import BlockRemoved, EventLog
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.tiers.up.promotion import Promotion, Tables
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BUDGET_MS = 2.0
BLOCK_SIZE = 16
BLOCK_BYTES = 64
NUM_BLOCKS = 8192  # of a prompt
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
CHUNK_BLOCKS = 128  # 2,048 tokens: that a step computes of a prompt
NUM_PINS = 4000
LANE_CAPACITY = 64
NAMESPACE = b"n" * NAMESPACE_BYTES
NOTHING = digest(bytes(BLOCK_BYTES))  # the digest of a block of zeros


class HeldLane:
    """A lane that keeps transfers until `run`, which comes between the timed calls, so that none bears their time."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self._held: list[Transfer] = []
        self.is_stuck = False

    @property
    def num_pending(self) -> int:
        return len(self._held)

    def submit(self, transfer: Transfer) -> bool:
        if self.is_stuck or len(self._held) >= LANE_CAPACITY:
            return False
        self._held.append(transfer)
        return True

    def run(self) -> bool:
        """Run the transfers kept so far; whether there were any."""
        held, self._held = self._held, []
        for transfer in held:
            transfer.run()
            self._finished.put(transfer)
        return bool(held)

    def close(self) -> bool:
        return True


class ZeroStore:
    """A store that has every block it is asked for, all zeros. When full it evicts a made-up key for each block put."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self.is_full = False

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        return [NAMESPACE + os.urandom(32) + bytes(4) for _ in blobs] if self.is_full else []

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes]:
        return [NOTHING] * len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def keys(self) -> Iterator[bytes]:
        for _ in range(self._num_records // PAGE_KEYS):
            names = os.urandom(32 * PAGE_KEYS)
            yield from (NAMESPACE + names[start : start + 32] + bytes(4) for start in range(0, len(names), 32))

    def delete(self, keys: Sequence[bytes]) -> int:
        return 0

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(self._num_records, 0, 1 << 30, 0, 0, 0, 0, 0, {}, {})


class Calls:
    """Times calls of the owner's thread, by name, without garbage collections, which are measured apart."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Call *call*, keep its milliseconds under *name*, and return its result."""
        gc.disable()
        started = time.thread_time()
        result = call()
        self.times.setdefault(name, []).append(1e3 * (time.thread_time() - started))
        gc.enable()
        return result


def least(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the shortest time of each call in all runs, by the name of the call.

    The runs make the same calls in the same order. If one run had more polls or collections than another, the longest
    call of one is compared with the longest call of the other, and so on.
    """
    times: dict[str, list[float]] = {}
    for name in runs[0]:
        seen = [run[name] for run in runs]
        if len({len(one) for one in seen}) > 1:
            seen = [sorted(one, reverse=True) for one in seen]
        times[name] = [min(same) for same in zip(*seen, strict=False)]
    return times


def rows_of(times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return for each name a row of the median, and a row that compares the worst call with the budget."""
    rows = []
    for name, each in times.items():
        worst = max(each)
        rows.append(Row(f"{name}, median of {len(each)}", statistics.median(each), "ms"))
        if name.endswith(", idle"):
            rows.append(Row(f"{name}, worst", worst, "ms"))
        else:
            rows.append(Row(f"{name}, worst", worst, "ms", f"<= {BUDGET_MS:g}", worst <= BUDGET_MS, varies=True))
    return rows


class Bed:
    """A cache of full size with its tiers, lanes and events."""

    def __init__(self, num_slots: int, num_on_disk: int, calls: Calls) -> None:
        self.calls = calls
        finished = Finished()
        self.lanes = {route: HeldLane(finished) for route in Route}
        self.store = ZeroStore(num_on_disk)
        self.disk = DiskTier(self.store, NAMESPACE)  # type: ignore[arg-type]  # it has what a tier calls
        self.events = EventLog()
        memory = CpuMemory(np.zeros((num_slots, BLOCK_BYTES), np.uint8), num_slots)
        transfers = TransferEngine(self.lanes, finished)
        self.tenant = tenant_of("with a quota")
        groups, self.quotas = [FullAttention(BLOCK_SIZE)], {self.tenant: 1 << 40}
        self.lower = LocalTiers(groups, [memory], transfers, self.disk, quotas=self.quotas, events=self.events)
        self.cache = TieredCache(
            groups,
            [memory],
            transfers,
            self.lower,
            options=CacheOptions(min_clean_ahead=2 * CHUNK_BLOCKS),
            events=self.events,
        )
        self._numbers = count()
        self.num_told = 0  # blocks whose removal was reported by events

    def chain(self, number: int | None = None, num_blocks: int = NUM_BLOCKS, salt: str | None = None) -> BlockChain:
        """The names of prompt *number*; by default of a new prompt."""
        number = next(self._numbers) if number is None else number
        chain = BlockChain(BLOCK_SIZE, ExtraKeys(cache_salt=salt))
        chain.extend(np.random.default_rng(number).integers(1 << 17, size=num_blocks * BLOCK_SIZE + 5, dtype=np.int32))
        return chain

    def poll(self, name: str) -> None:
        """Run the lanes and poll the cache until nothing is under way; polls are timed as *name*."""
        while sum(lane.run() for lane in self.lanes.values()) or self.cache.num_in_flight:
            self.poll_once(name)

    def poll_once(self, name: str) -> None:
        """Poll the cache, timed as *name*, and take the events, as an engine does in each step."""
        self.calls.time(name, self.cache.poll)
        events = self.calls.time("EventLog.take", self.events.take)
        self.num_told += sum(len(event.names) for event in events if isinstance(event, BlockRemoved))

    def compute(self, chain: BlockChain, names: Sequence[str], spill: str | None) -> Tables:
        """Allocate and commit a prompt in chunks, as the scheduler does; *names* are those of the two calls."""
        tables: Tables = []
        for start in range(0, len(chain.names), CHUNK_BLOCKS):
            end = min(start + CHUNK_BLOCKS, len(chain.names))
            slots = self.calls.time(names[0], partial(self.cache.allocate, [end - start]))
            tables = [there + new for there, new in zip(tables, slots, strict=True)] if tables else slots
            commit = partial(self.cache.commit, tables, chain, start * BLOCK_SIZE, end * BLOCK_SIZE)
            self.calls.time(names[1], commit)
            if spill is not None:
                self.calls.time(spill, self.cache.spill)
                self.poll("poll: copies to host and disk")
            self.events.take()
        return tables


def fill(bed: Bed, num_slots: int) -> None:
    """Put blocks into every slot of device and host, and names into the disk's index."""
    while not bed.cache.lower.status.is_indexed:
        bed.poll("poll: a page of the disk's index")
    for _ in range(num_slots // NUM_BLOCKS * 5 // 4 + 4):
        tables = bed.compute(bed.chain(), ("allocate a chunk", "commit a chunk"), "spill")
        bed.calls.time("release 8,192 blocks", partial(bed.cache.release, tables))


def on_disk(bed: Bed) -> BlockChain:
    """A new prompt that only the disk has."""
    chain = bed.chain()
    for start in range(0, NUM_BLOCKS, CHUNK_BLOCKS):
        bed.disk.index.add(0, chain.names[start : start + CHUNK_BLOCKS])
    return chain


def promote(bed: Bed, chain: BlockChain, where: str) -> Promotion:
    """Make all calls by which the scheduler admits a request, timed with *where* in their names."""
    cache, clock = bed.cache, bed.calls.time
    hit = clock(f"lookup, {where}", partial(cache.lookup, chain, NUM_TOKENS + 5))
    assert hit.num_tokens == NUM_TOKENS, f"{hit.num_tokens} tokens hit"
    clock(f"num_leased, {where}", partial(cache.plans.num_leased, hit))
    clock(f"junction, {where}", partial(cache.lookups.junction, hit))
    clock(f"worth_loading, {where}", partial(cache.plans.worth_loading, hit, NUM_TOKENS + 5))
    clock(f"on_device, {where}", partial(cache.plans.on_device, hit))
    clock(f"make_room, {where}", partial(cache.make_room, hit))
    promotion: Promotion = clock(f"promote, {where}", partial(cache.promote, hit))
    return promotion


def requests(bed: Bed, rounds: int) -> None:
    """Time requests that hit in each tier, and requests that are cancelled."""
    calls, cache = bed.calls, bed.cache
    for _ in range(rounds):
        chain = on_disk(bed)
        for where in ("disk", "device"):
            promotion = promote(bed, chain, where)
            while not promotion.done:
                bed.poll(f"poll: a promotion from {where}")
            calls.time("forget_read", partial(cache.forget_read, promotion.tables, NUM_TOKENS))
            tail = cache.allocate([1])
            assert tail is not None
            tables = [promotion.tables[0] + tail[0]]
            calls.time("commit_tail", partial(cache.commit_tail, tables, chain, NUM_TOKENS + 5))
            calls.time("release 8,192 blocks", partial(cache.release, tables))
        device = cache.residency.groups[0].slots
        device.evict(device.pool.find_all(chain.names), EvictionCause.ROOM)  # host memory still has its blocks
        promotion = promote(bed, chain, "host")
        calls.time("cancel, host", partial(cache.cancel, promotion))
        bed.poll("poll: after a cancel")
        bed.lanes[Route.DISK_TO_HOST].is_stuck = True
        promotion = promote(bed, on_disk(bed), "disk")
        for _ in range(50):
            calls.time("poll: a promotion whose disk is busy", cache.poll)
        calls.time("cancel, disk", partial(cache.cancel, promotion))
        bed.lanes[Route.DISK_TO_HOST].is_stuck = False
        cold = bed.chain()
        calls.time("lookup, never seen", partial(cache.lookup, cold, NUM_TOKENS + 5))
        calls.time("where", partial(cache.lookups.where, bed.chain(num_blocks=CHUNK_BLOCKS)))
        calls.time("statistics", cache.statistics)
        bed.store.is_full = True
        tables = bed.compute(cold, ("allocate a chunk", "commit a chunk"), "spill")
        cache.release(tables)
        bed.store.is_full = False


def pinning(bed: Bed, rounds: int, num_pins: int) -> None:
    """Time pins of documents, of prompts and of the queue."""
    calls, cache = bed.calls, bed.cache
    pins = TimedPins(cache, time.monotonic)
    for _ in range(num_pins):
        calls.time("TimedPins.pin", partial(pins.pin, "ann", bed.chain(num_blocks=4), 1, until=1e18))
    for _ in range(rounds):
        for make in (bed.chain, partial(on_disk, bed)):
            pin = calls.time("pin", partial(cache.pins.pin, make(), NUM_TOKENS))
            assert pin is not None, "no room for a pin"
            for _ in range(100):
                time.sleep(0.001)
                calls.time("poll: pins", cache.poll)
                for lane in bed.lanes.values():
                    lane.run()
            calls.time("unpin", partial(cache.pins.unpin, pin))
        calls.time("TimedPins.tick, nothing due", pins.tick)
    bed.poll("poll: after pins")


def documents(bed: Bed, rounds: int, num_documents: int) -> None:
    """Time the ticks of thousands of pinned documents, whose pins are renewed all at the same time."""
    calls = bed.calls
    chains: dict[Document, BlockChain] = {}
    now = [0.0]
    pins = TimedPins(bed.cache, lambda: now[0])
    config = as_config({"host": {"capacity": "1GiB"}})
    core: Any = SimpleNamespace(
        cache=bed.cache, pins=pins, config=config, pinned_bytes=lambda num_tokens: 4 * num_tokens
    )
    kept = DocumentPins(core, chains.__getitem__, lambda _: None, PinShares(core, 1))
    for number in range(num_documents):
        document = Document(str(number), None, Form.TEXT, None, None, np.zeros(64, np.int32), None, None, 0.0)
        chains[document] = bed.chain(num_blocks=4)
        calls.time("DocumentPins.pin", partial(kept.pin, document, 1e9))
    for _ in range(rounds):
        calls.time("DocumentPins.tick, nothing due", kept.tick)
    now[0] = RENEW_S + 1
    for _ in range(num_documents):
        calls.time("DocumentPins.tick, all due", kept.tick)
    kept.end()


def events(bed: Bed, num_on_disk: int) -> None:
    """Time what follows when the store was opened anew: an event tells routers each name that is gone."""
    bed.events.take()
    bed.calls.time("the disk changes", bed.disk.follow_opening)
    bed.num_told = 0
    while not bed.cache.lower.status.is_indexed:
        bed.poll_once("poll: the disk has changed")
        bed.poll("poll: the disk has changed")
    while bed.lower.is_forgetting:
        bed.poll_once("poll: the disk has changed")
    assert bed.num_told >= num_on_disk // PAGE_KEYS * PAGE_KEYS, "the events lack names"


def resetting(bed: Bed, num_on_disk: int) -> None:
    """Time a reset of everything, with pins and a full device, and the polls that free memory and delete records."""
    TimedPins(bed.cache, time.monotonic).pin("ann", on_disk(bed), NUM_TOKENS, until=1e18)
    bed.poll("poll: pins")
    assert bed.calls.time("reset", bed.cache.reset), "the reset was refused"
    for _ in range(num_on_disk // PAGE_KEYS):
        bed.poll_once("poll: after a reset")
        bed.poll("poll: after a reset")
    assert bed.cache.deletion is Deletion.DONE, "records are left on disk"
    assert bed.cache.lookups.lookup(bed.chain(number=0), NUM_TOKENS).num_tokens == 0


def scheduling(bed: Bed, rounds: int) -> None:
    """Time what the scheduler asks of other parts than the cache."""
    calls, config = bed.calls, SchedulerConfig()
    demand, shared = SlotDemand(bed.cache, config.prefill_chunk), SharedPrefill(config.prefill_chunk)
    queue = WaitingQueue()
    for number in range(config.max_waiting):
        chain = bed.chain(number=number, num_blocks=8)
        calls.time("WaitingQueue.add", partial(queue.add, request(chain)))
    pins = TimedPins(bed.cache, time.monotonic)
    look_ahead = LookAhead(bed.cache, pins, lambda: 1 << 24, 60.0)
    others = list(queue)[:64]
    groups = (SlidingWindow(BLOCK_SIZE, 4096), FullAttention(BLOCK_SIZE))
    for number in range(rounds):
        long = request(bed.chain())
        hit = bed.cache.lookups.no_hit(long.chain, NUM_TOKENS)
        calls.time("SlotDemand.fits", partial(demand.fits, long, hit, others))
        calls.time("SlotDemand, a window", partial(max_blocks, groups, NUM_TOKENS + number, config.prefill_chunk))
        calls.time("SharedPrefill.awaited", partial(shared.awaited, long, others))
        calls.time("LookAhead.look", partial(look_ahead.look, queue))
        calls.time("WaitingQueue.remove", partial(queue.remove, list(queue)[-1]))
    for waiting in list(queue):
        look_ahead.forget(waiting)


def request(chain: BlockChain) -> Request:
    """A request as the engine queues it; it needs no detokenizer here."""
    token_ids = np.asarray(chain.token_ids).tolist()
    return Request(token_ids, SamplingParams(max_tokens=16), chain, detokenizer=None)  # type: ignore[arg-type]


def tenants(bed: Bed, rounds: int, num_salts: int) -> None:
    """Time calls after a million salts came and went, and a tenant that goes over its quota."""
    index = bed.lower.index
    for number in range(num_salts):
        salt = np.array([number], np.uint64)
        index.quotas.add(0, salt)
        index.quotas.remove(0, salt)
    for _ in range(rounds):
        bed.calls.time("statistics after a million salts", bed.cache.statistics)
    for _ in range(rounds):
        bed.quotas[bed.tenant] = 1 << 40
        chain = bed.chain(salt="with a quota")
        tables = bed.compute(chain, ("allocate a chunk", "commit a chunk"), "spill")
        pin = bed.cache.pins.pin(chain, NUM_TOKENS)  # which copies it down
        assert pin is not None, "more than may be pinned"
        while not pin.is_whole:
            bed.cache.poll()
            bed.poll("poll: copies to host and disk")
        bed.cache.pins.unpin(pin)
        for _ in range(NUM_BLOCKS // CHUNK_BLOCKS):  # these polls release the blocks
            bed.calls.time("poll: after an unpin", bed.cache.poll)
        bed.cache.release(tables)
        num_bytes = index.quotas.num_bytes[bed.tenant]
        assert num_bytes == NUM_BLOCKS * BLOCK_BYTES, "the tenant's blocks are not in host memory"
        bed.quotas[bed.tenant] = 0
        bed.calls.time("quotas.enforce", partial(index.quotas.enforce, 0, bed.tenant))
        while index.quotas.excess(bed.tenant):
            bed.calls.time("quotas.go_on", index.quotas.go_on)
            bed.poll_once("poll: over a quota")


class Collections:
    """Times garbage collections. Full ones happen while the engine is idle, so no request waits for them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._started = 0.0
        self._is_idle = False
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
            return
        kind = "full" if info["generation"] == 2 else "young"
        name = f"{kind} garbage collection{', idle' if self._is_idle else ''}"
        self._calls.times.setdefault(name, []).append(1e3 * (time.thread_time() - self._started))

    def collect(self) -> None:
        """Collect garbage as an idle engine does."""
        self._is_idle = True
        gc.collect()
        self._is_idle = False


def main() -> None:
    """Time all calls, and publish the rows."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="of each kind of request (5)")
    parser.add_argument("--slots", type=int, help="of device and host (a million)")
    parser.add_argument("--on-disk", type=int, help="names on disk (8 million)")
    parser.add_argument("--runs", type=int, help="processes that make the same calls in turn (3)")
    options = parser.parse_args()
    num_runs = options.runs or options.effort.of(3, quick=1)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        runs = list(processes.map(times_of_all, [options] * num_runs))
    publish("owner_thread", rows_of(least(runs)), options.json)


def times_of_all(options: argparse.Namespace) -> dict[str, list[float]]:
    """Make all calls once, and return the milliseconds of each by name."""
    calls = Calls()
    with Garbage():
        ask_all(Collections(calls), calls, options)
    return calls.times


def ask_all(collections: Collections, calls: Calls, options: argparse.Namespace) -> None:
    """Fill device, host and disk, then time all calls."""
    effort: Effort = options.effort
    num_slots = options.slots or effort.of(1_000_000, quick=20_000)
    num_on_disk = options.on_disk or effort.of(8_000_000, quick=20_000)
    num_rounds = options.rounds or effort.of(5, quick=1)
    bed = Bed(num_slots, num_on_disk, calls)
    fill(bed, num_slots)
    requests(bed, num_rounds)
    pinning(bed, num_rounds, effort.of(NUM_PINS, quick=500))
    documents(bed, num_rounds, min(NUM_PINS, num_slots // 20))
    scheduling(bed, num_rounds)
    tenants(bed, num_rounds, effort.of(1_000_000, quick=10_000))
    collections.collect()
    events(bed, num_on_disk)
    resetting(bed, num_on_disk)


if __name__ == "__main__":
    main()
