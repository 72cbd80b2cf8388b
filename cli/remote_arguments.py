"""The arguments that say which remote store is meant, for commands that use one without an engine."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, remote_url, size
from kvtier.engine.config import RemoteConfig, tree_from_dict
from kvtier.store.record import NAMESPACE_BYTES

_OPTIONS = ("url", "password_file", "ca_file", "endpoint", "region")  # by their names in [remote]
BENCH_EXAMPLES = """examples:
  kvtier bench-remote redis://cache:6379
  kvtier bench-remote redis+cluster://cache-0:6379,cache-1:6379 --password-file ~/redis.password
  kvtier bench-remote s3://kv-cache/trial --block 4MiB --blocks 256
  kvtier bench-remote redis://cache:6379 --token-bytes 128KiB --prefill 22000     your model and your GPU
  kvtier bench-remote redis://cache:6379 --json | jq .read_bytes_per_s

It puts random blocks under a name of its own, reads them back as an engine does, verified, and deletes them.

exit status: 0, or 1 if a block did not come back as it was put; 2 the store could not be used
"""
_MAX_BLOCKS = 100_000
FORGET_EXAMPLES = """examples:
  kvtier forget-remote redis://cache:6379 --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8
  kvtier forget-remote s3://kv-cache/llama --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8 --yes

Servers and sidecars log the namespace when they start: "remote: blocks are put into redis://cache:6379 as 3f2a…".
Those that still run with that model put blocks again.

exit status: 0 it is done, 2 the store could not be used, or the answer was no
"""


def add_remote(parser: argparse.ArgumentParser) -> None:
    """Add the store's URL, and how one gets in."""
    parser.add_argument(
        "url",
        type=remote_url,
        metavar="URL",
        help="URL of the store, as in [remote]: redis://HOST:6379, s3://BUCKET/PREFIX",
    )
    parser.add_argument("--password-file", metavar="FILE", help="Redis: the password (default: that of the URL)")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="Redis: who signed the server's certificate (default: the system's)"
    )
    parser.add_argument("--endpoint", metavar="URL", help="S3: a server that is not the cloud's own (default: none)")
    parser.add_argument("--region", metavar="NAME", help="S3: (default: the environment's)")


def remote_of(options: argparse.Namespace, command: str) -> RemoteConfig:
    """The store that *options* of *command* name. ValueError, with what to do, for one that cannot be."""
    tables = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    return tree_from_dict(RemoteConfig, tables, command)


def add_bench_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier bench-remote`, which calls *run*."""
    bench = commands.add_parser(
        "bench-remote",
        help="whether a store that machines share pays on this network",
        description="Measures how soon a remote store answers and how fast blocks come from it, and says from which"
        " speed of computing on loading them is slower than computing them anew.",
        epilog=BENCH_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add_remote(bench)
    bench.add_argument("--block", type=size, default=1 << 20, metavar="SIZE", help="bytes of a block (default: 1MiB)")
    bench.add_argument("--blocks", type=_count, default=256, metavar="N", help="how many (default: 256)")
    bench.add_argument(
        "--readers", type=_count, default=4, metavar="N", help="threads that read (default: 4, as an engine)"
    )
    bench.add_argument(
        "--token-bytes", type=size, metavar="SIZE", help="KV of a token of your model (default: a few models')"
    )
    bench.add_argument(
        "--prefill",
        type=_count,
        metavar="TOKENS",
        help="tokens a second that your engine computes (default: not judged)",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    bench.set_defaults(run=run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _MAX_BLOCKS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MAX_BLOCKS}")
    return int(text)


def add_forget_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier forget-remote`, which calls *run*."""
    forget = commands.add_parser(
        "forget-remote",
        help="delete what a model has in a store that machines share",
        description="Deletes the records of namespaces from a remote store, such as those of a model that is served no"
        " more, or what was put before a key was changed; a namespace is what one model, with its weights, dtype and"
        " layout of KV, has in it.",
        epilog=FORGET_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add_remote(forget)
    forget.add_argument(
        "--namespace",
        type=_namespace,
        action="append",
        required=True,
        metavar="HEX",
        help="its name, 32 hexadecimal digits; may be repeated",
    )
    forget.add_argument("--yes", action="store_true", help="do not ask (default: ask on the terminal)")
    forget.set_defaults(run=run)


def _namespace(text: str) -> bytes:
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != NAMESPACE_BYTES or len(text) != 2 * NAMESPACE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace; give all of its 32 hexadecimal digits")
    return name
