"""Messages between the two halves of the connector in each of vLLM's steps. vLLM pickles them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.engine.attached.wire import Hello


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copies between vLLM's pages and host slots of one group: each page and the slot at the same index are a pair."""

    group_id: int
    pages: Sequence[int]  # vLLM's block ids
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """The shared memory of one sidecar process, which contains the host slots.

    *boot* identifies the process. Workers connect to the Unix socket *path* to map the memory. *hello* is the message
    with which vLLM's scheduler process attached to the sidecar. It has the engine's id, which workers send, too.
    """

    boot: bytes
    path: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class StepWork:
    """The copies that workers make in one step between vLLM's pages and the host slots.

    *stores* copies the previous step's blocks to slots, before any page is written. *loads* copies blocks to pages,
    before the step's forward pass. All slots are in shared memory that every worker has mapped already. The workers
    report to vLLM that *unloadable_pages* could not be loaded.
    """

    number: int
    wanted: Segment | None = None  # segment to map and to report on
    loads: Sequence[PageCopies] = ()
    stores: Sequence[PageCopies] = ()
    unloadable_pages: Sequence[int] = ()

    @property
    def is_reported(self) -> bool:
        """True if the workers send a `WorkerReport` on the step."""
        return self.wanted is not None or bool(self.loads) or bool(self.stores)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The outcome of one step's work, from one worker or from several (vLLM joins reports with `aggregate`)."""

    number: int
    boot: bytes | None  # boot id of the segment that each worker maps, or None if they map different segments or none
    has_stored: bool = True  # whether all stores of the step were copied
    unloaded: frozenset[int] = frozenset()  # pages whose load failed
    num_workers: int = field(default=1)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Return the two reports, which must be about the same step, combined into one."""
        return WorkerReport(
            self.number,
            self.boot if self.boot == other.boot else None,
            self.has_stored and other.has_stored and self.number == other.number,
            self.unloaded | other.unloaded,
            self.num_workers + other.num_workers,
        )
