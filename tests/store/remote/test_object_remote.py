"""What `ObjectRemote` promises beyond the contract: few requests, writers beside each other, errors that are told."""

import random
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import obstore
import pytest
from chains import blobs_of, chain_keys, payload_of
from obstore.store import from_url
from store_cases import NAMESPACE
from waiting import join

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC
from kvtier.store.record import Fault, digest
from kvtier.store.remote.object_remote import ObjectRemote
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote.objects.segment_names import folder_of
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteUnavailable

BLOCK_BYTES = 120


class Place:
    """A folder to which any number of clients may be opened; they are closed with the test."""

    def __init__(self, folder: Path) -> None:
        self.settings = ObjectSettings(f"file://{folder}")
        self.objects = from_url(self.settings.url, mkdir=True)
        self.folder = folder
        self._opened: list[ObjectRemote] = []

    def client(self) -> ObjectRemote:
        self._opened.append(ObjectRemote(self.settings))
        return self._opened[-1]

    def close(self) -> None:
        for client in self._opened:
            client.close()

    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "objects")
    yield place
    place.close()


def put(client: ObjectRemote, keys: list[bytes], first: int = 0, last: int | None = None) -> list[bool]:
    return SealedRemote(client).put_many(blobs_of(keys[:last], BLOCK_BYTES, first))


def read(client: ObjectRemote, keys: list[bytes]) -> list[bytes | Fault]:
    """Digests, or faults; a digest of other bytes than the key's fails at once."""
    outs = [bytearray(BLOCK_BYTES) for _ in keys]
    results = SealedRemote(client).read_many(keys, [memoryview(out) for out in outs])
    for key, out, result in zip(keys, outs, results, strict=True):
        assert isinstance(result, Fault) or out == payload_of(key, BLOCK_BYTES)
    return results


def digests(keys: list[bytes]) -> list[bytes | Fault]:
    return [digest(payload_of(key, BLOCK_BYTES)) for key in keys]


def test_a_long_chain_takes_few_requests(place: Place) -> None:
    keys = chain_keys(4000)
    writer, reader, stranger = place.client(), place.client(), place.client()

    assert all(put(writer, keys))
    assert writer.usage().num_writes <= 40
    assert writer.usage().num_reads == writer.usage().num_questions == 0

    assert all(reader.exist_many(keys))
    assert reader.usage().num_questions <= 80
    assert read(reader, keys) == digests(keys)
    assert reader.usage().num_reads <= 40
    assert reader.usage().num_questions <= 80, "where values are was known from the question before"

    assert not any(stranger.exist_many(chain_keys(4000, "nobody's")))
    assert stranger.usage().num_questions <= 60


def test_values_that_lie_together_are_read_by_one_request_and_not_the_whole_segment(place: Place) -> None:
    keys = chain_keys(200)
    client = place.client()
    block_bytes = 100_000
    SealedRemote(client).put_many(blobs_of(keys, block_bytes))
    paths = {path.name: path.stat().st_size for path in place.paths()}

    values = client.get_many(keys[100:103])

    assert all(not isinstance(value, Fault) for value in values)
    assert client.usage().num_reads <= 3
    assert client.usage().read_bytes < 4 * block_bytes < max(paths.values())


@pytest.mark.parametrize("are_mixed", [False, True])
def test_chains_of_several_groups_are_found_by_one_question(place: Place, are_mixed: bool) -> None:
    groups = [chain_keys(700, group_id=group_id) for group_id in range(3)]
    for keys in groups:
        put(place.client(), keys)
    together = list(chain(*(zip(*groups, strict=True) if are_mixed else groups)))

    client = place.client()
    assert all(client.exist_many(together))
    assert client.usage().num_questions <= 3 * 60
    assert read(place.client(), together) == digests(together)


@pytest.mark.parametrize("cut_at", [1, 77, 1000, 1999])
def test_a_run_that_was_put_in_two_halves_is_found_whole(place: Place, cut_at: int) -> None:
    keys = chain_keys(2000)
    put(place.client(), keys, last=cut_at)
    put(place.client(), keys, first=cut_at)

    assert read(place.client(), keys) == digests(keys)


def test_a_part_that_is_put_again_takes_nothing_away(place: Place) -> None:
    keys = chain_keys(1000)
    put(place.client(), keys)
    rng = random.Random(0)
    for _ in range(20):
        first = rng.randrange(1000)
        put(place.client(), keys, first, rng.randrange(first + 1, 1001))

    assert read(place.client(), keys) == digests(keys)


def test_writers_of_overlapping_runs_are_not_in_each_others_way(place: Place) -> None:
    keys = chain_keys(600)
    wrong: list[object] = []

    def write(first: int, last: int) -> None:
        client = place.client()
        for _ in range(5):
            wrong.extend(done for done in put(client, keys, first, last) if not done)
            results = read(client, keys[first:last])
            wrong.extend(r for r, good in zip(results, digests(keys[first:last]), strict=True) if r != good)

    threads = [threading.Thread(target=write, args=span) for span in [(0, 400), (0, 400), (150, 600), (399, 600)]]
    for thread in threads:
        thread.start()
    join(*threads)

    assert not wrong
    assert read(place.client(), keys) == digests(keys)


