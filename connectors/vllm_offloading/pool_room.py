"""`PoolRoom`: decides which blocks vLLM loads from disk now, so that requests wait for room in a full host pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_WAIT_S = 10.0  # per request; vLLM then computes the blocks for which there is no room
MAX_POOLS = 4  # per request: loads, in pools full of blocks. Blocks that wait in the pool may be evicted again


class Verdict(Enum):
    """What vLLM does about a block that is on disk and not in its host pool."""

    LOAD = auto()
    WAIT = auto()  # look the block up again in the next step
    COMPUTE = auto()


@dataclass(slots=True)
class _Loading:
    """The loads of one request so far."""

    keys: set[bytes] = field(default_factory=set)
    num_loads: int = 0  # more than *keys* if blocks were evicted from the pool before vLLM used them
    waits_since: float | None = None


class PoolRoom:
    """The room for blocks from disk in vLLM's host pool, and the requests that wait for room.

    vLLM computes a block, and all later blocks of its request, if the pool has no room for it. The pool is full while
    its blocks are being copied, for example because other requests load their prefixes. These copies end soon, so
    waiting for them takes less time than computing a long prefix. While a request waits, no later request takes room,
    because the first one's blocks might be evicted again. Only vLLM's scheduler calls the methods.
    """

    def __init__(self, num_chunks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the room of a pool of *num_chunks* chunks that is empty until the first call of `see`."""
        self._num_chunks = num_chunks
        self._clock = clock
        self._num_available: Callable[[], int] | None = None
        self._num_loads = 0  # before the first call of `see`
        self._requests: dict[str, _Loading] = {}
        self._first_waiting: str | None = None  # in this step

    def see(self, num_available: Callable[[], int]) -> None:
        """Set *num_available*, which returns the number of chunks that are free or that vLLM may evict."""
        self._num_available = num_available

    def verdict(self, request_id: str, key: bytes) -> Verdict:
        """Decide about block *key* of a request. If the result is `LOAD`, vLLM takes one chunk for the block at once.

        A request may load at most as many different blocks as the pool has chunks. So a request whose blocks do not fit
        loads those that do, instead of evicting its own blocks again and again.
        """
        loading = self._requests.setdefault(request_id, _Loading())
        has_most = key not in loading.keys and len(loading.keys) >= self._num_chunks
        if has_most or loading.num_loads >= MAX_POOLS * self._num_chunks:
            return Verdict.COMPUTE
        if self._first_waiting in (None, request_id) and self._available() > 0:
            loading.keys.add(key)
            loading.num_loads += 1
            self._num_loads += 1
            return Verdict.LOAD
        now = self._clock()
        if loading.waits_since is None:
            loading.waits_since = now
        if now - loading.waits_since >= MAX_WAIT_S:
            return Verdict.COMPUTE
        self._first_waiting = self._first_waiting or request_id
        return Verdict.WAIT

    def on_step_end(self) -> None:
        """Let the requests of the next step take room, in the order in which vLLM looks them up."""
        self._first_waiting = None

    def on_finished(self, request_id: str) -> bool:
        """Forget a request that has ended. Return whether it has waited for room."""
        loading = self._requests.pop(request_id, None)
        return loading is not None and loading.waits_since is not None

    def _available(self) -> int:
        return self._num_chunks - self._num_loads if self._num_available is None else self._num_available()
