"""A sidecar's endpoint over real sockets and shared memory, which has its turn when the engine polls, and can die."""

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtier.engine.attached.attachment import Attached, Attachment
from kvtier.engine.attached.session import open_session
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello, new_engine
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.own.block_layout import BlockLayout, BlockShape
from kvtier.sidecar.own.endpoint import EngineEndpoint, EngineFrames
from kvtier.sidecar.port import Port, listen_at_path
from kvtier.sidecar.refusals import Refusals
from kvtier.sidecar.shares import Shares
from kvtier.store.blob_store import BlobStore
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.transfer.attached_memory import AttachedMemory, PreparedHost
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.lane import Transfer
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import TransferEngine

NAMESPACE = b"n" * 16
QUIET_TURNS = 6  # in which nothing is said: then nothing is under way


class NoLane:
    """A lane that takes nothing: the engine of a test polls without being woken."""

    num_pending = 0

    def submit(self, transfer: Transfer) -> bool:
        return False

    def close(self) -> bool:
        return True


class SidecarBed:
    """A sidecar without its loop: layouts and an endpoint in this process, which `turn`, `die` and `start` again."""

    def __init__(
        self,
        shapes: Sequence[BlockShape],
        num_bytes: int,
        extent_bytes: int,
        store: BlobStore | None,
        clock: Callable[[], float],
        make_transfers: Callable[[], TransferEngine],
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        make_remote: Callable[[bytes], RemoteTier | None] = lambda namespace: None,
    ) -> None:
        """*make_transfers*: lanes between host memory and disk, made anew for each life; *make_remote*: see
        `Layouts`."""
        self.shapes = tuple(shapes)
        self._num_bytes = num_bytes
        self._extent_bytes = extent_bytes
        self._store = store
        self._clock = clock
        self._make_transfers = make_transfers
        self._quotas = quotas
        self._make_remote = make_remote
        self._temporary = TemporaryDirectory(prefix="kvt-")  # sockets' paths are short
        self._folder = Path(self._temporary.name)
        self.path = str(self._folder / f"{secrets.token_hex(4)}.sock")
        self.is_alive = False
        self.num_deaths = 0
        self.is_stopped = False  # as by SIGSTOP: it has no turn
        self.start()

    def start(self) -> None:
        """Be a new process."""
        self.segment = Segment(self._num_bytes, self._folder)
        self.segment.wait_backed(60)
        self.transfers = self._make_transfers()
        self.layouts = Layouts(
            self.segment,
            self.transfers,
            self._store,
            clock=self._clock,
            extent_bytes=self._extent_bytes,
            quotas=self._quotas,
            make_remote=self._make_remote,
        )
        self.layouts.shares = Shares(lambda: 1 << 40, self.layouts.ledger)  # one engine may have all
        refusals = Refusals(self._clock, "engine")
        self.port = Port([listen_at_path(self.path)], self._clock, refusals.refused, EngineFrames)
        self.endpoint = EngineEndpoint(self.port, self.layouts, refusals, self._clock, "a test")
        self.is_alive = True

    def die(self) -> None:
        """End as by SIGKILL: the engines' connections end, and the segment loses its name."""
        if self.is_alive:
            self.is_alive = False
            self.num_deaths += 1
            self.endpoint.close()
            self.transfers.close()
            self.segment.close()
            Path(self.path).unlink()

    @property
    def tiers(self) -> LayoutTiers:
        """Of the engines' one layout."""
        return self.layouts.open(BlockLayout(NAMESPACE, "a model", self.shapes))

    def turn(self) -> None:
        """Do what the sidecar's loop does, but for looking at the lanes."""
        if self.is_alive and not self.is_stopped:
            self.endpoint.receive()
            self.transfers.poll()
            self.layouts.poll()
            self.endpoint.tick()
            self.endpoint.receive()

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""
        if self.is_alive:
            self.endpoint.check()
            self.layouts.check()

    def close(self) -> None:
        """End it for good."""
        self.die()
        self._temporary.cleanup()


class SteppedAttachment(Attachment[PreparedHost]):
    """Attaches when it is asked for what is ready, while the sidecar has its turns."""

    def __init__(self, bed: SidecarBed, memories: Sequence[AttachedMemory], engine: bytes | None) -> None:
        self.path = bed.path
        self._engine = engine or new_engine()
        self._bed = bed
        self._shared = memories
        self._is_due = True

    def take(self) -> Attached[PreparedHost] | None:
        if not self._is_due or not self._bed.is_alive or self._bed.is_stopped:
            return None
        shapes = [GroupShape(*shape) for shape in self._bed.shapes]
        hello = Hello(VERSION, "a test", "a model", NAMESPACE, shapes, self._engine)
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(open_session, self._bed.path, hello, 60)
            while not opening.done():
                self._bed.turn()
        session = opening.result()
        self._is_due = False
        object.__setattr__(session, "wait_readable", lambda timeout_s: self._bed.turn())
        hosts = [memory.prepare(session.file, session.welcome.num_bytes) for memory in self._shared]
        return Attached(session, hosts)

    def attach_again(self) -> None:
        self._is_due = True

    def close(self) -> None:
        """There is no thread."""


class SteppedTiers(SidecarTiers):
    """The engine's side. When it polls, the sidecar has a turn: sometimes, if *rng* is given, and then it is late."""

    def __init__(
        self,
        bed: SidecarBed,
        groups: Sequence[AttentionGroup],
        memories: Sequence[AttachedMemory],
        transfers: TransferEngine,
        clock: Callable[[], float],
        events: EventLog | None = None,
        rng: random.Random | None = None,
        num_kept: Sequence[int] | None = None,
        engine: bytes | None = None,
    ) -> None:
        """*engine*: see `wire.Hello`; None: a new number."""
        attachment = SteppedAttachment(bed, memories, engine)
        super().__init__(attachment, groups, memories, transfers, NoLane(), clock, events=events, num_kept=num_kept)
        self.bed = bed
        self._rng = rng
        self._said: object = None
        self._num_quiet = 0

    @property
    def inner(self) -> LowerTiers:
        """The tiers in the sidecar."""
        return self.bed.tiers.tiers

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has been said for some turns, and an engine is attached if it can be."""
        return self._num_quiet >= QUIET_TURNS

    def stir(self) -> None:
        """Something may have happened: only from now on it is quiet."""
        self._num_quiet = 0

    def poll(self) -> None:
        has_turn = self._rng is None or self._rng.random() < 0.5
        if has_turn:
            self.bed.turn()
        super().poll()
        said = (
            self.status.num_changes,
            self.standing().num_attached,
            self.is_attached,
            sum(self.bed.endpoint.counts().operations.values()),
            self.bed.transfers.in_flight,
        )
        if said != self._said:
            self._num_quiet = 0
        elif has_turn:
            self._num_quiet += 1
        self._said = said


def attached_memory(device_blocks: npt.NDArray[np.uint8], num_layers: int = 1) -> AttachedMemory:
    """A memory without a GPU, whose host slots are to be a sidecar's."""

    def make(num_host_slots: int, file: int | None) -> BlockMemory:
        return CpuMemory(device_blocks, num_host_slots, num_layers, file=file)

    return AttachedMemory(make)
