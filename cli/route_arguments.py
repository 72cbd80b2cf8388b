"""The arguments of `kvtier route` and their validation."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.cli.arguments import HelpFormatter, add_allowed_hosts, nonempty_text, utf8_text

EXAMPLES = """examples:
  kvtier route http://10.0.0.1:8000 http://10.0.0.2:8000
  kvtier route http://10.0.0.1:8000 http://10.0.0.2:8000 \\
      --events tcp://10.0.0.1:5557 --events tcp://10.0.0.2:5557 \\
      --replay tcp://10.0.0.1:5558 --replay tcp://10.0.0.2:5558
  kvtier route --config route.toml --port 8080
  kvtier route --config route.toml --check-config

then send requests as to a single server:
  curl localhost:8080/v1/chat/completions -d '{"model": "…", "messages": [{"role": "user", "content": "Hello"}]}'
  curl localhost:8080/v1/route/replicas
  curl -X POST -H "Authorization: Bearer $KVTIER_OPERATOR_TOKEN" \\
      'localhost:8080/v1/route/drain?replica=http://10.0.0.1:8000'

A kvtier server publishes events with [events] in its configuration, vLLM with --kv-events-config. Without events the
router assumes that a server has cached the prompts that were routed to it.

signals: SIGTERM and Ctrl-C stop the router after running responses; a second signal stops it at once.

exit status: 0 stopped by a signal, or --check-config found no error; 2 the router could not start
"""
_MAX_PORT = 65535


def add_route(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier route`, which calls *run*."""
    route = commands.add_parser(
        "route",
        help="route each HTTP request to the server that has its prompt cached",
        description="Routes HTTP requests (OpenAI's and Anthropic's API) to several kvtier or vLLM servers of one "
        "model. For each request, the router chooses a server that has a long prefix of the prompt cached and little "
        "load.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    route.add_argument("url", nargs="*", type=utf8_text, metavar="URL", help="a server, as http://HOST:PORT")
    route.add_argument(
        "--events",
        action="append",
        default=[],
        type=utf8_text,
        metavar="ENDPOINT",
        help="address where a server publishes KV events, tcp://HOST:PORT; give it once for each server, in "
        "the order of the servers' URLs (default: none)",
    )
    route.add_argument(
        "--replay",
        action="append",
        default=[],
        type=utf8_text,
        metavar="ENDPOINT",
        help="address from which the router can request missed events of a server; give it once for each server, in "
        "the order of the servers' URLs (default: none)",
    )
    route.add_argument(
        "--config", type=nonempty_text, metavar="FILE", help="a TOML file; options override it (default: none)"
    )
    route.add_argument(
        "--host", type=nonempty_text, metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    route.add_argument("--port", type=_port, metavar="N", help="port to listen on; 0: any free port (default: 8080)")
    route.add_argument(
        "--api-keys",
        type=nonempty_text,
        metavar="FILE",
        help="the servers' file of API keys, if they have one (default: none)",
    )
    add_allowed_hosts(route)
    route.add_argument("--log-format", choices=["human", "json"], help="json: one object per line (default: human)")
    route.add_argument("--check-config", action="store_true", help="print the resulting configuration and exit")
    route.set_defaults(run=run)


def given_tables(options: argparse.Namespace) -> Mapping[str, object]:
    """Return the options that were given, as tables of `RouteConfig`.

    Raises ValueError if the number of `--events` or `--replay` options is neither 0 nor the number of server URLs.
    """
    names = ("host", "port", "api_keys", "allowed_hosts", "log_format")
    given: dict[str, object] = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name in ("events", "replay"):
        endpoints = getattr(options, name)
        if endpoints and len(endpoints) != len(options.url):
            raise ValueError(
                f"--{name}: {len(endpoints)} addresses for {len(options.url)} URLs; give one per URL, in the same order"
            )
    if options.url:
        given["replicas"] = [
            {"url": url, **_at(options.events, i, "events"), **_at(options.replay, i, "replay")}
            for i, url in enumerate(options.url)
        ]
    return given


def _at(endpoints: list[str], i: int, name: str) -> dict[str, str]:
    return {name: endpoints[i]} if endpoints else {}


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to {_MAX_PORT}")
    return int(text)
