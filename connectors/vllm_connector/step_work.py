"""What the two halves of the connector tell each other with each of vLLM's steps. Both are pickled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.engine.attached.wire import Hello


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copies between pages of one group on the device and host slots, pair by pair."""

    group_id: int
    pages: Sequence[int]  # vLLM's block ids
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """The memory that slots are in: that of one process of a sidecar (*boot*), which gives it at the Unix socket *path*
    to whoever says *hello*."""

    boot: bytes
    path: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the workers do in one step, beside computing. Slots are in the segment that all of them have said they map.

    *stores* are of what the step before has computed, and come before anything is written to a page; then come *loads*,
    before the step's forward pass. Pages of *unloadable* were to be loaded and cannot be: vLLM has to be told.
    """

    number: int
    wanted: Segment | None = None  # to be mapped, and told of
    loads: Sequence[PageCopies] = ()
    stores: Sequence[PageCopies] = ()
    unloadable: Sequence[int] = ()

    @property
    def is_reported(self) -> bool:
        """Whether the workers say something of it."""
        return self.wanted is not None or bool(self.loads) or bool(self.stores)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What became of one step's work, of one worker or of several (vLLM joins them with `aggregate`)."""

    number: int
    boot: bytes | None  # the segment that each of them maps
    has_stored: bool = True  # the slots have the pages' bytes
    unloaded: frozenset[int] = frozenset()  # pages that do not have what vLLM was told of
    num_workers: int = field(default=1)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Both reports as one, of the same step."""
        return WorkerReport(
            self.number,
            self.boot if self.boot == other.boot else None,
            self.has_stored and other.has_stored and self.number == other.number,
            self.unloaded | other.unloaded,
            self.num_workers + other.num_workers,
        )
