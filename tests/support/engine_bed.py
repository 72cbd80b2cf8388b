"""A sidecar with its own endpoint over real shared memory and a real Unix socket, turned by hand, and engines that
send what a test tells them to."""

import contextlib
import mmap
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from chaos import FakeClock
from lmcache_bed import Lane
from waiting import DEADLINE_S

from kvtier.engine.attached import wire
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.sidecar.finished_transfers import FinishedTransfers
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.own.endpoint import EngineEndpoint, EngineFrames
from kvtier.sidecar.port import Port, listen_at_path
from kvtier.sidecar.refusals import Refusals
from kvtier.sidecar.sidecar import Sidecar
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, TransferEngine

EXTENT_BYTES = 1 << 16
GROUPS = [wire.GroupShape(16, False, 4096), wire.GroupShape(16, True, 3000)]  # no slot of the second ends an extent
NAMESPACE = b"a namespace of 16"[:16]
M = TypeVar("M")


def hello(**changed: Any) -> wire.Hello:
    fields = {
        "version": wire.VERSION,
        "program": "a test",
        "model": "m",
        "namespace": NAMESPACE,
        "groups": GROUPS,
        **changed,
    }
    return wire.Hello(**fields)


def names(document: int, num_blocks: int) -> list[BlockName]:
    """Names of a document's first blocks."""
    rng = random.Random(document)
    return [BlockName(rng.randbytes(32)) for _ in range(num_blocks)]


def content(name: BlockName, num_bytes: int) -> bytes:
    """The bytes that the block of that name has."""
    return random.Random(name).randbytes(num_bytes)


class Bed:
    """The sidecar's loop, turned by hand."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        num_extents: int,
        store: MemoryStore | None,
        allowed_uids: Sequence[int] | None,
        openings: Sequence[int],
        tracer: Tracer | None,
    ) -> None:
        self.clock = FakeClock()
        self.turn_s = 0.0  # that passes with each turn
        self.path = str(folder / "engines.sock")
        self.segment = Segment(num_extents * EXTENT_BYTES)
        finished = FinishedTransfers()
        self.lanes = {route: Lane(finished) for route in Route}
        self.transfers = TransferEngine(self.lanes, finished)
        self.layouts = Layouts(
            self.segment,
            self.transfers,
            store,
            lambda: openings[0],
            self.clock,
            extent_bytes=EXTENT_BYTES,
            tracer=tracer,
        )
        self.refusals = Refusals(self.clock, "engine")
        self.port = Port(
            [listen_at_path(self.path)],
            self.clock,
            self.refusals.refused,
            EngineFrames,
            allowed_uids,
            farewell=lambda why: wire.frame_of(wire.Refused(why)),
        )
        self.endpoint = EngineEndpoint(self.port, self.layouts, self.refusals, self.clock, "kvtier test")
        self.sidecar = Sidecar(
            self.segment,
            finished,
            self.transfers,
            self.layouts,
            [self.endpoint],
            None,  # the store is Layouts'
            clock=self.clock,
        )
        stack.callback(self.sidecar.close)
        assert self.segment.wait_backed(DEADLINE_S)

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            self.clock.now += self.turn_s
            for lane in self.lanes.values():
                lane.work()
            self.sidecar.turn()

    def settle(self) -> None:
        """Until nothing is under way."""
        self.turn(60)

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.settle()

    def tiers(self) -> LayoutTiers:
        """Those of the layout that came first."""
        return next(iter(self.layouts))

    def num_leases(self) -> int:
        """Leases on slots that the segment really gives to its layouts."""
        return sum(tiers.num_leased for tiers in self.layouts)

    def check(self) -> None:
        self.endpoint.check()
        self.layouts.check()


class Plain:
    """A connection to the endpoint that never waits: in one process, one side can read what the other has sent
    at once."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(bed.path)
        self.socket.setblocking(False)
        self.files: list[FileIO] = []
        self.is_ended = False
        self._frames = wire.Frames(1 << 30)

    def send(self, data: bytes) -> None:
        """All of it, as fast as it is read, or until the connection ends."""
        view = memoryview(data)
        while view and not self.is_ended:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                self.bed.turn()
            except ConnectionError:
                self.read()

    def read(self) -> list[wire.FromSidecar]:
        """What it has been told since the last call."""
        told: list[wire.FromSidecar] = []
        while not self.is_ended:
            try:
                data, files, _, _ = socket.recv_fds(self.socket, 1 << 20, 4)
            except BlockingIOError:
                break
            except ConnectionError:
                data, files = b"", []
            self.files += [FileIO(file, "r+") for file in files]
            self.is_ended = not data
            told += [wire.message_of_sidecar(payload) for payload in self._frames.receive(data)]
        return told

    def close(self) -> None:
        self.socket.close()
        for file in self.files:
            file.close()


