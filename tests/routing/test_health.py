"""The health of replicas: who answers, who does not, and how often one may not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from aiohttp import ClientConnectionError

from kvtier.routing.config import HealthConfig, IndexConfig, PolicyConfig
from kvtier.routing.health import HEALTH, READY, HealthCheck
from kvtier.routing.replica import Health, Replica
from kvtier.routing.router import Router


class Servers:
    """What each address answers: a status, or nothing."""

    def __init__(self) -> None:
        self.statuses: dict[str, int | None] = {}
        self.dead: list[str] = []
        self.router = Router(PolicyConfig(), IndexConfig(), on_dead=self.dead.append)
        self.check = HealthCheck(HealthConfig(failures=2), self.router, self)  # type: ignore[arg-type]

    def add(self, name: str, health: Health = Health.UNKNOWN) -> Replica:
        replica = Replica(name, f"http://{name}", health)
        self.router.add(replica)
        return replica

    @asynccontextmanager
    async def get(self, url: str, allow_redirects: bool) -> AsyncIterator[SimpleNamespace]:
        if (status := self.statuses.get(url)) is None:
            raise ClientConnectionError("nobody there")
        yield SimpleNamespace(status=status)

    def look(self) -> None:
        asyncio.run(self.check.look())


@pytest.fixture
def servers() -> Servers:
    return Servers()


def test_a_replica_is_dead_when_it_has_not_answered_so_often_in_a_row(servers: Servers) -> None:
    replica = servers.add("a", Health.READY)

    seen = []
    for status in (None, 200, None, None, None, 200):
        servers.statuses["http://a" + READY] = status
        servers.look()
        seen.append(replica.health)

    assert seen == [Health.READY, Health.READY, Health.READY, Health.DEAD, Health.DEAD, Health.READY]
    assert servers.dead == ["a"]


def test_a_replica_that_never_answered_is_dead_at_once(servers: Servers) -> None:
    replica = servers.add("a")

    servers.look()

    assert replica.health is Health.DEAD


@pytest.mark.parametrize(
    ("ready", "health", "is_said"),
    [
        (200, None, Health.READY),
        (503, 200, Health.NOT_READY),
        (404, 200, Health.READY),
        (404, 503, Health.NOT_READY),
        (404, None, Health.DEAD),
        (302, 200, Health.NOT_READY),
    ],
)
def test_who_has_no_page_of_readiness_is_asked_for_its_health(
    servers: Servers, ready: int, health: int | None, is_said: Health
) -> None:
    replica = servers.add("a")
    servers.statuses = {"http://a" + READY: ready, "http://a" + HEALTH: health}

    servers.look()

    assert replica.health is is_said
