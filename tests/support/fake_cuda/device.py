"""FakeDevice: operations in streams, the order in which they run, and which of them may touch the same memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from fake_cuda.memory import Memory, scramble
from fake_cuda.schedules import Schedule
from fake_cuda.spans import Spans, first_overlap, sorted_spans

DEADLINE_S = 60.0  # until a thread that waits for the device gives up: reached only when a test fails
KERNEL_S = 2e-6
CYCLES_PER_S = 2e9


class CudaMisuse(RuntimeError):
    """A use of CUDA that a real device would answer with an error, a crash, or now and then wrong bytes."""


@dataclass(eq=False, repr=False)
class Operation:
    """One operation that was enqueued in a stream. *seconds* are the device's own, which no clock measures."""

    what: str
    stream: "StreamState"
    number: int  # in its stream, from 1 on
    known_before: dict[int, int]  # by stream, the last operation that has finished when this one begins
    run: Callable[[], object] | None
    reads: Spans
    writes: Spans
    seconds: float
    enqueued_at: float
    waits_for: "Operation | None" = None
    is_held: bool = False
    is_done: bool = False
    done_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} (stream {self.stream.stream_id}, operation {self.number})"

    def comes_after(self, other: "Operation") -> bool:
        """Whether streams and events put *other* before this operation."""
        return self.known_before.get(other.stream.stream_id, 0) >= other.number

    def conflict(self, other: "Operation") -> tuple[int, int] | None:
        """The first addresses that both operations touch and at least one writes; None if there are none."""
        return (
            first_overlap(self.writes, other.writes)
            or first_overlap(self.writes, other.reads)
            or first_overlap(self.reads, other.writes)
        )


@dataclass(eq=False, repr=False)
class StreamState:
    """A stream's queue, and the operations that one which is enqueued now comes after."""

    stream_id: int
    queue: deque[Operation] = field(default_factory=deque)
    last: Operation | None = None
    num_enqueued: int = 0
    known: dict[int, int] = field(default_factory=dict)
    time: float = 0.0


