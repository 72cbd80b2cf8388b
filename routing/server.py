"""`RouteServer`: the router as an HTTP server, with its background tasks."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from kvtier.routing.app import RouteApp
from kvtier.routing.config import RouteConfig
from kvtier.routing.event_feed import EventFeed
from kvtier.routing.health import HealthCheck
from kvtier.routing.metrics import RouteMetrics, RouterCollector
from kvtier.routing.proxy import Proxy
from kvtier.routing.replica import Replica
from kvtier.routing.router import Router
from kvtier.routing.tokens import Tokens
from kvtier.routing.upstream import no_retry
from kvtier.web.api_keys import ApiKeys
from kvtier.web.asgi_server import AsgiServer
from kvtier.web.browser_check import BrowserRules
from kvtier.web.gate import ConnectionLimits, Gate
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators

log = logging.getLogger(__name__)

CONNECT_S = 5.0
IDLE_S = 4.0  # how long an idle connection to a replica is kept; uvicorn's servers close one after 5 s
LEAVING_S = 5  # how long a shutdown waits until the last bytes of answers are sent
LOOK_S = 0.05  # pause between two checks whether all answers have ended


class RouteServer:
    """The router as an HTTP server on a socket that is already bound. `run` serves until `stop` is called."""

    def __init__(
        self, config: RouteConfig, bound: socket.socket, operators: Operators | None = None, keys: ApiKeys | None = None
    ) -> None:
        """Create the server. This must be called on its event loop.

        *operators* are the users who may drain replicas; None disables draining. *keys* are the replicas' API keys.
        """
        self.router = Router(config.policy, config.index, on_dead=self._on_dead)
        for each in config.replicas:
            self.router.add(Replica(each.name, each.url))
        self.metrics = RouteMetrics()
        self._config = config
        self._bound = bound
        self._stop = asyncio.Event()
        self._ends = AsyncExitStack()
        session = _session(config)
        self._ends.push_async_callback(session.close)
        tokens = Tokens(config.tokens, session)
        self.feeds: Mapping[str, EventFeed] = {
            name: EventFeed(publisher, partial(self.router.learn, name), partial(self.router.forget, name))
            for each in config.replicas
            if (publisher := each.publisher) is not None
            for name in [publisher.name]
        }
        self.metrics.registry.register(RouterCollector(self.router, self.feeds, tokens))
        proxy = Proxy(config, self.router, tokens, session, self.metrics, keys)
        audit = None if operators is None else AuditLog(config.operators.audit, config.operators.audit_bytes)
        if audit is not None:
            self._ends.callback(audit.close)
        rules = browser_rules(config, keys)
        self.app = RouteApp(self.router, proxy, self.feeds, self.metrics, operators, audit, rules)
        self._health = HealthCheck(config.health, self.router, session)

    def _on_dead(self, name: str) -> None:
        """Restart the replica's event feed, because the router has forgotten the replica's prefixes."""
        if name in self.feeds:
            self.feeds[name].start_over()

    def stop(self) -> None:
        """Start the shutdown: `run` drains the server and then returns. Call this on the event loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` is called. If a background task fails, raise its error."""
        async with self._ends:
            await self._health.look()
            server = _server(self._config, self.app, self.metrics)
            beside = [asyncio.create_task(each) for each in self._beside()]
            answering = asyncio.create_task(server.serve([self._bound]))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                done, _ = await asyncio.wait({*beside, answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                await self._drain()
            finally:
                server.should_exit = True
                await answering
                for task in (*beside, stopping):
                    task.cancel()
                await asyncio.gather(*beside, stopping, return_exceptions=True)

    def _beside(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._health.run()
        for feed in self.feeds.values():
            yield feed.run()

    async def _drain(self) -> None:
        """Refuse new requests, and wait for running ones, at most `drain_s` seconds."""
        self.app.is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                while self.app.num_running:
                    await asyncio.sleep(LOOK_S)
        if self.app.num_running:
            log.warning(
                "shutdown: %d answers are incomplete after %g s and will be cut off; raise drain_s to wait longer",
                self.app.num_running,
                self._config.drain_s,
            )


def _session(config: RouteConfig) -> ClientSession:
    """Return the HTTP client for replicas. It reuses connections, and adds no headers of its own to a request."""
    return ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=config.timeout_s),
        cookie_jar=DummyCookieJar(),  # cookies belong to the router's clients
        auto_decompress=False,
        middlewares=(no_retry,),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def _server(config: RouteConfig, app: RouteApp, metrics: RouteMetrics) -> AsgiServer:
    limits = ConnectionLimits(
        max_header_bytes=config.max_header,
        header_timeout_s=config.header_timeout_s,
        max_connections=config.max_connections,
        max_per_address=config.max_connections_per_address,
    )
    gate = Gate(limits, lambda why: metrics.failures.labels(why).inc())
    # The replica sets the Date header. The server does not evaluate X-Forwarded-For, because the router must append
    # the address of the connected client to it.
    return AsgiServer(app, gate, LEAVING_S, date_header=False, proxy_headers=False)


def browser_rules(config: RouteConfig, keys: ApiKeys | None) -> BrowserRules | None:
    """Return the rules that refuse requests from web pages of other sites.

    Return None if the replicas need API keys, because such a page does not have a key.
    """
    if keys is not None:
        return None
    return BrowserRules.of(
        config.host,
        config.allowed_hosts,
        config.cors_origins,
        host_advice="add the name to allowed_hosts or --allow-host, or give the servers' --api-keys",
        origin_advice="add their origin to cors_origins, or give the servers' --api-keys",
    )


def keys_of(config: RouteConfig) -> ApiKeys | None:
    """Return the replicas' API keys, or None if no key file is configured. Raise ValueError if the file is invalid."""
    return ApiKeys.of(config.api_keys)
