"""What a Redis server may do to its clients, and they to it: rights, TLS, lifetimes, lack of room, parts, silence."""

import datetime
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis_servers import HOST, RedisServer, free_port, running_server
from remote_cases import needs_redis, redis_name
from store_cases import NAMESPACE, blob_of, key_of
from waiting import is_in, join, wait_for

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC
from kvtier.store.record import Fault
from kvtier.store.remote.redis.node import RedisNode
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.redis_settings import Address, RedisSettings, RedisTls
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteUnavailable

pytestmark = needs_redis

MIB = 1 << 20
FAR_S = 60.0  # a timeout that no test waits for
SOON_S = 0.2  # a timeout that tests do wait for
USERS = (
    "--user default on >door-word ~* &* +@all",
    "--user keeper on >keeper-word ~kvtier:* -@all +get +getrange +set +exists +unlink +scan +ping",
    "--user reader on >reader-word ~kvtier:* -@all +get +exists",
)


def read(store: RedisRemote, *numbers: int, num_bytes: int = 20_000) -> list[bytes | Fault]:
    """The digest of each block, or the fault. Bytes are verified by their digests, which the tests know."""
    outs = [memoryview(bytearray(num_bytes)) for _ in numbers]
    return SealedRemote(store).read_many([key_of(number) for number in numbers], outs)


def put(store: RedisRemote, *numbers: int, num_bytes: int = 20_000) -> list[bool]:
    return SealedRemote(store).put_many([blob_of(number, num_bytes) for number in numbers])


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisRemote]:
    with RedisRemote(redis_server.settings()) as opened:
        yield opened


def why_unavailable(call: Callable[[], object]) -> str:
    with pytest.raises(RemoteUnavailable) as told:
        call()
    text = str(told.value)
    assert "\n" not in text
    assert "word" not in text.replace("password", "")
    return text


# Who may


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    options = [part for user in USERS for part in (user.split(" ", 1)[0], user.split(" ", 1)[1])]
    with running_server(tmp_path_factory.mktemp("guarded"), *_separate(options)) as server:
        yield server


def _separate(options: list[str]) -> list[str]:
    """`--user` takes each word of its rules as an argument of its own."""
    return [word for option in options for word in option.split()]


def test_a_user_with_the_rights_that_are_named_can_do_everything(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="keeper", password="keeper-word")) as store:
        assert put(store, 1, 2) == [True, True]
        assert put(store, 3, num_bytes=9 * MIB) == [True]
        assert read(store, 1) == [blob_of(1).digest]
        assert store.ask_many([key_of(1), key_of(9)]) == [True, False]
        store.forget(NAMESPACE)
        assert store.ask_many([key_of(1), key_of(3)]) == [False, False]


@pytest.mark.parametrize("login", [{"password": "wrong-word"}, {"username": "nobody", "password": "no-word"}, {}])
def test_a_wrong_password_is_told_in_a_line(guarded: RedisServer, login: dict[str, str]) -> None:
    with RedisRemote(guarded.settings(**login)) as store:
        for call in (lambda: read(store, 1), lambda: put(store, 1), lambda: store.ask_many([key_of(1)])):
            assert "refuses the user or the password" in why_unavailable(call)
        assert "refuses" in why_unavailable(lambda: store.forget(NAMESPACE))


def test_a_right_that_lacks_is_told_in_a_line(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="reader", password="reader-word")) as store:
        assert read(store, 1) == [Fault.MISSING]

        assert "ACL SETUSER" in why_unavailable(lambda: put(store, 1))
        assert "ACL SETUSER" in why_unavailable(lambda: store.forget(NAMESPACE))


def test_keys_of_others_are_told_in_a_line(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="keeper", password="keeper-word", prefix="theirs:")) as store:
        assert "~theirs:*" in why_unavailable(lambda: read(store, 1))


# TLS


class Certificates:
    """An authority of its own, and what it has signed: files in PEM."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = self._written("ca", self._signed("an authority", self._key.public_key(), is_ca=True))

    def make(self, name: str) -> tuple[str, str]:
        """A certificate for this machine, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_file = self.folder / f"{name}.key"
        key_file.write_bytes(key.private_bytes(*form))
        return self._written(name, self._signed(name, key.public_key(), is_ca=False)), str(key_file)

    def _signed(self, name: str, public: Any, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(_named(name)).issuer_name(_named("an authority"))
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))])
        return builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())

    def _written(self, name: str, certificate: x509.Certificate) -> str:
        path = self.folder / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=["no", "yes"], ids=["of the server", "of both"])
