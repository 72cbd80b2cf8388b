"""`kvtier forget-remote`: deletes what a model has in a store that machines share."""

import argparse
import sys
import time

from kvtier.engine.commands.remote_arguments import remote_of
from kvtier.engine.remote_store import remote_store


def run(options: argparse.Namespace) -> int:
    """Ask, delete the records of the named namespaces, and say what it took; the exit status."""
    names: list[bytes] = options.namespace
    with remote_store(remote_of(options, "forget-remote")) as store:
        if not options.yes:
            _confirm(f"delete all blocks of {', '.join(each.hex() for each in names)} from {store.where}?")
        for name in names:
            began_at = time.monotonic()
            print(f"{store.where}: deleting {name.hex()} …", file=sys.stderr, flush=True)
            store.forget(name)
            print(f"{store.where}: nothing is left of {name.hex()}, after {time.monotonic() - began_at:.1f} s")
    return 0


def _confirm(question: str) -> None:
    """Ask *question* on the terminal; RuntimeError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise RuntimeError(f"{question} there is no terminal to ask on; add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RuntimeError("nothing was deleted")