class Engine(Plain):
    """An engine that is attached. *host* and *disk* are what it was told of, by group; *told* the rest."""

    def __init__(self, bed: Bed, **changed: Any) -> None:
        super().__init__(bed)
        self.groups: list[wire.GroupShape] = changed.get("groups", GROUPS)
        self.host: list[dict[BlockName, int]] = [{} for _ in self.groups]
        self.disk: list[set[BlockName]] = [set() for _ in self.groups]
        self.told: list[wire.FromSidecar] = []
        self.num_unknown = 0  # names that left and were never there
        self._number = 0
        self.say(hello(**changed))
        self.welcome = self.next(wire.Welcome)
        (file,) = self.files
        self.memory = mmap.mmap(file.fileno(), self.welcome.num_bytes)

    def say(self, *messages: wire.FromEngine) -> None:
        self.send(b"".join(map(wire.frame_of, messages)))

    def hear(self) -> None:
        """Take in what was told."""
        for message in self.read():
            match message:
                case wire.InHost(group, joined, slots):
                    for name, slot in zip(wire.names_in(joined), wire.numbers_in(slots, 1 << 31).tolist(), strict=True):
                        self.host[group][name] = slot
                case wire.LeftHost(group, joined):
                    for name in wire.names_in(joined):
                        self.num_unknown += self.host[group].pop(name, None) is None
                case wire.OnDisk(group, joined):
                    self.disk[group].update(wire.names_in(joined))
                case wire.LeftDisk(group, joined):
                    self.disk[group].difference_update(wire.names_in(joined))
                case _:
                    self.told.append(message)

    def next(self, kind: type[M]) -> M:
        """The next message of that kind; those before it are dropped."""
        for _ in range(1000):
            self.hear()
            while self.told:
                message = self.told.pop(0)
                if isinstance(message, kind):
                    return message
            assert not self.is_ended, f"the connection has ended; no {kind.__name__}"
            self.bed.turn()
        raise AssertionError(f"no {kind.__name__} has come")

    def ask(self, message: wire.FromEngine, kind: type[M]) -> M:
        self.say(message)
        return self.next(kind)

    def bytes_of(self, group: int, slot: int) -> memoryview:
        num_bytes = self.groups[group].block_bytes
        return memoryview(self.memory)[slot * num_bytes : (slot + 1) * num_bytes]

    def reserve(self, num_slots: int, group: int = 0) -> list[int]:
        reserved = self.ask(wire.Reserve(group, num_slots), wire.Reserved)
        assert (reserved.group, reserved.num_asked) == (group, num_slots)
        slots: list[int] = wire.numbers_in(reserved.slots, 1 << 31).tolist()
        return slots

    def publish(self, blocks: Sequence[BlockName], slots: Sequence[int], group: int = 0, owner: int = 0) -> None:
        """Write the blocks of one document, the first first, and say so as engines do, the tail first."""
        for name, slot in zip(blocks, slots, strict=True):
            self.bytes_of(group, slot)[:] = content(name, self.groups[group].block_bytes)
        self.say(publication(self, blocks[::-1], slots[::-1], group, owner))

    def store(self, document: int, num_blocks: int, group: int = 0) -> int:
        """Store a document's first blocks; how many had room."""
        slots = self.reserve(num_blocks, group)
        if slots:
            self.publish(names(document, num_blocks)[: len(slots)], slots, group)
        self.bed.settle()
        self.hear()
        return len(slots)

    def fetch(self, blocks: Sequence[BlockName], group: int = 0, *, is_for_later: bool = False) -> int:
        """Begin a fetch; its number."""
        self._number += 1
        parents = [None, *blocks[:-1]] if blocks else []
        starts = wire.starts_of(blocks, parents)
        self.say(wire.Fetch(self._number, group, wire.joined(blocks), starts, b"", is_for_later))
        return self._number

    def load(self, document: int, num_blocks: int, group: int = 0) -> tuple[list[int], dict[int, Reason]]:
        """Fetch a document's blocks, compare those that come with what they must be, and release them: which came, and
        why the others did not."""
        blocks = names(document, num_blocks)
        number = self.fetch(blocks, group)
        came: list[int] = []
        failures: dict[int, Reason] = {}
        while len(came) + len(failures) < num_blocks:
            fetched = self.next(wire.Fetched)
            assert fetched.number == number
            places = wire.numbers_in(fetched.places, num_blocks).tolist()
            slots = wire.numbers_in(fetched.slots, 1 << 31).tolist()
            digests = wire.digests_in(fetched.digests, len(places))
            assert len(wire.owners_in(fetched.owners, len(places))) == len(places)
            for place, slot, block_digest in zip(places, slots, digests, strict=True):
                found = bytes(self.bytes_of(group, slot))
                assert found == content(blocks[place], len(found)), "another block's bytes"
                assert digest(found) == block_digest
            came += places
            failures |= dict(fetched.failures)
        self.say(wire.Release(number, wire.packed(came[::-1])))
        self.bed.settle()
        return sorted(came), failures

    def close(self) -> None:
        """End the connection, as a process that is killed does."""
        with contextlib.suppress(BufferError, AttributeError):
            self.memory.close()
        super().close()