def secure(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[RedisServer]:
    cert_file, key_file = certificates.make("server")
    files = ["--tls-cert-file", cert_file, "--tls-key-file", key_file, "--tls-ca-cert-file", certificates.ca_file]
    folder = tmp_path_factory.mktemp("secure")
    with running_server(folder, *files, "--tls-auth-clients", request.param, port_option="--tls-port") as server:
        yield server


def test_with_tls_blocks_come_back_bit_for_bit(secure: RedisServer, certificates: Certificates) -> None:
    tls = RedisTls(certificates.ca_file, *certificates.make("client"))
    with RedisRemote(secure.settings(tls=tls)) as store:
        assert store.where.startswith("rediss://")
        assert put(store, 1, 2) == [True, True]
        assert put(store, 3, num_bytes=9 * MIB) == [True]

        assert read(store, 1, 2, 4) == [blob_of(1).digest, blob_of(2).digest, Fault.MISSING]
        assert read(store, 3, num_bytes=9 * MIB) == [blob_of(3, 9 * MIB).digest]


def test_a_server_that_a_stranger_has_signed_is_refused(secure: RedisServer, tmp_path: Path) -> None:
    with RedisRemote(secure.settings(tls=RedisTls(Certificates(tmp_path).ca_file))) as store:
        assert "CA's file" in why_unavailable(lambda: read(store, 1))


def test_a_server_that_speaks_tls_is_of_no_use_without(secure: RedisServer) -> None:
    with RedisRemote(secure.settings(timeout_s=SOON_S)) as store:
        why_unavailable(lambda: read(store, 1))


# How long records stay


def test_a_record_has_a_lifetime_that_a_put_renews(redis_server: RedisServer) -> None:
    name = redis_name(key_of(1))
    with RedisRemote(redis_server.settings(ttl_s=1000)) as store, redis_server.client() as client:
        put(store, 1)
        assert 990 < client.ttl(name) <= 1000
        client.expire(name, 5)

        put(store, 1)

        assert client.ttl(name) > 990


def test_all_parts_of_a_record_have_its_lifetime(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(ttl_s=1000)) as store, redis_server.client() as client:
        put(store, 1, num_bytes=10 * MIB)

        lifetimes = [client.ttl(name) for name in client.scan_iter()]

        assert len(lifetimes) == 3
        assert all(990 < lifetime <= 1000 for lifetime in lifetimes)


def test_without_a_lifetime_a_record_stays(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(ttl_s=None)) as store, redis_server.client() as client:
        put(store, 1)

        assert client.ttl(redis_name(key_of(1))) == -1


# How much there is room for


@contextmanager
def room_for(server: RedisServer, num_bytes: int, policy: str) -> Iterator[None]:
    """The server has room for so many bytes more."""
    with server.client() as client:
        before = client.config_get("maxmemory*")
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + num_bytes)
        try:
            yield
        finally:
            client.config_set("maxmemory", before["maxmemory"])
            client.config_set("maxmemory-policy", before["maxmemory-policy"])


