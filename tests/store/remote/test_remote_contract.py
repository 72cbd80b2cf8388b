"""The contract of `RemoteStore`, tested on every kind; and what `SealedRemote` makes of what a store gives."""

import random
import threading
from collections.abc import Callable

import pytest
from lying_remote import LyingRemote, Vices
from remote_cases import RemoteCase
from store_cases import NAMESPACE, blob_of, key_of, kv_bytes

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC, Codec
from kvtier.store.record import HEADER_BYTES, Fault, digest
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteStore, RemoteUnavailable

OTHER_NAMESPACE = b"model-B layout-1"
CIPHER = Cipher(bytes(32))
HALF_VICIOUS = Vices(fails=0.2, reorders=0.2, loses=0.2, lies=0.3)


def read(store: RemoteStore, keys: list[bytes], num_bytes: int = 20_000) -> list[tuple[bytes | Fault, bytes]]:
    return read_sealed(SealedRemote(store), keys, num_bytes)


def read_sealed(sealed: SealedRemote, keys: list[bytes], num_bytes: int = 20_000) -> list[tuple[bytes | Fault, bytes]]:
    outs = [bytearray(num_bytes) for _ in keys]
    results = sealed.read_many(keys, [memoryview(out) for out in outs])
    return [(result, bytes(out)) for result, out in zip(results, outs, strict=True)]


def chain_of(numbers: range, num_bytes: int = 20_000) -> list[Blob]:
    """Blocks that continue each other, the first one first. A key commits to those before it: only 0 has no parent."""
    blobs = [blob_of(number, num_bytes) for number in numbers]
    return [
        Blob(blob.key, blob.digest, blob.raw, b"" if number == 0 else key_of(number - 1))
        for number, blob in zip(numbers, blobs, strict=True)
    ]


@pytest.mark.parametrize("num_bytes", [2, 1000, 20_000, 3_000_000, 20_000_000])
def test_a_block_comes_back_bit_for_bit_to_every_client(case: RemoteCase, num_bytes: int) -> None:
    blob = blob_of(1, num_bytes)
    with case.open() as writer, case.open() as reader:
        assert SealedRemote(writer).put_many([blob]) == [True]

        for store in (writer, reader):
            assert read(store, [blob.key], num_bytes) == [(blob.digest, kv_bytes(1, num_bytes))]


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["plain", "encrypted"])
@pytest.mark.parametrize("codec", [NO_CODEC, CODECS["zstd-plane-2"]], ids=lambda codec: codec.name)
def test_blocks_are_sealed_as_on_disk(
    store: RemoteStore, case: RemoteCase, codec: Codec, cipher: Cipher | None
) -> None:
    blobs = chain_of(range(5))
    sealed = SealedRemote(store, codec, cipher)

    assert all(sealed.put_many(blobs))

    assert read_sealed(sealed, [blob.key for blob in blobs]) == [(blob.digest, bytes(blob.raw)) for blob in blobs]
    is_in_clear = bytes(blobs[0].raw) in case.stored(blobs[0].key)
    assert is_in_clear == (codec is NO_CODEC and cipher is None)


def test_what_is_not_there_is_missing_and_the_rest_comes(store: RemoteStore) -> None:
    SealedRemote(store).put_many(chain_of(range(3)))

    results = read(store, [key_of(7), key_of(1), key_of(8), key_of(0)])

    assert [result for result, _ in results] == [Fault.MISSING, blob_of(1).digest, Fault.MISSING, blob_of(0).digest]
    assert results[1][1] == kv_bytes(1, 20_000)


def test_presence_is_told_key_by_key(store: RemoteStore) -> None:
    SealedRemote(store).put_many(chain_of(range(10, 14)))

    assert store.exist_many([key_of(n) for n in (10, 11, 12, 13, 14, 15)]) == [True] * 4 + [False] * 2
    assert store.exist_many([]) == []


def test_blocks_that_are_of_use_without_those_before_them_are_found_apart(case: RemoteCase) -> None:
    """A window's last blocks are there, and none of the many before them."""
    blobs = [blob_of(number) for number in (20, 21, 22)]
    with case.open() as writer, case.open() as reader:
        SealedRemote(writer).put_many(blobs)

        assert reader.exist_many([key_of(number) for number in range(24)], apart=True) == [
            number in (20, 21, 22) for number in range(24)
        ]
        assert [result for result, _ in read(reader, [blob.key for blob in blobs])] == [blob.digest for blob in blobs]


def test_a_call_about_nothing_gives_nothing(store: RemoteStore) -> None:
    assert store.get_many([]) == []
    assert store.put_many([]) == []


def test_what_others_took_away_is_missing(store: RemoteStore, case: RemoteCase) -> None:
    SealedRemote(store).put_many(chain_of(range(3)))

    case.lose(key_of(1))

    assert read(store, [key_of(1)])[0][0] is Fault.MISSING
    assert read(store, [key_of(0)])[0][0] == blob_of(0).digest


def test_a_put_mends_what_somebody_has_spoilt(store: RemoteStore, case: RemoteCase) -> None:
    SealedRemote(store).put_many(chain_of(range(3)))
    case.overwrite(key_of(1), case.stored(key_of(1))[:-5] + b"spoilt"[:5])
    assert read(store, [key_of(1)])[0][0] is Fault.CORRUPT

    assert SealedRemote(store).put_many(chain_of(range(3))) == [True] * 3

    assert read(store, [key_of(1)])[0][0] == blob_of(1).digest


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def with_header_flipped(value: bytes) -> bytes:
    return value[:50] + bytes([value[50] ^ 1]) + value[51:]