def publication(
    engine: Engine, blocks: Sequence[BlockName], slots: Sequence[int], group: int = 0, owner: int = 0, **changed: Any
) -> wire.Publish:
    """That these blocks, tail first, are in these slots."""
    digests = [digest(engine.bytes_of(group, slot)) for slot in slots]
    fields = {
        "group": group,
        "slots": wire.packed(slots),
        "names": wire.joined(blocks),
        "chains": [wire.Chain(0, len(blocks), None)] if blocks else [],
        "digests": b"".join(digests),
        "owners": np.full(len(blocks), owner, "<u8").tobytes(),
        **changed,
    }
    return wire.Publish(**fields)


def in_books(tiers: LayoutTiers) -> tuple[list[dict[BlockName, int]], list[set[BlockName]]]:
    """What an engine should have been told: host slots and names on disk, by group."""
    index = tiers.tiers.index
    host = [
        {name: slot for slot in range(each.pool.num_slots) if (name := each.pool.name(slot)) is not None}
        for each in index.host
    ]
    disk = [{name for page in index.disk.index.pages(group) for name in page} for group in range(len(index.host))]
    return host, disk


@contextmanager
def engine_bed(
    folder: Path,
    num_extents: int = 8,
    store: MemoryStore | None = None,
    allowed_uids: Sequence[int] | None = None,
    openings: Sequence[int] = (1,),
    tracer: Tracer | None = None,
) -> Iterator[Bed]:
    """See `Bed`; *openings*: the number of the store's present one. Nothing is left in shared memory."""
    with ExitStack() as stack:
        bed = Bed(folder, stack, num_extents, store, allowed_uids, openings, tracer)
        yield bed
        bed.check()
