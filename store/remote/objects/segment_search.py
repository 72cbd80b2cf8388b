"""`SegmentSearch`: which segments may hold the keys of a chain, asked for in rounds, the longest ones first."""

from collections.abc import Container, Iterator, Sequence

from kvtier.store.remote.objects.segment_names import TOP, SegmentName, level_of

_FREE_QUESTIONS = 64  # for segments below the top level, in a search that finds nothing
_GROWTH = 4


class SegmentSearch:
    """The questions that find the segments of one chain, whose keys are in its order. Pure: it asks nobody.

    The first round asks for every interval of the top level. Those after it ask, from the first key that is nowhere,
    for the parts of the interval that was not there: two a level on average. A level of which something was found is
    asked for further ahead. So the search ends with the first interval of which all parts are nowhere, unless there is
    more behind it. Below the top level it asks 64 questions, and one more for each key that it has found.
    """

    def __init__(self, keys: Sequence[bytes], known: Container[bytes] = ()) -> None:
        """*keys* without gaps, so that it is seen where intervals begin; those that are *known* are not looked for."""
        self._keys = keys
        self._levels = [level_of(key) for key in keys]
        self._missing = [at for at, key in enumerate(keys) if key not in known]
        self._found: set[int] = set()  # in this search; of what is known from before, others may be asked for again
        self._num_parts_asked = 0
        self._asked: dict[SegmentName, int] = {}  # to the level at which it was asked for, of the last round
        self._seen: set[SegmentName] = set()
        self._reach = [1] * (TOP + 1)  # by level: how many intervals of the level above it are gone through
        self._has_asked_top = False

    def next_round(self) -> list[SegmentName]:
        """What to ask for beside each other; nothing if the search is over."""
        if not self._has_asked_top:
            self._has_asked_top = True
            top = self._ask({name: TOP for _, _, name in self._ahead(TOP)})
            if top:
                return top
        limit = max(_FREE_QUESTIONS + len(self._found) - self._num_parts_asked, 0)
        ahead = sorted(question for level in range(TOP) for question in self._ahead(level))
        parts = self._ask({name: level for _, level, name in ahead[:limit]})  # the last of the chain is left out
        self._num_parts_asked += len(parts)
        return parts

    def found(self, names: Sequence[SegmentName], keys: Container[bytes]) -> None:
        """Segments of these *names* were there, and of the search's keys those in *keys* have a place now.

        Names of another search are passed over.
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
        """Where intervals of *level* end that have missing keys, and their names, as far as that level reaches."""
        num_passed, end = 0, -1
        for at in self._missing:
            if at <= end:
                continue
            end = next((n for n in range(at, len(self._keys)) if self._levels[n] >= level), len(self._keys))
            if end == len(self._keys):
                return
            if end in self._found:
                continue  # the interval is there in parts
            yield from ((end, level, name) for name in self._names(end, level) if name not in self._seen)
            num_passed += self._levels[end] > level
            if num_passed == self._reach[level]:
                return

    def _names(self, at: int, level: int) -> Iterator[SegmentName]:
        """Names that the interval of *level* that ends at key *at* may have: several where the chain may have begun
        before the first key, so that not all of the interval is known."""
        inner = -1
        for before in range(at - 1, -1, -1):
            if self._levels[before] >= level:
                yield SegmentName(inner + 1, self._keys[at])
                return
            inner = max(inner, self._levels[before])
        for possible in range(inner + 1, level + 1):
            yield SegmentName(possible, self._keys[at])
