"""Fixtures: every kind of remote store."""

from collections.abc import Iterator

import pytest
from redis_servers import ClusterOfSix, RedisServer, running_cluster, running_server
from remote_cases import MemoryRemoteCase, RedisCase, RemoteCase, needs_redis

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
        pytest.param("redis", marks=needs_redis),
        pytest.param("redis-cluster", marks=[needs_redis, pytest.mark.long]),
    ]
)
def case(request: pytest.FixtureRequest) -> RemoteCase:
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
