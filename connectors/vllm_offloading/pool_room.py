"""`PoolRoom`: decides which blocks vLLM loads from disk now, so that requests wait for room in a full host pool."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

MAX_WAIT_S = 10.0  # per request; vLLM then computes the blocks for which there is no room
MAX_POOLS = 4  # per request: loads, in pools full of blocks. Blocks that wait in the pool may be evicted again


class Verdict(Enum):
    """What vLLM does about a block that is on disk and not in its host pool."""

    LOAD = auto()
    WAIT = auto()  # look the block up again in the next step
    COMPUTE = auto()


@dataclass(frozen=True, slots=True)
class HostPool:
    """The part of vLLM's host pool that `PoolRoom` reads and calls."""

    num_available: Callable[[], int]  # chunks that are free or that vLLM may evict
    touch: Callable[[Sequence[bytes]], None]  # have vLLM evict these blocks after all others, the last of them first


@dataclass(slots=True)
class _Loading:
    """The loads of one request so far."""

    arrival: int  # the number of requests that arrived earlier
    keys: dict[bytes, None] = field(default_factory=dict)  # in the order in which they were first loaded
    num_loads: int = 0  # more than *keys* if blocks were evicted from the pool before vLLM used them
    waits_since: float | None = None
    has_started: bool = False  # vLLM has copied the blocks, or computes them


class PoolRoom:
    """The room for blocks from disk in vLLM's host pool, and the requests that wait for room.

    vLLM computes a block, and all later blocks of its request, if the pool has no room for it. The pool is full while
    its blocks are being copied, for example because other requests load their prefixes. These copies end soon, so
    waiting for them takes less time than computing a long prefix.

    vLLM can evict the loaded blocks of a request until all of its blocks are in the pool and vLLM copies them. So that
    each block is loaded only once, a request takes no room while an earlier request waits, and evicts no block of an
    earlier request. `touch` makes vLLM evict the blocks of ended requests first. Only vLLM's scheduler calls the
    methods.
    """

    def __init__(self, num_chunks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the room of a pool of *num_chunks* chunks. It counts as empty until the first call of `see`."""
        self._num_chunks = num_chunks
        self._clock = clock
        self._pool: HostPool | None = None
        self._num_loads = 0  # before the first call of `see`
        self._num_arrived = 0
        self._requests: dict[str, _Loading] = {}
        self._holders: dict[str, _Loading] = {}  # have loaded blocks and have not started
        self._first_waiting: _Loading | None = None  # of this step
        self._is_touched = True  # no request has ended since the last `touch`

    def see(self, pool: HostPool) -> None:
        """Set the pool."""
        self._pool = pool

    def verdict(self, request_id: str, key: bytes) -> Verdict:
        """Decide about block *key* of a request. If the result is `LOAD`, vLLM takes one chunk for the block at once.

        A request may load at most as many different blocks as the pool has chunks. So a request whose blocks do not fit
        loads those that do, instead of evicting its own blocks again and again.
        """
        loading = self._loading(request_id)
        has_most = key not in loading.keys and len(loading.keys) >= self._num_chunks
        if has_most or loading.num_loads >= MAX_POOLS * self._num_chunks:
            return Verdict.COMPUTE
        if self._has_room(loading, key):
            self._touch()
            loading.keys[key] = None
            loading.num_loads += 1
            self._num_loads += 1
            if not loading.has_started:
                self._holders[request_id] = loading
            return Verdict.LOAD
        now = self._clock()
        if loading.waits_since is None:
            loading.waits_since = now
        if now - loading.waits_since >= MAX_WAIT_S:
            return Verdict.COMPUTE
        if self._first_waiting is None or loading.arrival < self._first_waiting.arrival:
            self._first_waiting = loading
        return Verdict.WAIT

    def on_step_end(self, started: Iterable[str] = ()) -> None:
        """Let the requests of the next step take room. *started* has the requests that vLLM runs since this step."""
        self._first_waiting = None
        for request_id in started:
            self._holders.pop(request_id, None)
            if request_id in self._requests:
                self._requests[request_id].has_started = True

    def on_finished(self, request_id: str) -> bool:
        """Forget a request that has ended. Return whether it has waited for room."""
        loading = self._requests.pop(request_id, None)
        self._holders.pop(request_id, None)
        self._is_touched = False  # vLLM has marked the blocks of this request as just used
        return loading is not None and loading.waits_since is not None

    def _loading(self, request_id: str) -> _Loading:
        loading = self._requests.get(request_id)
        if loading is None:
            loading = self._requests[request_id] = _Loading(self._num_arrived)
            self._num_arrived += 1
        return loading

    def _has_room(self, loading: _Loading, key: bytes) -> bool:
        waiting = self._first_waiting
        if waiting is not None and waiting.arrival < loading.arrival:
            return False
        num_available = self._num_chunks - self._num_loads if self._pool is None else self._pool.num_available()
        if num_available <= 0:
            return False
        num_held = sum(len(other.keys) for other in self._holders.values() if other.arrival <= loading.arrival)
        return key in loading.keys or num_held < self._num_chunks

    def _touch(self) -> None:
        if self._pool is None or self._is_touched:
            return
        holders = sorted(self._holders.values(), key=attrgetter("arrival"))
        if any(holder.waits_since is not None for holder in holders):  # otherwise vLLM has older blocks to evict
            self._is_touched = True
            self._pool.touch([key for holder in holders for key in holder.keys])