def test_what_a_full_server_does_not_take_is_told_and_the_rest_stays(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with room_for(redis_server, 10 * MIB, "noeviction"):
        were_put = [
            is_put for first in range(0, 40, 4) for is_put in put(store, *range(first, first + 4), num_bytes=MIB)
        ]

        assert 4 <= sum(were_put) <= 12
        assert put(store, 40, num_bytes=3 * MIB) == [False]
        for number, was_put in enumerate(were_put):
            expected = blob_of(number, MIB).digest if was_put else Fault.MISSING
            assert read(store, number, num_bytes=MIB) == [expected]


def test_a_large_record_that_does_not_fit_is_not_half_there(redis_server: RedisServer, store: RedisRemote) -> None:
    with room_for(redis_server, 10 * MIB, "noeviction"):
        assert put(store, 1, num_bytes=40 * MIB) == [False]

        assert store.ask_many([key_of(1)]) == [False]


def test_a_server_that_evicts_takes_everything_and_never_has_more_than_it_may(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with room_for(redis_server, 20 * MIB, "allkeys-lru"), redis_server.client() as client:
        for first in range(0, 100, 4):
            assert put(store, *range(first, first + 4), num_bytes=MIB) == [True] * 4
            assert client.dbsize() * MIB <= 20 * MIB

        assert read(store, 99, num_bytes=MIB) == [blob_of(99, MIB).digest]
        assert read(store, 0, num_bytes=MIB) == [Fault.MISSING]


def test_after_flushall_everything_is_missing_and_it_goes_on(redis_server: RedisServer, store: RedisRemote) -> None:
    put(store, 1, 2)
    redis_server.ask("FLUSHALL")

    assert read(store, 1, 2) == [Fault.MISSING] * 2

    assert put(store, 1) == [True]
    assert read(store, 1) == [blob_of(1).digest]


# Names


def test_something_else_under_a_key_is_no_block_and_a_put_takes_its_place(
    redis_server: RedisServer, store: RedisRemote
) -> None:
    with redis_server.client() as client:
        client.lpush(redis_name(key_of(1)), "a list")

    assert read(store, 1) == [Fault.CORRUPT]

    assert put(store, 1) == [True]
    assert read(store, 1) == [blob_of(1).digest]


def test_only_what_has_the_prefix_is_forgotten(redis_server: RedisServer) -> None:
    prefixes = ("a*[b]?:", "aXb?:", "ab:")
    with ExitStack() as stack:
        stores = [stack.enter_context(RedisRemote(redis_server.settings(prefix=prefix))) for prefix in prefixes]
        for store in stores:
            put(store, *range(30))
            put(store, 30, num_bytes=9 * MIB)

        stores[0].forget(NAMESPACE)

        assert redis_server.ask("DBSIZE") == 2 * 33
        assert not any(stores[0].ask_many([key_of(number) for number in range(31)]))


def test_databases_of_a_server_are_apart(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(db=3)) as third, RedisRemote(redis_server.settings()) as first:
        put(third, 1)

        assert third.ask_many([key_of(1)]) == [True]
        assert first.ask_many([key_of(1)]) == [False]
        assert third.where.endswith("/3")


# Parts


def test_a_record_of_which_a_part_is_away_is_missing(redis_server: RedisServer, store: RedisRemote) -> None:
    put(store, 1, num_bytes=10 * MIB)
    with redis_server.client() as client:
        parts = [name for name in client.scan_iter() if name != redis_name(key_of(1))]
        client.delete(parts[0])

    assert read(store, 1, num_bytes=10 * MIB) == [Fault.MISSING]

    put(store, 1, num_bytes=10 * MIB)
    assert read(store, 1, num_bytes=10 * MIB) == [blob_of(1, 10 * MIB).digest]


def test_a_part_that_was_changed_or_cut_is_refused(redis_server: RedisServer, store: RedisRemote) -> None:
    put(store, 1, num_bytes=10 * MIB)
    with redis_server.client() as client:
        last = max(name for name in client.scan_iter() if name != redis_name(key_of(1)))
        part = client.get(last)
        for wrong in (part[:-1], part[:-1] + b"x", b""):
            client.set(last, wrong)
            assert read(store, 1, num_bytes=10 * MIB)[0] in (Fault.TORN, Fault.CORRUPT)


def test_parts_that_another_record_has_replaced_are_deleted(redis_server: RedisServer, store: RedisRemote) -> None:
    sealed = SealedRemote(store, NO_CODEC, Cipher(bytes(32)))
    for _ in range(3):  # each time encrypted otherwise
        sealed.put_many([blob_of(1, 10 * MIB)])

    assert redis_server.ask("DBSIZE") == 3


def test_writers_of_one_large_record_never_mix_their_parts(store: RedisRemote) -> None:
    num_bytes = 10 * MIB
    sealed = SealedRemote(store, NO_CODEC, Cipher(bytes(32)))  # each writer's bytes are others
    blob = blob_of(1, num_bytes)
    out = memoryview(bytearray(num_bytes))
    sealed.put_many([blob])
    writers = [threading.Thread(target=lambda: [sealed.put_many([blob]) for _ in range(5)]) for _ in range(2)]
    results: list[bytes | Fault] = []

    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        results += sealed.read_many([blob.key], [out])
    join(*writers)
    results += sealed.read_many([blob.key], [out])

    assert set(results) <= {blob.digest, Fault.MISSING}
    assert results[-1] == blob.digest


@pytest.mark.parametrize("rest", [b"", b"x", bytes(18), b"\xff" * 18, b"\xff" * 5000])
def test_what_only_begins_like_parts_is_refused(redis_server: RedisServer, store: RedisRemote, rest: bytes) -> None:
    with redis_server.client() as client:
        client.set(redis_name(key_of(1)), b"KVTP" + rest)

    assert read(store, 1)[0] in (Fault.MISSING, Fault.CORRUPT, Fault.TORN)
    assert put(store, 1) == [True]
    assert read(store, 1) == [blob_of(1).digest]


# A server that is away, silent, or none


def test_nobody_there_is_told_in_a_line(tmp_path: Path) -> None:
    with RedisRemote(RedisSettings((Address(HOST, free_port()),))) as store:
        assert store.where in why_unavailable(lambda: read(store, 1))
        assert "refused" in why_unavailable(lambda: store.ask_many([key_of(1)]))


def test_a_server_that_starts_again_is_found_again(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, RedisRemote(server.settings(num_connections=2)) as store:
        put(store, 1)
        server.kill()
        why_unavailable(lambda: read(store, 1))

        server.start_again()

        assert read(store, 1) == [Fault.MISSING]
        assert put(store, 1) == [True]


def test_a_server_that_hangs_ends_no_call_late_and_answers_later(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(timeout_s=SOON_S)) as store:
        put(store, 1)
        redis_server.pause()
        try:
            for call in (
                lambda: read(store, 1, 2, 3),
                lambda: put(store, *range(8), num_bytes=9 * MIB),
                lambda: store.ask_many([key_of(1)]),
            ):
                why_unavailable(call)
        finally:
            redis_server.resume()

        wait_for(lambda: _first(lambda: read(store, 1)) == blob_of(1).digest)


def _first(call: Callable[[], list[Any]]) -> Any:
    """The first result; None where there is none, as the server has much to do yet."""
    with suppress(RemoteUnavailable):
        return call()[0]
    return None


def test_closing_ends_calls_that_wait(redis_server: RedisServer) -> None:
    store = RedisRemote(redis_server.settings(timeout_s=FAR_S))
    put(store, 1)
    told: list[str] = []
    redis_server.pause()
    try:
        waiting = threading.Thread(target=lambda: told.append(why_unavailable(lambda: read(store, 1))))
        waiting.start()
        wait_for(lambda: waiting.ident is not None and is_in(waiting.ident, RedisNode.ask))

        store.close()

        join(waiting)
    finally:
        redis_server.resume()
    assert "closed" in told[0]


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[RedisSettings]:
    """A server that has this *answer* for whoever connects; it ends with its clients."""
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=answer_one, args=(client,), daemon=True).start()

        def answer_one(client: socket.socket) -> None:
            with client, suppress(OSError):
                answer(client)

        threading.Thread(target=serve, daemon=True).start()
        yield RedisSettings((Address(HOST, listening.getsockname()[1]),), timeout_s=SOON_S)
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def is_silent(client: socket.socket) -> None:
    while client.recv(1 << 16):
        pass


def drips(client: socket.socket) -> None:
    """A value that comes byte by byte, never silent for long, and would take hours."""
    client.recv(1 << 16)
    client.sendall(b"$1000000\r\n")
    client.settimeout(0.02)
    while True:
        client.sendall(b"x")
        with suppress(TimeoutError):
            client.recv(1 << 16)


def drips_a_line(client: socket.socket) -> None:
    client.settimeout(0.02)
    while True:
        client.sendall(b"1")
        with suppress(TimeoutError):
            client.recv(1 << 16)


def says(answer: bytes) -> Callable[[socket.socket], None]:
    def answer_and_end(client: socket.socket) -> None:
        client.recv(1 << 16)
        client.sendall(answer)

    return answer_and_end


STRANGE: dict[str, Callable[[socket.socket], None]] = {
    "silence": is_silent,
    "a value byte by byte": drips,
    "a line without an end, byte by byte": drips_a_line,
    "a line without an end": says(b"x" * (1 << 20)),
    "a web server": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a value that ends elsewhere": says(b"$3\r\nabcdef\r\n"),
    "a value longer than any": says(b"$99999999999999\r\n"),
    "a length that is none": says(b"$abc\r\n"),
    "a list of lists": says(b"*1\r\n" * 5000),
    "a redirection to nowhere": says(b"-MOVED nowhere\r\n"),
    "a redirection to no port": says(b"-MOVED 1 there:x\r\n"),
    "half a value": says(b"$1000\r\nabc"),
    "nothing": says(b""),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_no_server_of_redis_ends_no_call_late(strange: str) -> None:
    with answering(STRANGE[strange]) as settings, RedisRemote(settings) as store:
        why_unavailable(lambda: read(store, 1))


def test_a_server_that_is_no_cluster_says_how_to_write_that(redis_server: RedisServer) -> None:
    with RedisRemote(replace(redis_server.settings(), is_cluster=True)) as store:
        assert "write redis://" in why_unavailable(lambda: read(store, 1))
        assert "write redis://" in why_unavailable(lambda: store.forget(NAMESPACE))


def test_memory_is_used_again_only_when_nobody_looks_at_it(store: RedisRemote) -> None:
    blobs = [blob_of(number, MIB // 4) for number in range(20)]
    SealedRemote(store).put_many(blobs)
    rng = random.Random(7)
    held: dict[int, memoryview] = {}

    for _ in range(100):
        number = rng.randrange(20)
        (value,) = store.get_many([blobs[number].key])
        assert isinstance(value, memoryview)
        held[number] = value[73:]  # a view of a view holds the memory too
        if len(held) > 5:
            held.pop(rng.choice(list(held)))
        assert all(view == blobs[number].raw for number, view in held.items())
