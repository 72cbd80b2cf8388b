"""Which questions find the segments of a chain, and how many they are; asked of a dictionary."""

import random
from dataclasses import dataclass, field

import pytest
from chains import chain_keys, records_of

from kvtier.store.remote.objects.segment_names import SegmentName, cut
from kvtier.store.remote.objects.segment_search import SegmentSearch


@dataclass
class Shelf:
    """Segments by name, and what was asked for."""

    segments: dict[SegmentName, list[bytes]] = field(default_factory=dict)
    num_questions: int = 0
    num_rounds: int = 0

    def put(self, keys: list[bytes], start: int, end: int) -> None:
        for segment in cut(records_of(keys)[start:end]):
            self.segments[segment.name] = [record.key for record in segment.records]

    def find(self, keys: list[bytes]) -> int:
        """How many of *keys*, from the first on, are found."""
        self.num_questions = self.num_rounds = 0
        found: set[bytes] = set()
        search = SegmentSearch(keys)
        while names := search.next_round():
            assert len(set(names)) == len(names)
            self.num_questions += len(names)
            self.num_rounds += 1
            there = [name for name in names if name in self.segments]
            found |= {key for name in there for key in self.segments[name]}
            search.found(there, found)
        return next((number for number, key in enumerate(keys) if key not in found), len(keys))


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_that_was_put_as_a_whole_is_found_by_few_questions(seed: int) -> None:
    keys = chain_keys(4000, str(seed))
    shelf = Shelf()
    shelf.put(keys, 0, 4000)

    assert shelf.find(keys) == 4000
    assert shelf.num_questions <= 160
    assert shelf.num_rounds <= 12


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_that_nobody_put_is_given_up_soon(seed: int) -> None:
    shelf = Shelf()

    assert shelf.find(chain_keys(4000, str(seed))) == 0
    assert shelf.num_questions <= 4000 / 256 + 64 + 30
    assert shelf.num_rounds <= 2


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_calls", [2, 5, 40])
def test_a_chain_that_was_put_in_parts_is_found(seed: int, num_calls: int) -> None:
    rng = random.Random(seed)
    keys = chain_keys(2000, str(seed))
    places = sorted(rng.sample(range(1, 2000), num_calls - 1))
    shelf = Shelf()
    for start, end in zip([0, *places], [*places, 2000], strict=True):
        shelf.put(keys, start, end)

    assert shelf.find(keys) == 2000
    assert shelf.num_questions <= 64 + 2000 + 16
    assert shelf.num_rounds <= 13


def test_the_front_of_a_very_long_chain_is_found_beside_all_that_is_asked_in_vain() -> None:
    keys = chain_keys(60_000)
    shelf = Shelf()
    shelf.put(keys, 0, 100)

    assert shelf.find(keys) == 100


@pytest.mark.parametrize("num_blocks", [1, 3, 30, 100])
@pytest.mark.parametrize("seed", range(20))
def test_another_question_about_a_document_finds_all_but_four_times_what_followed_it(
    seed: int, num_blocks: int
) -> None:
    document = chain_keys(1000, str(seed))
    one = document + chain_keys(num_blocks, "a question", after=document[-1][16:48])
    other = document + chain_keys(200, "another", after=document[-1][16:48])
    shelf = Shelf()
    shelf.put(one, 0, len(one))

    assert 1000 - max(4 * num_blocks, 8) <= shelf.find(other) <= 1000


def test_keys_that_are_known_are_not_asked_for() -> None:
    keys = chain_keys(1000)
    search = SegmentSearch(keys, known=set(keys[:-1]))

    rounds = []
    while names := search.next_round():
        rounds.append(names)
        search.found([], set(keys[:-1]))

    assert {name.last for names in rounds for name in names} <= {keys[-1]}


@pytest.mark.parametrize("seed", range(10))
def test_a_question_from_the_middle_of_a_chain_finds_the_rest(seed: int) -> None:
    """The front is in a tier of the asker's own. What begins before it is found too, by its end."""
    keys = chain_keys(3000, str(seed))
    shelf = Shelf()
    shelf.put(keys, 0, 3000)

    assert shelf.find(keys[777:]) == 3000 - 777
