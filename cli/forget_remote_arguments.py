"""The arguments of `kvtier forget-remote`, and what they may be."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter
from kvtier.cli.remote_arguments import add_remote
from kvtier.store.record import NAMESPACE_BYTES

EXAMPLES = """examples:
  kvtier forget-remote redis://cache:6379 --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8
  kvtier forget-remote s3://kv-cache/llama --namespace 3f2a9c0d51e84b7f9a6620c1d3b5e7f8 --yes

Servers and sidecars log the namespace when they start: "remote: blocks are put into redis://cache:6379 as 3f2a…".
Those that still run with that model put blocks again.

exit status: 0 it is done, 2 the store could not be used, or the answer was no
"""


def add_forget_remote(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier forget-remote`, which calls *run*."""
    forget = commands.add_parser(
        "forget-remote",
        help="delete what a model has in a store that machines share",
        description="Deletes the records of namespaces from a remote store, such as those of a model that is served no"
        " more, or what was put before a key was changed; a namespace is what one model, with its weights, dtype and"
        " layout of KV, has in it.",
        epilog=EXAMPLES,
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
