"""`SegmentSearch`: the segments that may hold the keys of a chain, requested in rounds, the longest ones first."""

from collections.abc import Container, Iterator, Sequence

from kvtier.store.remote.objects.segment_names import TOP, SegmentName, level_of

_FREE_QUESTIONS = 64  # requests for segments below the top level, in a search that finds nothing
_GROWTH = 4


class SegmentSearch:
    """The requests that find the segments of one chain, whose keys are in its order. The class itself does no I/O.

    A segment is an interval of the chain, cut at keys of a given level (see `segment_names`). The first round asks for
    every interval of the top level. The later rounds begin at the first key that was not found. They ask for the
    smaller intervals in its missing interval, two per level on average. If segments of a level were found, the next
    rounds ask for more intervals of that level. So the search ends with the first interval of which nothing was found,
    unless segments behind it were found. Below the top level the search makes at most 64 requests, plus one for each
    key that it has found.
    """

    def __init__(self, keys: Sequence[bytes], known: Container[bytes] = ()) -> None:
        """Prepare a search for those *keys* that are not *known*.

        *keys* must be consecutive in the chain, because the keys show where intervals begin.
        """
        self._keys = keys
        self._levels = [level_of(key) for key in keys]
        self._missing = [at for at, key in enumerate(keys) if key not in known]
        self._found: set[int] = set()  # by this search; intervals that end with a known key may be requested
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
        """Note that segments of these *names* exist, and that the search's keys in *keys* now have a place.

        Names of another search are ignored.
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
        """Yield end, level and name of the intervals of *level* with missing keys, as far ahead as `_reach` says."""
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
        """Yield the names that the interval of *level* ending at key *at* may have.

        There are several if the chain may have begun before the first key, because then not all of the interval is
        known.
        """
        inner = -1
        for before in range(at - 1, -1, -1):
            if self._levels[before] >= level:
                yield SegmentName(inner + 1, self._keys[at])
                return
            inner = max(inner, self._levels[before])
        for possible in range(inner + 1, level + 1):
            yield SegmentName(possible, self._keys[at])
