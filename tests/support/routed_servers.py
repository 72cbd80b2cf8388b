"""A router in a thread of the test's process, before servers that are there."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serving import DEADLINE_S, Address, come_true

from kvtier.routing.config import RouteConfig, route_config
from kvtier.routing.server import RouteServer


@dataclass(frozen=True)
class Router(Address):
    """A router in a thread."""

    server: RouteServer

    def metric(self, line: str) -> float:
        """The sum of the samples that begin so."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(line))

    def matched(self, tier: str) -> float:
        """Tokens of prompts that were sent where that tier should have them."""
        return self.metric(f'kvtier_route_matched_tokens_total{{tier="{tier}"}}')


@contextmanager
def routing(replicas: list[dict[str, object]]) -> Iterator[Router]:
    """A router before *replicas*, tables of its configuration, once all are open."""
    bound = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    patient = {"timeout_s": DEADLINE_S}
    given = {"replicas": replicas, "health": {"every_s": 0.2, **patient}, "tokens": patient}
    config = route_config(None, given)
    server = loop.run_until_complete(_made(config, bound))
    thread = threading.Thread(target=loop.run_until_complete, args=[server.run()])
    thread.start()
    router = Router(bound.getsockname()[1], server)
    try:
        come_true(lambda: router.get("/ready").json()["num_open"] == len(replicas))
        yield router
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        loop.close()


async def _made(config: RouteConfig, bound: socket.socket) -> RouteServer:
    return RouteServer(config, bound)
