"""Messages between the two halves of the connector in each of vLLM's steps. vLLM pickles them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.engine.attached.wire import Hello


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copies between vLLM's pages and host slots of one group: each page and the slot at the same index are a pair.

    If *is_late* is True, workers may copy these pages to their slots after the step's forward pass. vLLM changes the
    pages only in a later step, and the work of that step has `ends_late_stores` set.
    """

    group_id: int
    pages: Sequence[int]  # vLLM's block ids
    slots: Sequence[int]
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class AwaitedLoad:
    """A load for which a request waits outside of vLLM's steps, into *pages* of all groups."""

    request_id: str
    pages: frozenset[int]


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

    *stores* copies the previous step's blocks to slots, before any page is written, except for late copies (see
    `PageCopies`). If *ends_late_stores* is True, all late copies of earlier steps end before any page is written.
    *loads* copies blocks to pages, before the step's forward pass. All slots are in shared memory that every worker has
    mapped already. The workers report to vLLM that *unloadable_pages* could not be loaded.

    If a request does not run before its load has ended, the load is in *awaited*. Then the workers report to vLLM the
    request instead of the pages, and `loads` may copy its blocks during the step's forward pass.
    """

    number: int
    wanted: Segment | None = None  # segment to map and to report on
    loads: Sequence[PageCopies] = ()
    stores: Sequence[PageCopies] = ()
    unloadable_pages: Sequence[int] = ()
    ends_late_stores: bool = False
    awaited: Sequence[AwaitedLoad] = ()

    @property
    def is_reported(self) -> bool:
        """True if each worker must send a `WorkerReport` on the step. Reports on other steps are allowed."""
        return self.wanted is not None or bool(self.loads) or bool(self.stores)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The outcome of copies up to the end of a step, of one worker or several (vLLM joins reports with `aggregate`).

    *stored* has the numbers of the steps whose stores have ended since the last report, all of them successfully.
    *unstored* has the numbers of the steps whose stores have ended, but some of them failed. A number occurs once for
    each worker that reports it.
    """

    number: int  # of the step
    boot: bytes | None  # boot id of the segment that each worker maps, or None if they map different segments or none
    stored: tuple[int, ...] = ()
    unstored: tuple[int, ...] = ()
    unloaded: frozenset[int] = frozenset()  # pages whose load failed
    num_workers: int = field(default=1)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Return one report that combines two reports of different workers on the same step."""
        return WorkerReport(
            self.number,
            self.boot if self.boot == other.boot else None,
            self.stored + other.stored,
            self.unstored + other.unstored,
            self.unloaded | other.unloaded,
            self.num_workers + other.num_workers,
        )