class FakeDevice:
    """Runs operations in the threads that wait for them, under one lock; *schedule* may run some earlier.

    A kernel that takes long (`hold`) ends only when the thread that made the device waits for it, or lets the device's
    time pass (`time_passes`): so a test decides what is still running. `violations` has every misuse, also one whose
    exception was caught on its way.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.memory = Memory()
        self.violations: list[str] = []
        self.default_stream = StreamState(0)
        self._streams = [self.default_stream]
        self._schedule = schedule
        self._owner = threading.get_ident()
        self._num_waiting = 0
        self._changed = threading.Condition(threading.RLock())
        self._open: list[Operation] = []  # operations of which the host does not know that they have finished
        self._known: dict[int, int] = {}  # by stream, the last operation that the host knows to have finished
        self._host_time = 0.0
        self._failures: dict[str, int] = {}  # by operation, how many more of them until one fails

    def new_stream(self) -> StreamState:
        with self._changed:
            self._streams.append(StreamState(len(self._streams)))
            return self._streams[-1]

    def stream(self, stream_id: int) -> StreamState:
        """The stream with that handle; 0 is the default one."""
        with self._changed:
            return self._streams[stream_id]

    def enqueue(
        self,
        stream: StreamState,
        what: str,
        run: Callable[[], object] | None = None,
        reads: Spans = (),
        writes: Spans = (),
        unordered_reads: Spans = (),
        seconds: float = KERNEL_S,
        is_held: bool = False,
        waits_for: Operation | None = None,
    ) -> Operation:
        """Add an operation to the stream; `CudaMisuse` if another one may touch the same memory at the same time.

        *unordered_reads* are sources that the driver may read at any time from now on.
        """
        with self._changed:
            if self._fails(what):
                raise RuntimeError(f"CUDA error: out of memory in {what}")
            stream.num_enqueued += 1
            known = _latest(self._known, stream.known)
            if waits_for is not None:
                known = _latest(known, waits_for.known_before)
                known = _latest(known, {waits_for.stream.stream_id: waits_for.number})
            reads, writes = sorted_spans((*reads, *unordered_reads)), sorted_spans(writes)
            operation = Operation(
                what,
                stream,
                stream.num_enqueued,
                known,
                run,
                reads,
                writes,
                seconds,
                self._host_time,
                waits_for,
                is_held,
            )
            self._look_for_races(operation, sorted_spans(unordered_reads))
            stream.known = {**known, stream.stream_id: operation.number}
            stream.last = operation
            self.memory.forget_uploads(writes)
            self._scramble_targets(operation)
            self._open.append(operation)
            stream.queue.append(operation)
            self._run_early(stream)
            return operation

    def wait(self, operation: Operation) -> None:
        """Wait until the operation has finished. Operations that it does not come after need not run."""
        with self._changed:
            self._finish(operation)
            self._known = _latest(self._known, operation.known_before)
            self._known = _latest(self._known, {operation.stream.stream_id: operation.number})
            self._host_time = max(self._host_time, operation.done_at)
            self._open = [each for each in self._open if self._known.get(each.stream.stream_id, 0) < each.number]

    def wait_all(self) -> None:
        """Wait until all operations of all streams have finished."""
        with self._changed:
            for stream in list(self._streams):
                if stream.last is not None:
                    self.wait(stream.last)

    def hold(self, stream: StreamState, cycles: int) -> None:
        """Enqueue a kernel that takes *cycles* of the device's time."""
        self.enqueue(stream, "a long kernel", seconds=cycles / CYCLES_PER_S, is_held=True)

    @contextmanager
    def time_passes(self) -> Iterator[None]:
        """Let kernels that take long end, while the owner waits for other threads."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1

    def fail(self, what: str, number: int) -> None:
        """Refuse one operation of that name: the *number*th from now on, 1 is the next."""
        with self._changed:
            self._failures[what] = number

    def register(self, address: int, num_bytes: int) -> int:
        """What `cudaHostRegister` does; returns its error."""
        with self._changed:
            if self.memory.register(address, num_bytes):
                return 0
            self.violations.append(f"host memory at {address:#x} is registered twice")
            return 712  # cudaErrorHostMemoryAlreadyRegistered

    def unregister(self, address: int) -> int:
        """What `cudaHostUnregister` does; returns its error."""
        with self._changed:
            span = self.memory.unregister(address)
            if span is None:
                self.violations.append(f"host memory at {address:#x} is not registered, and was unregistered")
                return 713  # cudaErrorHostMemoryNotRegistered
            for operation in self._open:
                if first_overlap((span,), operation.reads) or first_overlap((span,), operation.writes):
                    self.violations.append(f"host memory was unregistered under {operation}")
                    operation.run = None  # the memory may be gone when it would run
            return 0

    def note_misuse(self, message: str) -> CudaMisuse:
        """Note a misuse, and give the error to raise for it."""
        with self._changed:
            self.violations.append(message)
        return CudaMisuse(message)

    def check(self) -> None:
        """Raise `CudaMisuse` if there was a misuse so far, or host memory is still registered."""
        if self.memory.left_registered:
            self.violations.append(f"{len(self.memory.left_registered)} pieces of host memory are still registered")
        if self.violations:
            raise CudaMisuse("; ".join(self.violations))

    def _look_for_races(self, operation: Operation, unordered_reads: Spans) -> None:
        for one, other in pairwise(operation.writes):
            if other[0] < one[1]:
                raise self.note_misuse(f"{operation} writes {other[0]:#x} twice")
        for other_operation in self._open:
            if operation.comes_after(other_operation):
                addresses = first_overlap(unordered_reads, other_operation.writes)
            else:
                addresses = operation.conflict(other_operation)
            if addresses is not None:
                raise self.note_misuse(f"{operation} and {other_operation} are unordered; both touch {addresses[0]:#x}")

    def _scramble_targets(self, operation: Operation) -> None:
        """Scramble the host memory that the operation will write, unless another operation needs what is there."""
        in_host = tuple(span for span in operation.writes if self.memory.is_registered(span[0], span[1] - span[0]))
        is_wanted = any(
            first_overlap(in_host, each.reads) or first_overlap(in_host, each.writes) for each in self._open
        )
        if not is_wanted:
            scramble(in_host)

    def _fails(self, what: str) -> bool:
        if what not in self._failures:
            return False
        self._failures[what] -= 1
        if self._failures[what] > 0:
            return False
        del self._failures[what]
        return True

    def _run_early(self, stream: StreamState) -> None:
        while stream.queue and not (head := stream.queue[0]).is_held:
            if head.waits_for is not None and not head.waits_for.is_done:
                return
            if not self._schedule.runs_at_once(stream.stream_id, head.number):
                return
            self._run(head)

    def _finish(self, operation: Operation) -> None:
        while not operation.is_done:
            head = operation.stream.queue[0]
            if head.waits_for is not None and not head.waits_for.is_done:
                self._finish(head.waits_for)
            elif head.is_held and self._owner != threading.get_ident() and not self._num_waiting:
                if not self._changed.wait(DEADLINE_S):
                    raise self.note_misuse(f"no thread lets time pass for {head}")
            else:
                self._run(head)

    def _run(self, operation: Operation) -> None:
        stream = operation.stream
        began_at = max(stream.time, operation.enqueued_at)
        if operation.waits_for is not None:
            began_at = max(began_at, operation.waits_for.done_at)
        stream.time = operation.done_at = began_at + operation.seconds
        operation.is_done = True
        stream.queue.popleft()
        self._changed.notify_all()
        if operation.run is not None:
            operation.run()


def _latest(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one.keys() | other.keys()}
