"""`HealthCheck`: polls each replica for its readiness."""

import asyncio
import logging

from aiohttp import ClientError, ClientSession

from kvtier.routing.config import HealthConfig
from kvtier.routing.replica import Health, Replica
from kvtier.routing.router import Router
from kvtier.routing.upstream import NoAnswer

log = logging.getLogger(__name__)

READY, HEALTH = "/ready", "/health"  # kvtier has both, vLLM only the second


class HealthCheck:
    """Regular polls of all replicas. A replica is dead after too many failed polls in a row, until it answers again."""

    def __init__(self, config: HealthConfig, router: Router, session: ClientSession) -> None:
        self._config = config
        self._router = router
        self._session = session

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._config.every_s)

    async def look(self) -> None:
        """Poll all replicas once, concurrently."""
        await asyncio.gather(*map(self._look_at, self._router.replicas.values()))

    async def _look_at(self, replica: Replica) -> None:
        before = replica.health
        found = await self._ask(replica)
        if found is None:
            replica.num_failures += 1
            if replica.num_failures >= self._config.failures or before is Health.UNKNOWN:
                self._router.mark_dead(replica.name)
        else:
            replica.num_failures = 0
            replica.health = found
        if replica.health is not before:
            log.log(
                logging.WARNING if replica.health is Health.DEAD else logging.INFO,
                "replica %s is %s",
                replica.name,
                replica.health.replace("_", " "),
            )

    async def _ask(self, replica: Replica) -> Health | None:
        """Return the replica's health, or None if it does not answer."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status = await self._status(replica.url + READY)
                if status == 404:
                    status = await self._status(replica.url + HEALTH)
        except (NoAnswer, ClientError, OSError):
            return None
        return Health.READY if status == 200 else Health.NOT_READY

    async def _status(self, url: str) -> int:
        async with self._session.get(url, allow_redirects=False) as answer:
            return answer.status
