"""TracedBlocks: which requests that are traced have which blocks."""

from collections import deque
from collections.abc import Mapping, Sequence

from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.tiers.naming.block_hash import BlockName

MOST_BLOCKS = 1 << 16  # names, a million tokens in blocks of 16: of requests before them no copy is told of
MOST_OWNERS = 8  # requests of one block, the newest
MOST_LINKS = 32  # requests of one batch


class TracedBlocks:
    """Blocks of the newest requests that are traced, by name. A block that several prompts begin with is all of theirs.
    Owned by one thread."""

    def __init__(self) -> None:
        self._owners: dict[BlockName, tuple[TraceContext, ...]] = {}  # oldest first
        self._added: deque[tuple[TraceContext, Sequence[BlockName]]] = deque()  # oldest first
        self._num_added = 0  # names in these

    def add(self, request: TraceContext, names: Sequence[BlockName]) -> None:
        """Take in that the request with this span has these blocks too; *names* must not change."""
        new: dict[BlockName, tuple[TraceContext, ...]] = dict.fromkeys(names, (request,))
        for name in new.keys() & self._owners.keys():
            new[name] = (*self._owners[name][1 - MOST_OWNERS :], request)
        self._owners.update(new)
        self._added.append((request, names))
        self._num_added += len(names)
        while self._num_added > MOST_BLOCKS and len(self._added) > 1:
            self._forget_oldest()

    def find(self, names: Sequence[BlockName]) -> Mapping[TraceContext, Sequence[int]]:
        """The spans of the requests that have some of these blocks, `MOST_LINKS` at most, and the places of theirs."""
        found: dict[TraceContext, list[int]] = {}
        if self._owners.keys().isdisjoint(names):  # nearly always, where few are sampled: it takes 2 us for 128 names
            return found
        for place, name in enumerate(names):
            for request in dict.fromkeys(self._owners.get(name, ())):  # one that was added twice counts once
                if request in found or len(found) < MOST_LINKS:
                    found.setdefault(request, []).append(place)
        return found

    def _forget_oldest(self) -> None:
        request, names = self._added.popleft()
        self._num_added -= len(names)
        for name in names:
            others = tuple(owner for owner in self._owners.get(name, ()) if owner is not request)
            if others:
                self._owners[name] = others
            else:
                self._owners.pop(name, None)
