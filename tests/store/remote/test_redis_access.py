"""Who may use a Redis server, and how that is told to who may not; TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Certificates
from redis_servers import RedisServer, running_server
from remote_cases import needs_redis, put_blocks, read_blocks, why_unavailable
from store_cases import NAMESPACE, blob_of, key_of

from kvtier.store.record import Fault
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.redis_settings import RedisTls

pytestmark = needs_redis

SOON_S = 0.2  # a timeout that tests do wait for
MIB = 1 << 20
USERS = (
    "--user default on >endpoint-word ~* &* +@all",
    "--user keeper on >keeper-word ~kvtier:* -@all +get +getrange +set +exists +unlink +scan +ping",
    "--user reader on >reader-word ~kvtier:* -@all +get +exists",
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_server(tmp_path_factory.mktemp("guarded"), *" ".join(USERS).split()) as server:
        yield server


def test_a_user_with_the_rights_that_are_named_can_do_everything(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="keeper", password="keeper-word")) as store:
        assert put_blocks(store, 1, 2) == [True, True]
        assert put_blocks(store, 3, num_bytes=9 * MIB) == [True]
        assert read_blocks(store, 1) == [blob_of(1).digest]
        assert store.exist_many([key_of(1), key_of(9)]) == [True, False]
        store.forget(NAMESPACE)
        assert store.exist_many([key_of(1), key_of(3)]) == [False, False]


@pytest.mark.parametrize("login", [{"password": "wrong-word"}, {"username": "nobody", "password": "no-word"}, {}])
def test_a_wrong_password_is_told_in_a_line(guarded: RedisServer, login: dict[str, str]) -> None:
    with RedisRemote(guarded.settings(**login)) as store:
        for call in (
            lambda: read_blocks(store, 1),
            lambda: put_blocks(store, 1),
            lambda: store.exist_many([key_of(1)]),
        ):
            told = why_unavailable(call)
            assert "refuses the user or the password" in told
            assert "-word" not in told
        assert "refuses" in why_unavailable(lambda: store.forget(NAMESPACE))


def test_a_right_that_lacks_is_told_in_a_line(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="reader", password="reader-word")) as store:
        assert read_blocks(store, 1) == [Fault.MISSING]

        assert "ACL SETUSER" in why_unavailable(lambda: put_blocks(store, 1))
        assert "ACL SETUSER" in why_unavailable(lambda: store.forget(NAMESPACE))


def test_keys_of_others_are_told_in_a_line(guarded: RedisServer) -> None:
    with RedisRemote(guarded.settings(username="keeper", password="keeper-word", prefix="theirs:")) as store:
        assert "~theirs:*" in why_unavailable(lambda: read_blocks(store, 1))


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
        assert put_blocks(store, 1, 2) == [True, True]
        assert put_blocks(store, 3, num_bytes=9 * MIB) == [True]

        assert read_blocks(store, 1, 2, 4) == [blob_of(1).digest, blob_of(2).digest, Fault.MISSING]
        assert read_blocks(store, 3, num_bytes=9 * MIB) == [blob_of(3, 9 * MIB).digest]


def test_a_server_that_a_stranger_has_signed_is_refused(secure: RedisServer, tmp_path: Path) -> None:
    with RedisRemote(secure.settings(tls=RedisTls(Certificates(tmp_path).ca_file))) as store:
        assert "CA's file" in why_unavailable(lambda: read_blocks(store, 1))


def test_a_server_that_speaks_tls_is_of_no_use_without(secure: RedisServer) -> None:
    with RedisRemote(secure.settings(timeout_s=SOON_S)) as store:
        why_unavailable(lambda: read_blocks(store, 1))
