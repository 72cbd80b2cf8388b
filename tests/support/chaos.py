"""A world for `TieredCache` in which copies are late, come in another order, fail half way, and bytes rot."""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from attached_bed import SidecarBed, SteppedTiers, attached_memory
from unreliable_tiers import UnreliableTiers

from kvtier.sidecar.own.block_layout import BlockShape
from kvtier.store.blob_store import BlobStore
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers, lower_tiers
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.lower.remote.remote_tier import RemoteRecords, RemoteTier
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup, alignment
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.tiers.up.promotion import NO_SLOT, Tables
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

NAMESPACE = b"n" * 16


class FakeClock:
    """Time that moves when told to, and by *tick_s* with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick_s = 0.0

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


class ChaosLane:
    """Keeps what it is given until `stir`, then runs some of it in any order; some of it fails, before or after."""

    def __init__(self, finished: Finished, rng: random.Random, failing: float, capacity: int = 6) -> None:
        self._finished = finished
        self._rng = rng
        self.failing = failing
        self.capacity = capacity
        self.held: list[Transfer] = []

    @property
    def num_pending(self) -> int:
        return len(self.held)

    def submit(self, transfer: Transfer) -> bool:
        if len(self.held) >= self.capacity:
            return False
        self.held.append(transfer)
        return True

    def stir(self, share: float) -> None:
        """Finish about that share of what is held."""
        self._rng.shuffle(self.held)
        kept = []
        for transfer in self.held:
            if self._rng.random() >= share:
                kept.append(transfer)
                continue
            dice = self._rng.random()
            if dice >= self.failing / 2:
                transfer.run()
            if dice < self.failing:
                transfer.result, transfer.error = None, OSError("the copy failed")
            self._finished.put(transfer)
        self.held = kept

    def close(self) -> bool:
        self.stir(1.0)
        return True


class World:
    """A cache over real memory and a real store, where the bytes every block must have are known."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        block_bytes: Sequence[int],
        num_device_slots: int,
        num_host_slots: int,
        store: BlobStore | None,
        rng: random.Random,
        failing: float = 0.0,
        written_bytes_per_day: int | None = None,
        opening: Callable[[], int] = lambda: 1,
        is_unreliable: bool = False,
        is_apart: bool = False,
        clock: FakeClock | None = None,
        remote: RemoteRecords | None = None,
        **options: Any,
    ) -> None:
        """*opening*: the store's, see `DiskTier`. *remote*: a store beyond the disk.
        *is_unreliable*: the tiers below are `UnreliableTiers`; *is_apart*:
        they are in a sidecar, which is late and may die. *options* are `CacheOptions`, the cache's *planner*, and
        *quotas* and *events* of the tiers below, and *spills*, of all."""
        self.rng = rng
        self.clock = FakeClock() if clock is None else clock
        self.store = store
        self.device = [np.zeros((num_device_slots, size), dtype=np.uint8) for size in block_bytes]
        self.memories: list[BlockMemory] = []
        self.failing = failing
        self.open_lanes(failing)
        self.transfers = TransferEngine(self.lanes, self.finished)
        self.remote = remote
        self.asks: list[ChaosLane] = []  # the lane of the tiers that ask the remote store
        below = {name: options.pop(name) for name in ("quotas", "events", "spills") if name in options}
        self.sidecar: SidecarBed | None = None
        if is_apart:
            self.lower: LowerTiers = self._apart(groups, num_host_slots, **below)
        else:
            self.memories += [CpuMemory(blocks, num_host_slots, num_layers=4) for blocks in self.device]
            disk = None if store is None else DiskTier(store, NAMESPACE, self.clock, written_bytes_per_day, opening)
            self.lower = self.here = lower_tiers(
                groups, self.memories, self.transfers, disk, self.clock, remote=self._remote_tier(), **below
            )
        if is_unreliable:
            assert isinstance(self.here, LocalTiers), "nothing below that could be unreliable"
            self.lower = UnreliableTiers(self.here, rng)
        events, spills, planner = below.get("events"), below.get("spills"), options.pop("planner", None)
        chosen = CacheOptions(**{"min_clean_ahead": max(1, num_device_slots // 4), **options})
        self.cache = TieredCache(
            groups,
            self.memories,
            self.transfers,
            self.lower,
            self.clock,
            chosen,
            events=events,
            planner=planner,
            spills=spills,
        )
        self.tails: set[BlockName] = set()  # names of blocks that are not full
        self.rotten: set[tuple[int, int]] = set()  # host slots (group, slot) that this world has damaged
        if opening():
            self.wait_for_index()

    @property
    def local(self) -> LowerTiers:
        """The tiers that have the blocks below, in this process."""
        return self.here if self.sidecar is None else self.sidecar.tiers.tiers

    @property
    def host(self) -> list[GroupSlots] | None:
        """The host's slots by group, if there are any, and the engine sees them."""
        if self.sidecar is not None and not (self.sidecar.is_alive and self.memories[0].num_host_slots):
            return None
        return self.local.index.host if isinstance(self.local, LocalTiers) else None

    @property
    def index(self) -> LowerIndex:
        """What is below."""
        assert isinstance(self.local, LocalTiers), "nothing is below"
        return self.local.index

    def num_leased_below(self) -> int:
        """Leases on host slots of any kind."""
        if self.sidecar is not None:
            return self.sidecar.tiers.num_leased
        return sum(slots.pool.num_leases for slots in self.host or ())

    def die_below(self) -> None:
        """The process of the tiers below ends, and another one may begin."""
        if self.sidecar is not None:
            self.sidecar.die()
            self.new_sidecar_lanes()
            self.sidecar.start()
        elif isinstance(self.lower, UnreliableTiers):
            self.lower.die()

    def evict_blocks(self, names: Sequence[BlockName]) -> None:
        """Forget these blocks on the device and in host memory, whoever leases them; leases and bytes stay."""
        device = [group.slots for group in self.cache.residency.groups]
        for slots in (*device, *(self.host or ())):
            found = slots.pool.find_all(names)
            slots.evict(found[found != ABSENT], EvictionCause.ROOM)

    def wait_for_index(self) -> None:
        """Until what is on disk already is known."""
        while not self.cache.lower.status.is_indexed:
            self.clock.now += 1
            self.settle()

    def open_lanes(self, failing: float) -> None:
        """Make the lanes and the queue of what they have finished."""
        self.finished: Finished = Finished()
        self.lanes: dict[Route, Any] = {route: ChaosLane(self.finished, self.rng, failing) for route in Route}

    def new_sidecar_lanes(self) -> TransferEngine:
        """Lanes of a sidecar, between host memory and disk; the ones before have ended."""
        finished = Finished()
        lanes = {
            route: ChaosLane(finished, self.rng, self.failing)
            for route in Route
            if route not in (Route.DEVICE_TO_HOST, Route.HOST_TO_DEVICE)
        }
        self.lanes.update(lanes)
        if self.remote is not None:
            self.asks = [ChaosLane(finished, self.rng, self.failing)]
        return TransferEngine(lanes, finished)

    @property
    def all_lanes(self) -> list[ChaosLane]:
        """Every lane that there is now."""
        return [*self.lanes.values(), *self.asks]

    def make_remote(self, namespace: bytes) -> RemoteTier | None:
        """The remote tier of a sidecar's layout, whose lanes have just been made."""
        return None if self.remote is None else RemoteTier(self.remote, namespace, self.asks[0], self.clock)

    def chain(self, salt: str, num_tokens: int) -> BlockChain:
        """A document's first tokens, named; the tokens are the same, the salt makes documents differ."""
        chain = BlockChain(self.cache.block_size, ExtraKeys(cache_salt=salt))
        chain.extend(list(range(num_tokens)))
        return chain

    def names(self, salt: str, num_tokens: int) -> list[BlockName]:
        """The names of a document's blocks."""
        return self.chain(salt, num_tokens).names

    def bytes_of(self, group_id: int, name: BlockName) -> np.ndarray:
        """What the block's bytes must be, wherever it is."""
        seed = zlib.crc32(name + bytes([group_id]))
        return np.random.default_rng(seed).integers(0, 256, self.device[group_id].shape[1], dtype=np.uint8)

    def compute(self, tables: Tables, chain: BlockChain, start: int, end: int) -> None:
        """Do what a model does: fill the slots of the blocks of tokens *start* to *end*, then name them."""
        for group_id, (group, table) in enumerate(zip(self.cache.groups, tables, strict=True)):
            blocks = range(start // group.block_size, end // group.block_size)
            for block_id, name in zip(blocks, chain.names_of(group.block_size, blocks), strict=True):
                if table[block_id] != NO_SLOT:
                    self.device[group_id][table[block_id]] = self.bytes_of(group_id, name)
        self.cache.commit(tables, chain, start, end)

    def leave(self, tables: Tables, chain: BlockChain, num_computed: int) -> None:
        """Do what a request does that ends: offer the tail, whose bytes are those of the document's block, and go."""
        longer = self.chain(chain.extra.cache_salt or "", num_computed + alignment(self.cache.groups))
        for group_id, (group, table) in enumerate(zip(self.cache.groups, tables, strict=True)):
            last = num_computed // group.block_size
            if last < len(table) and table[last] != NO_SLOT:
                (name,) = longer.names_of(group.block_size, range(last, last + 1))
                self.device[group_id][table[last]] = self.bytes_of(group_id, name)
        self.tails.add(chain.tail_name(num_computed))
        self.cache.commit_tail(tables, chain, num_computed)
        self.cache.release(tables)

    def settle(self) -> None:
        """Finish every copy, until nothing is under way."""
        if isinstance(self.lower, SteppedTiers):
            self.lower.stir()
        for _ in range(1000):
            for lane in self.all_lanes:
                lane.stir(1.0)
            self.cache.poll()
            is_quiet = not isinstance(self.lower, UnreliableTiers | SteppedTiers) or self.lower.is_quiet
            if is_quiet and not any(lane.num_pending for lane in self.all_lanes):
                return
        raise AssertionError("copies never end")

    def flush(self) -> None:
        """Have everything written to disk."""

        def stir(num_left: int) -> None:
            self.settle()

        assert self.cache.drain.flush(10, stir) == 0

    def rot_a_host_block(self) -> None:
        """Flip a bit in some cached host block."""
        group_id = self.rng.randrange(len(self.device))
        host = self.host
        slots = host[group_id].pool.cached_slots() if host is not None else []
        if slots:
            slot = self.rng.choice(slots)
            block = self.memories[group_id].host_block(slot)
            block[self.rng.randrange(len(block))] ^= 1 << self.rng.randrange(8)
            self.rotten.add((group_id, slot))

    def close(self) -> None:
        """End the sidecar, if there is one, and give all memory up."""
        if isinstance(self.lower, SteppedTiers):
            self.lower.close()
            self.lower.bed.close()
        for memory in self.memories:
            memory.close()

    def check(self) -> None:
        """The books agree, and every block that can be found on device or host has its bytes."""
        self.cache.check()
        residency = self.cache.residency
        for group_id, pool in enumerate(group.pool for group in residency.groups):
            for slot in range(pool.num_slots):
                if (name := pool.name(slot)) is not None and name not in self.tails:
                    expected = self.bytes_of(group_id, name)
                    assert (self.device[group_id][slot] == expected).all(), f"wrong bytes in device slot {slot}"
        for group_id, pool in enumerate(slots.pool for slots in self.host or ()):
            for slot in range(pool.num_slots):
                name = pool.name(slot)
                if name is None:
                    self.rotten.discard((group_id, slot))
                elif (group_id, slot) not in self.rotten:
                    block = np.frombuffer(self.memories[group_id].host_block(slot), dtype=np.uint8)
                    assert (block == self.bytes_of(group_id, name)).all(), f"wrong bytes in host slot {slot}"

    def _remote_tier(self) -> RemoteTier | None:
        if self.remote is None:
            return None
        self.asks = [ChaosLane(self.finished, self.rng, self.failing)]
        return RemoteTier(self.remote, NAMESPACE, self.asks[0], self.clock)

    def _apart(
        self,
        groups: Sequence[AttentionGroup],
        num_host_slots: int,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        events: EventLog | None = None,
    ) -> SteppedTiers:
        """Tiers in a sidecar whose host memory has about so many slots of each group, in small extents."""
        shapes = [
            BlockShape(group.block_size, group.forgets, blocks.shape[1])
            for group, blocks in zip(groups, self.device, strict=True)
        ]
        extent_bytes = 4 * max(shape.block_bytes for shape in shapes)
        num_bytes = max(len(groups) * extent_bytes, num_host_slots * sum(shape.block_bytes for shape in shapes))
        memories = [attached_memory(blocks, num_layers=4) for blocks in self.device]
        self.memories += memories
        self.sidecar = SidecarBed(
            shapes,
            num_bytes // extent_bytes * extent_bytes,
            extent_bytes,
            self.store,
            self.clock,
            self.new_sidecar_lanes,
            quotas,
            self.make_remote,
        )
        return SteppedTiers(self.sidecar, groups, memories, self.transfers, self.clock, events, self.rng)
