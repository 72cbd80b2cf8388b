"""The arguments of `kvtier bench-remote` and `kvtier forget-remote`, and their validation."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, remote_url, size
from kvtier.engine.config import RemoteConfig, tree_from_dict
from kvtier.store.record import NAMESPACE_BYTES

_OPTIONS = ("url", "password_file", "ca_file", "endpoint", "region")  # same names as in [remote]
BENCH_EXAMPLES = """examples:
  kvtier bench-remote redis://cache:6379
  kvtier bench-remote redis+cluster://cache-0:6379,cache-1:6379 --password-file ~/redis.password
  kvtier bench-remote s3://kv-cache/trial --block 4MiB --blocks 256
  kvtier bench-remote redis://cache:6379 --token-bytes 128KiB --prefill 22000     your model and your GPU
  kvtier bench-remote redis://cache:6379 --json | jq .read_bytes_per_s

The command puts random blocks under a new namespace, reads and verifies them as an engine does, and deletes them.

exit status: 0 done, 1 a block was not stored or was read back with other bytes, 2 the store could not be used
"""
_MAX_BLOCKS = 100_000
FORGET_EXAMPLES = """examples:
  kvtier forget-remote redis://cache:6379 --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8
  kvtier forget-remote s3://kv-cache/llama --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8 --yes

Servers and sidecars log the namespace when they start:
"remote: blocks are put into redis://cache:6379 under namespace 3f2a…".
Servers and sidecars that still run with this model will put blocks again.

exit status: 0 done, 2 the store could not be used, or the answer was no
"""


def add_remote(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the store's URL and credentials."""
    parser.add_argument(
        "url",
        type=remote_url,
        metavar="URL",
        help="URL of the store, as in [remote]: redis://HOST:6379, s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--password-file", metavar="FILE", help="Redis: file with the password (default: the password in the URL)"
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="Redis: CA certificates to verify the server with (default: the system's)"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="S3: URL of a server other than the cloud's own (default: none)"
    )
    parser.add_argument("--region", metavar="NAME", help="S3: the region (default: the environment's)")


def remote_of(options: argparse.Namespace, command: str) -> RemoteConfig:
    """Return the store's configuration from *options*. Raise ValueError if it is invalid.

    *command* is the name of the command, for the error message.
    """
    tables = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    return tree_from_dict(RemoteConfig, tables, command)


def add_bench_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier bench-remote`, which calls *run*."""
    bench = commands.add_parser(
        "bench-remote",
        help="measure whether a shared remote store pays off on this network",
        description="Measures the latency and throughput of a remote store. Prints the prefill speed above which "
        "loading blocks from the store is slower than computing them.",
        epilog=BENCH_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add_remote(bench)
    bench.add_argument(
        "--block", type=size, default=1 << 20, metavar="SIZE", help="size of a test block (default: 1MiB)"
    )
    bench.add_argument("--blocks", type=_count, default=256, metavar="N", help="number of test blocks (default: 256)")
    bench.add_argument(
        "--readers", type=_count, default=4, metavar="N", help="number of reader threads (default: 4, as in an engine)"
    )
    bench.add_argument(
        "--token-bytes",
        type=size,
        metavar="SIZE",
        help="KV bytes per token of your model (default: those of a few common models)",
    )
    bench.add_argument(
        "--prefill",
        type=_count,
        metavar="TOKENS",
        help="prefill speed of your engine in tokens per second, to judge if the store pays off (default: no verdict)",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    bench.set_defaults(run=run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _MAX_BLOCKS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_BLOCKS}")
    return int(text)


def add_forget_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier forget-remote`, which calls *run*."""
    forget = commands.add_parser(
        "forget-remote",
        help="delete a model's blocks from a shared remote store",
        description="Deletes all records of the given namespaces from a remote store. A namespace holds the blocks of "
        "one model with its weights, dtype and KV layout. Use this for a model that is no longer served, or after the "
        "encryption key was changed.",
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
        help="name of the namespace, 32 hexadecimal digits; may be repeated",
    )
    forget.add_argument("--yes", action="store_true", help="delete without asking (default: ask)")
    forget.set_defaults(run=run)


def _namespace(text: str) -> bytes:
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != NAMESPACE_BYTES or len(text) != 2 * NAMESPACE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a namespace; give all of its 32 hexadecimal digits")
    return name
