"""What is remembered of footers, and that it has a bound."""

from chains import chain_keys

from kvtier.store.remote.objects.known_segments import KnownSegment, KnownSegments
from kvtier.store.remote.objects.segment import Entry

KEYS = chain_keys(40)


def segment(name: str, keys: list[bytes], tag: str = "one") -> KnownSegment:
    return KnownSegment(name, tag, [Entry(key, 10 * number, 10, b"checksum") for number, key in enumerate(keys)])


def known_keys(known: KnownSegments) -> list[int]:
    return [number for number, key in enumerate(KEYS) if known.places([key])]


def test_what_was_used_least_lately_is_forgotten_first() -> None:
    known = KnownSegments(max_keys=30)
    for number in range(3):
        known.add(segment(str(number), KEYS[10 * number : 10 * number + 10]))
    known.places(KEYS[:1])

    known.add(segment("3", KEYS[30:40]))

    assert known_keys(known) == [*range(10), *range(20, 40)]


def test_a_segment_that_is_too_long_to_remember_is_forgotten_at_once() -> None:
    known = KnownSegments(max_keys=5)
    known.add(segment("a", KEYS))

    assert known_keys(known) == []


def test_what_an_object_held_before_is_forgotten_when_it_holds_something_else() -> None:
    known = KnownSegments()
    known.add(segment("a", KEYS[:10]))
    known.add(segment("a", KEYS[5:15], "two"))

    assert known_keys(known) == list(range(5, 15))
    assert known.places(KEYS[5:6])[KEYS[5]].tag == "two"


def test_forgetting_an_object_leaves_what_another_holds() -> None:
    known = KnownSegments()
    known.add(segment("a", KEYS[:10]))
    known.add(segment("b", KEYS[5:15]))

    known.forget("a")

    assert known_keys(known) == list(range(5, 15))


def test_a_value_that_was_refused_is_not_told_again_until_the_object_is_another() -> None:
    known = KnownSegments()
    known.add(segment("a", KEYS[:3]))
    known.refuse(known.places(KEYS[1:2])[KEYS[1]])

    known.add(segment("a", KEYS[:3]))
    assert known_keys(known) == [0, 2]

    known.add(segment("a", KEYS[:3], "two"))
    assert known_keys(known) == [0, 1, 2]
