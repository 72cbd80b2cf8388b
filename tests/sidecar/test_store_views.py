"""One store of several layouts: each is told of what it lost, and of why."""

from kvtier.sidecar.shared_store import SharedStore
from kvtier.store.blob_store import Blob
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest

ONE, OTHER = b"1" * 16, b"2" * 16
VALUE = memoryview(bytes(4096))


def key_of(namespace: bytes, number: int) -> bytes:
    return namespace + number.to_bytes(36, "big")


def blob(namespace: bytes, number: int) -> Blob:
    return Blob(key_of(namespace, number), digest(VALUE), VALUE)


def test_what_one_layout_pushes_out_is_told_to_whose_it_was_as_gone() -> None:
    shared = SharedStore(MemoryStore(4 * charged_bytes(VALUE.nbytes)))
    one, other = shared.view(ONE), shared.view(OTHER)
    other.put_many([blob(OTHER, number) for number in range(4)])

    own = one.put_many([blob(ONE, number) for number in range(2)])

    assert own == []
    gone = other.pop_evicted()
    assert len(gone) == 2
    assert all(key.startswith(OTHER) for key in gone)
    assert (other.pop_evicted(), other.take_cleared(), one.pop_evicted()) == ([], [], [])


def test_what_was_to_go_is_told_as_cleared() -> None:
    shared = SharedStore(MemoryStore(1 << 20))
    one, other = shared.view(ONE), shared.view(OTHER)
    one.put_many([blob(ONE, 1)])
    other.put_many([blob(OTHER, 1), blob(OTHER, 2)])

    assert shared.whole().delete([key_of(ONE, 1), key_of(OTHER, 2)]) == 2

    assert (one.take_cleared(), other.take_cleared()) == ([key_of(ONE, 1)], [key_of(OTHER, 2)])
    assert (one.pop_evicted(), other.pop_evicted()) == ([], [])
    assert list(other.keys()) == [key_of(OTHER, 1)]