def of_an_older_format(value: bytes) -> bytes:
    return value[:4] + (1).to_bytes(2, "little") + value[6:]


FOUL: dict[str, tuple[Callable[[bytes], bytes], set[Fault]]] = {
    "a flipped byte": (flipped, {Fault.CORRUPT}),
    "a flipped byte of the header": (with_header_flipped, {Fault.CORRUPT}),
    "an old record": (of_an_older_format, {Fault.VERSION}),
    "half of it": (lambda value: value[: len(value) // 2], {Fault.TORN, Fault.CORRUPT}),
    "a header alone": (lambda value: value[:HEADER_BYTES], {Fault.TORN, Fault.CORRUPT}),
    "not even a header": (lambda value: value[:10], {Fault.TORN, Fault.CORRUPT}),
    "something else": (lambda value: b"<html>502 Bad Gateway</html>" * 100, {Fault.TORN, Fault.CORRUPT}),
    "nothing": (lambda value: b"", {Fault.TORN, Fault.CORRUPT, Fault.MISSING}),
}


@pytest.mark.parametrize("foul", FOUL)
def test_a_value_that_is_not_the_block_is_refused(store: RemoteStore, case: RemoteCase, foul: str) -> None:
    SealedRemote(store).put_many(chain_of(range(3)))
    change, faults = FOUL[foul]

    case.overwrite(key_of(1), change(case.stored(key_of(1))))

    results = [result for result, _ in read(store, [key_of(0), key_of(1), key_of(2)])]
    assert results[1] in faults
    assert [results[0], results[2]] == [blob_of(0).digest, blob_of(2).digest]


def test_another_blocks_record_is_refused_and_another_namespaces_too(store: RemoteStore, case: RemoteCase) -> None:
    foreign = blob_of(1, namespace=OTHER_NAMESPACE)
    SealedRemote(store).put_many([*chain_of(range(3)), foreign])
    first, other = case.stored(key_of(0)), case.stored(foreign.key)

    case.overwrite(key_of(1), first)
    assert read(store, [key_of(1)])[0][0] is Fault.CORRUPT
    case.overwrite(key_of(1), other)
    assert read(store, [key_of(1)])[0][0] is Fault.FOREIGN


def test_a_record_in_clear_is_refused_where_records_are_encrypted(store: RemoteStore) -> None:
    SealedRemote(store).put_many([blob_of(1)])

    assert read_sealed(SealedRemote(store, NO_CODEC, CIPHER), [key_of(1)])[0][0] is Fault.KEY


def test_a_namespace_is_forgotten_and_others_stay(store: RemoteStore) -> None:
    SealedRemote(store).put_many([*chain_of(range(5)), blob_of(1, namespace=OTHER_NAMESPACE)])

    store.forget(NAMESPACE)

    assert not any(store.exist_many([key_of(number) for number in range(5)]))
    assert read(store, [key_of(1, OTHER_NAMESPACE)])[0][0] == blob_of(1).digest


def test_what_was_asked_is_counted(store: RemoteStore) -> None:
    SealedRemote(store).put_many(chain_of(range(4)))
    read(store, [key_of(number) for number in range(4)])
    store.exist_many([key_of(9)])

    usage = store.usage()
    assert min(usage.num_writes, usage.num_reads, usage.num_questions) > 0
    assert 4 * 20_000 <= usage.written_bytes < 5 * 20_000
    assert 4 * 20_000 <= usage.read_bytes < 5 * 20_000


def test_many_threads_share_a_client(store: RemoteStore) -> None:
    wrong: list[object] = []

    def play(first: int) -> None:
        blobs = chain_of(range(first, first + 10))
        for _ in range(3):
            SealedRemote(store).put_many(blobs)
            results = [result for result, _ in read(store, [blob.key for blob in blobs])]
            wrong.extend(r for r, blob in zip(results, blobs, strict=True) if r not in (blob.digest, Fault.MISSING))

    threads = [threading.Thread(target=play, args=(first,)) for first in (0, 5, 10, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert all(store.exist_many([key_of(number) for number in range(25)]))


def test_a_client_that_was_closed_answers_no_more(case: RemoteCase) -> None:
    store = case.open()
    store.close()
    store.close()

    with pytest.raises(RemoteUnavailable):
        store.get_many([key_of(1)])
    with pytest.raises(RemoteUnavailable):
        store.exist_many([key_of(1)])


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_lies_gives_no_wrong_bytes(case: RemoteCase, seed: int) -> None:
    rng = random.Random(seed)
    with case.open() as inner:
        lying = LyingRemote(inner, rng, HALF_VICIOUS)
        sealed = SealedRemote(lying)
        num_good = 0
        for _ in range(60):
            numbers = range(first := rng.randrange(20), first + rng.randrange(1, 6))
            try:
                if rng.random() < 0.5:
                    sealed.put_many(chain_of(numbers))
                for number, (result, out) in zip(numbers, read_sealed(sealed, list(map(key_of, numbers))), strict=True):
                    if not isinstance(result, Fault):
                        num_good += 1
                        assert out == kv_bytes(number, 20_000)
                        assert result == digest(out)
            except RemoteUnavailable:
                continue

    assert num_good > 0
    assert lying.num_wrong > 0
