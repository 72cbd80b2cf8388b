"""The arguments of `kvtier bench-remote`, and what they may be."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, size
from kvtier.cli.remote_arguments import add_remote

EXAMPLES = """examples:
  kvtier bench-remote redis://cache:6379
  kvtier bench-remote redis+cluster://cache-0:6379,cache-1:6379 --password-file ~/redis.password
  kvtier bench-remote s3://kv-cache/trial --block 4MiB --blocks 256
  kvtier bench-remote redis://cache:6379 --token-bytes 128KiB --prefill 22000     your model and your GPU
  kvtier bench-remote redis://cache:6379 --json | jq .read_bytes_per_s

It puts random blocks under a name of its own, reads them back as an engine does, verified, and deletes them.

exit status: 0, or 1 if a block did not come back as it was put; 2 the store could not be used
"""
_MOST_BLOCKS = 100_000


def add_bench_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier bench-remote`, which calls *run*."""
    bench = commands.add_parser(
        "bench-remote",
        help="whether a store that machines share pays on this network",
        description="Measures how soon a remote store answers and how fast blocks come from it, and says from which"
        " speed of computing on loading them is slower than computing them anew.",
        epilog=EXAMPLES,
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
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _MOST_BLOCKS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST_BLOCKS}")
    return int(text)
