"""The `kvtier route` command: configuration, port, signals and log of the router's process."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

from kvtier.cli.signals import draining_on_signals
from kvtier.cli.stages import show_stage
from kvtier.engine.config import is_loopback
from kvtier.extras import extra
from kvtier.routing.config import RouteConfig, route_config
from kvtier.web.api_keys import ApiKeys
from kvtier.web.log_lines import write_log
from kvtier.web.operating.operators import Operators

log = logging.getLogger(__name__)


def route(source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Route requests until a signal arrives, and return the exit status.

    Raises ValueError or OSError for unusable settings.

    Args:
        source: Configuration file, or None.
        given: Tables of settings from the command line, which override keys of *source*.
        checks_only: Whether to only check and print the resulting configuration.
    """
    config = route_config(source, given)
    if checks_only:
        show_stage("checking the router's configuration")
    else:
        write_log(config.log_format)
        log.info("starting the router")
    with extra("route", "kvtier route"):  # imported late, after the first line of output
        from kvtier.routing.server import keys_of

    operators, keys = Operators.of(config.operators.tokens, os.environ), keys_of(config)
    if operators is not None:
        operators.refuse_keys_of(keys)
    for line in _plan(config, operators is not None):
        print(line, flush=True)
    if checks_only:
        return 0
    with _bound(config.host, config.port) as bound:
        port = bound.getsockname()[1]
        log.info("listening", extra={"fields": {"host": config.host, "port": port, "pid": os.getpid()}})
        if operators is None and not is_loopback(config.host):
            log.warning("all clients of %s may read /v1/route/replicas; set tokens in [operators]", config.host)
        asyncio.run(_run(config, bound, operators, keys))
    return 0


async def _run(config: RouteConfig, bound: socket.socket, operators: Operators | None, keys: ApiKeys | None) -> None:
    from kvtier.routing.server import RouteServer

    server = RouteServer(config, bound, operators, keys)
    with draining_on_signals(server.stop):
        await server.run()


def _plan(config: RouteConfig, has_operators: bool) -> list[str]:
    lines = []
    for each in config.replicas:
        events = "no events: indexed by routed requests" if each.events is None else f"events from {each.events}"
        replay = f", replayed by {each.replay}" if each.replay else ""
        name = "" if each.name == each.url else f"{each.name} at "
        lines.append(f"replica      {name}{each.url}, {events}{replay}")
    lines.append(
        f"index        at most {config.index.max_blocks:,} blocks and {config.index.max_sessions:,} conversations"
    )
    lines.append(f"draining     {'by operators' if has_operators else 'disabled: there is no operator token'}")
    return lines


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while attempting")[0]
        raise OSError(f"route: cannot listen on {host}:{port} ({why}); choose another --host or --port") from error
