"""`SegmentSearch`: a search for a prompt's blocks in an object store whose objects hold many blocks each."""

from collections.abc import Container, Iterator, Sequence

from kvtier.store.remote.objects.segment_names import TOP, SegmentName, level_of

_FREE_QUESTIONS = 64  # requests for segments below the top level, in a search that finds nothing
_GROWTH = 4


class SegmentSearch:
    """A search for the segments (objects with consecutive blocks) of one prompt.

    It says which segments to request next, and does no I/O itself. The hash of a key gives it a level from 0 to `TOP`;
    higher levels are rarer (see `segment_names`). Cutting the prompt after each key of level n or higher gives the
    intervals of level n. A segment holds one interval of some level.

    - The first round requests all intervals of the level `TOP`, which are the longest.
    - The second round requests about two intervals of each lower level, beginning at the first missing key.
    - Further rounds do the same, but with four times as many intervals of each level at which segments were found.

    The search usually ends when the second or a later round finds nothing. Below `TOP` it makes at most 64 requests,
    plus one for each key that it has found.
    """

    def __init__(self, keys: Sequence[bytes], known: Container[bytes] = ()) -> None:
        """Prepare a search for those of *keys* that are not *known*.

        *keys* must be consecutive in the chain, because a segment's name depends on all keys in the segment.
        """
        self._keys = keys
        self._levels = [level_of(key) for key in keys]
        self._missing = [at for at, key in enumerate(keys) if key not in known]
        self._found: set[int] = set()  # indices of keys found by this search, without those known before it
        self._num_parts_asked = 0
        self._asked: dict[SegmentName, int] = {}  # requests of the last round, with their level
        self._seen: set[SegmentName] = set()
        self._reach = [1] * (TOP + 1)  # by level: how many intervals of the next level are searched
        self._has_asked_top = False

    def next_round(self) -> list[SegmentName]:
        """Return the segments to request in parallel, or an empty list if the search is over."""
        if not self._has_asked_top:
            self._has_asked_top = True
            top = self._ask({name: TOP for _, _, name in self._ahead(TOP)})
            if top:
                return top
        limit = max(_FREE_QUESTIONS + len(self._found) - self._num_parts_asked, 0)
        ahead = sorted(question for level in range(TOP) for question in self._ahead(level))
        parts = self._ask({name: level for _, level, name in ahead[:limit]})  # leaves out the end of the chain
        self._num_parts_asked += len(parts)
        return parts

    def found(self, names: Sequence[SegmentName], keys: Container[bytes]) -> None:
        """Record the result of a round: the segments that exist, and all keys that are in a known segment now.

        Segments that only another search has requested are ignored.
        """
        self._found.update(at for at in self._missing if self._keys[at] in keys)
        self._missing = [at for at in self._missing if at not in self._found]
        for level in {self._asked.get(name, TOP) for name in names} - {TOP}:
            self._reach[level] *= _GROWTH

    def _ask(self, names: dict[SegmentName, int]) -> list[SegmentName]:
        self._asked = {name: level for name, level in names.items() if name not in self._seen}
        self._seen.update(self._asked)
        return list(self._asked)

    def _ahead(self, level: int) -> Iterator[tuple[int, int, SegmentName]]:
        num_passed, end = 0, -1
        for at in self._missing:
            if at <= end:
                continue
            end = next((n for n in range(at, len(self._keys)) if self._levels[n] >= level), len(self._keys))
            if end == len(self._keys):
                return
            if end in self._found:
                continue  # parts of the interval exist
            yield from ((end, level, name) for name in self._names(end, level) if name not in self._seen)
            num_passed += self._levels[end] > level
            if num_passed == self._reach[level]:
                return

    def _names(self, at: int, level: int) -> Iterator[SegmentName]:
        inner = -1
        for before in range(at - 1, -1, -1):
            if self._levels[before] >= level:
                yield SegmentName(inner + 1, self._keys[at])
                return
            inner = max(inner, self._levels[before])
        # The interval may have begun before the first key of the search. The keys there have unknown levels.
        for possible in range(inner + 1, level + 1):
            yield SegmentName(possible, self._keys[at])