def test_a_chain_that_branches_off_finds_what_is_common(place: Place) -> None:
    stem = chain_keys(500)
    first = stem + chain_keys(5, "a question", after=stem[-1][16:48])
    second = stem + chain_keys(60, "another", after=stem[-1][16:48])
    put(place.client(), first)

    found = place.client().exist_many(second)
    num_found = found.index(False)
    assert num_found > 400
    assert not any(found[500:])

    put(place.client(), second, first=num_found)
    assert read(place.client(), second) == digests(second)
    assert read(place.client(), first) == digests(first)


def test_a_segment_that_another_writes_in_another_form_is_read_as_it_is_now(place: Place) -> None:
    """Both writers are right: one compresses, so lengths and places differ."""
    keys = chain_keys(50)
    reader = place.client()
    put(place.client(), keys)
    assert all(reader.exist_many(keys))

    for codec, cipher in ((CODECS["zstd-plane-2"], None), (NO_CODEC, Cipher(bytes(32)))):
        SealedRemote(place.client(), codec, cipher).put_many(blobs_of(keys, BLOCK_BYTES))
        outs = [bytearray(BLOCK_BYTES) for _ in keys]
        sealed = SealedRemote(reader, cipher=cipher)
        assert sealed.read_many(keys, [memoryview(out) for out in outs]) == digests(keys)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_damaged_block_is_found_where_somebody_has_put_it_again(place: Place, is_alone: bool) -> None:
    keys = chain_keys(100)
    put(place.client(), keys)
    largest = max(place.paths(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[1000] ^= 1
    largest.write_bytes(data)

    reader = place.client()
    first = read(reader, keys)
    bad = [number for number, result in enumerate(first) if isinstance(result, Fault)]
    assert [first[number] for number in bad] == [Fault.CORRUPT]

    put(place.client(), keys, *((bad[0], bad[0] + 1) if is_alone else ()))  # alone: the segment stays as it is
    assert read(reader, keys) == digests(keys)


def test_a_segment_that_was_deleted_is_missing_and_others_stay(place: Place) -> None:
    keys = chain_keys(1000)
    client = place.client()
    put(client, keys)
    largest = max(place.paths(), key=lambda path: path.stat().st_size)
    largest.unlink()

    results = read(client, keys)
    assert Fault.MISSING in results
    assert {result for result in results if isinstance(result, Fault)} == {Fault.MISSING}
    assert sum(not isinstance(result, Fault) for result in results) > 300
    assert client.exist_many(keys) == [not isinstance(result, Fault) for result in results]


def test_what_cannot_be_written_is_said_key_by_key(place: Place) -> None:
    keys = chain_keys(1000)
    put(place.client(), keys)
    blocked = max(place.paths(), key=lambda path: path.stat().st_size)
    blocked.unlink()
    (blocked / "in the way").mkdir(parents=True)

    client = place.client()
    done = put(client, keys)
    results = read(client, keys)

    assert True in done
    assert False in done
    good = digests(keys)
    assert [result == right for result, right in zip(results, good, strict=True)] == done


def test_objects_of_others_are_let_be(place: Place) -> None:
    keys = chain_keys(50)
    client = place.client()
    put(client, keys)
    for path in place.paths()[:2]:
        path.write_bytes(b"<html>" * 1000)
    place.paths()[2].write_bytes(b"")

    results = read(place.client(), keys)

    assert all(result in (Fault.MISSING, good) for result, good in zip(results, digests(keys), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_to_objects_no_wrong_byte_comes_and_a_put_mends(place: Place, seed: int) -> None:
    rng = random.Random(seed)
    keys = chain_keys(150)
    good_ones = digests(keys)
    foreign = chain_keys(150, namespace=b"another model's ")
    reader, writer = place.client(), place.client()
    put(writer, keys)
    put(writer, foreign)
    if rng.random() < 0.5:
        reader.exist_many(keys)  # what it knows is of before

    for _ in range(6):
        path, other = rng.choices(place.paths(), k=2)
        data = bytearray(path.read_bytes())
        match rng.choice(["flip", "cut", "grow", "exchange", "delete"]):
            case "flip":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case "cut":
                path.write_bytes(data[: rng.randrange(1, len(data) + 1)])
            case "grow":
                path.write_bytes(data + data[: rng.randrange(len(data))])
            case "exchange":
                path.write_bytes(other.read_bytes())
                other.write_bytes(data)
            case "delete" if len(place.paths()) > 1:
                path.unlink()

    for client in (reader, place.client()):
        results = read(client, keys)
        assert all(result == good or isinstance(result, Fault) for result, good in zip(results, good_ones, strict=True))
    put(writer, keys)
    read(reader, keys)  # it may miss what it has learned from a segment under another's name
    assert read(reader, keys) == read(place.client(), keys) == good_ones


def test_a_namespace_is_a_folder(place: Place) -> None:
    """A lifecycle rule by prefix can let it expire."""
    put(place.client(), chain_keys(300))
    put(place.client(), chain_keys(300, namespace=b"another model's "))

    folders = {path.relative_to(place.folder).parts[0] for path in place.paths()}
    assert folders == {folder_of(NAMESPACE), folder_of(b"another model's ")}

    place.client().forget(NAMESPACE)
    assert {path.relative_to(place.folder).parts[0] for path in place.paths()} == {folder_of(b"another model's ")}


def test_what_others_keep_beside_a_namespace_is_not_forgotten(place: Place) -> None:
    obstore.put(place.objects, "notes.txt", b"theirs")
    put(place.client(), chain_keys(10))

    place.client().forget(NAMESPACE)

    assert [path.name for path in place.paths()] == ["notes.txt"]


@pytest.mark.long
def test_a_block_that_is_too_long_for_one_request_goes_in_parts(s3_place: ObjectSettings) -> None:
    keys = chain_keys(1)
    num_bytes = 90 << 20
    with ObjectRemote(s3_place) as client, ObjectRemote(s3_place) as reader:
        assert SealedRemote(client).put_many(blobs_of(keys, num_bytes)) == [True]
        assert client.usage().num_writes == 6 + 2

        out = bytearray(num_bytes)
        assert SealedRemote(reader).read_many(keys, [memoryview(out)]) == [digest(payload_of(keys[0], num_bytes))]
        reader.forget(NAMESPACE)
        assert SealedRemote(reader).exist_many(keys) == [False]


@pytest.mark.long
def test_a_server_that_refuses_is_told_by_its_reason(s3_place: ObjectSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectRemote(replace(s3_place, url="s3://no-such-bucket/prefix")) as client:
        with pytest.raises(RemoteUnavailable, match="no such bucket"):
            put(client, chain_keys(3))
        assert client.exist_many(chain_keys(3)) == [False] * 3

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "neverShown")
    with ObjectRemote(s3_place) as client:
        for call in (client.exist_many, client.get_many, lambda keys: put(client, keys)):
            with pytest.raises(RemoteUnavailable, match=r"permission denied.* 403") as raised:
                call(chain_keys(3))
            assert "neverShown" not in str(raised.value)


@pytest.fixture
def silent_port() -> Iterator[tuple[int, threading.Event]]:
    """A port where somebody takes connections and says nothing; the event is set when the first one has come."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []
    has_come = threading.Event()

    def take() -> None:
        try:
            while True:
                taken.append(listener.accept()[0])
                has_come.set()
        except OSError:
            return

    thread = threading.Thread(target=take)
    thread.start()
    yield listener.getsockname()[1], has_come
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    join(thread)
    for connection in taken:
        connection.close()


def s3_at(port: int, timeout_s: float) -> ObjectSettings:
    return ObjectSettings(
        "s3://bucket/prefix", f"http://127.0.0.1:{port}", "us-east-1", allow_http=True, timeout_s=timeout_s
    )


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDSHOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "neverShown")


@pytest.mark.usefixtures("credentials")
def test_closing_ends_calls_that_wait(silent_port: tuple[int, threading.Event]) -> None:
    port, has_come = silent_port
    client = ObjectRemote(s3_at(port, timeout_s=300))
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.exist_many(chain_keys(10))
        except RemoteUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert has_come.wait(60)
    client.close()

    join(thread)
    assert len(errors) == 1


@pytest.mark.usefixtures("credentials")
def test_nobody_answers_in_time(silent_port: tuple[int, threading.Event]) -> None:
    with ObjectRemote(s3_at(silent_port[0], timeout_s=0.05)) as client:
        for call in (client.exist_many, client.get_many, lambda keys: put(client, keys)):
            with pytest.raises(RemoteUnavailable):
                call(chain_keys(3))


@pytest.mark.usefixtures("credentials")
def test_an_error_names_the_place_and_no_secret(unused_port: int) -> None:
    with ObjectRemote(s3_at(unused_port, timeout_s=5)) as client:
        with pytest.raises(RemoteUnavailable) as raised:
            client.exist_many(chain_keys(3000))

        assert client.usage().num_questions < 30, "nobody answers, so the first round is the last"
        assert str(raised.value) == "s3://bucket/prefix: no answer"
        assert raised.value.__cause__ is None
        assert client.where == "s3://bucket/prefix"
        with pytest.raises(RemoteUnavailable):
            client.forget(NAMESPACE)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(ImportError, match=r"pip install 'kvtier\[object\]'"):
        ObjectRemote(ObjectSettings(f"file://{tmp_path}"))
