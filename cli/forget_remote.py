"""`kvtier forget-remote`: deletes what a model has in a store that machines share."""

import argparse
import sys
import time

from kvtier.cli.confirm import confirm
from kvtier.cli.remote_arguments import remote_of
from kvtier.engine.stores.remote_store import remote_store


def run(options: argparse.Namespace) -> int:
    """Ask, delete the records of the named namespaces, and say what it took; the exit status."""
    names: list[bytes] = options.namespace
    with remote_store(remote_of(options, "forget-remote")) as store:
        if not options.yes:
            confirm(f"delete all blocks of {', '.join(each.hex() for each in names)} from {store.where}?")
        for name in names:
            began_at = time.monotonic()
            print(f"{store.where}: deleting {name.hex()} …", file=sys.stderr, flush=True)
            store.forget(name)
            print(f"{store.where}: nothing is left of {name.hex()}, after {time.monotonic() - began_at:.1f} s")
    return 0
