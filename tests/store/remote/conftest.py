"""Fixtures: every kind of remote store."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_cases import ObjectRemoteCase
from redis_servers import ClusterOfSix, RedisServer, running_cluster, running_server
from remote_cases import MemoryRemoteCase, RedisCase, RemoteCase, needs_redis
from swift_server import BUCKET, CREDENTIALS, PROGRAMS, REGION, SwiftServer, swift_server

from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote_store import RemoteStore


@pytest.fixture(scope="session")
def redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_server(tmp_path_factory.mktemp("redis"), "--maxmemory", "256mb") as server:
        yield server


@pytest.fixture
def redis_server(redis_of_session: RedisServer) -> RedisServer:
    """A server without anything in it."""
    redis_of_session.ask("FLUSHALL")
    return redis_of_session


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterOfSix]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_session: ClusterOfSix) -> ClusterOfSix:
    """A cluster in which all is well, without anything in it."""
    cluster_of_session.heal()
    return cluster_of_session


@pytest.fixture(
    params=[
        "memory",
        "object-files",
        pytest.param("object-s3", marks=pytest.mark.long),
        pytest.param("redis", marks=needs_redis),
        pytest.param("redis-cluster", marks=[needs_redis, pytest.mark.long]),
    ]
)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteCase:
    if request.param == "object-files":
        return ObjectRemoteCase(ObjectSettings(f"file://{tmp_path}/objects"), mkdir=True)
    if request.param == "object-s3":
        settings: ObjectSettings = request.getfixturevalue("s3_place")
        client = {"allow_http": True}
        return ObjectRemoteCase(settings, endpoint=settings.endpoint, region=REGION, client_options=client)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return RedisCase(server.settings(), lambda _: server.client())
    if request.param == "redis-cluster":
        cluster: ClusterOfSix = request.getfixturevalue("cluster")
        return RedisCase(cluster.settings(), lambda name: cluster.owner_of(name).client())
    return MemoryRemoteCase()


@pytest.fixture
def store(case: RemoteCase) -> Iterator[RemoteStore]:
    with case.open() as opened:
        yield opened


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    if not (PROGRAMS / "swift-proxy-server").exists():
        pytest.skip("OpenStack Swift is not installed: make .venv/swift/installed")
    with swift_server(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture
def s3_place(swift: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> ObjectSettings:
    """A place of its own in the server's bucket, and the environment that lets its clients in."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return ObjectSettings(url, swift.endpoint, REGION, allow_http=True, timeout_s=60)
