"""The arguments of `kvtier check`, `kvtier stats` and `kvtier store` and their validation."""

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

from kvtier.cli.arguments import HelpFormatter, path

CHECK_EXAMPLES = """examples:
  kvtier check ~/.cache/kvtier                 verify the accounting and all records
  kvtier check ~/.cache/kvtier --sample 1000   verify the accounting and 1000 random records
  kvtier check ~/.cache/kvtier --fix           delete bad records
  kvtier check ~/.cache/kvtier --key-file ~/kv.key --json

exit status: 0 no fault, or all were fixed; 1 a fault remains; 2 the store could not be checked
"""
STATS_EXAMPLES = """examples:
  kvtier stats ~/.cache/kvtier
  kvtier stats ~/.cache/kvtier --json | jq .stored_bytes

exit status: 0 the next engine finds all records, 1 it starts empty or from a checkpoint, 2 the store could not be read
"""
STORE_EXAMPLES = """examples:
  kvtier store ls ~/.cache/kvtier
  kvtier store rm ~/.cache/kvtier --namespace 3f2a
  kvtier store rm ~/.cache/kvtier --namespace 3f2a --namespace 71 --yes
  kvtier store rm ~/.cache/kvtier --all-but 3f2a
  kvtier store rm ~/.cache/kvtier --all

exit status: 0 done, 1 the store is damaged, 2 the store could not be read, or the answer was no
"""

_Commands: TypeAlias = "argparse._SubParsersAction[Any]"
_Run: TypeAlias = Callable[[argparse.Namespace], int]


def add_store(commands: _Commands, run: _Run) -> None:
    """Add `kvtier check`, `kvtier stats`, `kvtier store` and short forms of its actions, all of which call *run*.

    `options.action` is the name of the action.
    """
    _add_check(commands, run)
    _add_stats(commands, run)
    store = commands.add_parser(
        "store",
        help="list or delete the namespaces of a store",
        description="Lists or deletes the namespaces of a store. A namespace holds the blocks of one model with its "
        "weights, dtype and KV layout.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    actions = store.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_list(actions, run, "list the namespaces")
    _add_remove(actions, run, "delete the records of namespaces")
    _add_list(commands, run, "the same as 'kvtier store ls'")
    _add_remove(commands, run, "the same as 'kvtier store rm'")


def _add_check(commands: _Commands, run: _Run) -> None:
    check = commands.add_parser(
        "check",
        aliases=["verify", "fsck"],
        help="verify a store's accounting and every byte in it",
        description="Reads and verifies all records of a store, and compares the store's accounting with a full count. "
        "No engine may have the store open. Without --fix, the command deletes nothing.",
        epilog=CHECK_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(check)
    check.add_argument("--fix", action="store_true", help="delete bad records (not those with another encryption key)")
    check.add_argument("--sample", type=_count, metavar="N", help="read only N random records (default: all)")
    check.add_argument("--key-file", type=path, metavar="FILE", help="an encrypted store's key file (default: none)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    check.set_defaults(run=run, action="check")


def _add_stats(commands: _Commands, run: _Run) -> None:
    stats = commands.add_parser(
        "stats",
        aliases=["info"],
        help="show the contents of a store",
        description="Shows the contents of a store by namespace, and whether the store was closed. Works while an "
        "engine has the store open.",
        epilog=STATS_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(stats)
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    stats.set_defaults(run=run, action="stats")


def _add_list(commands: _Commands, run: _Run, what: str) -> None:
    ls = commands.add_parser(
        "ls",
        aliases=["list"],
        help=what,
        description="Lists the namespaces of a store. Works while an engine has the store open.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(ls)
    ls.set_defaults(run=run, action="ls")


def _add_remove(commands: _Commands, run: _Run, what: str) -> None:
    rm = commands.add_parser(
        "rm",
        aliases=["remove", "delete"],
        help=what,
        description="Deletes all records of the given namespaces from a store. Their space goes back to the file "
        "system, so their bytes can no longer be read from the store's files. No engine may have the store open.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(rm)
    which = rm.add_mutually_exclusive_group(required=True)
    beginning = "namespace whose name begins with HEX; may be repeated"
    which.add_argument("--namespace", action="append", default=[], metavar="HEX", help=f"delete the {beginning}")
    which.add_argument("--all-but", action="append", default=[], metavar="HEX", help=f"keep only the {beginning}")
    which.add_argument("--all", action="store_true", help="delete every record")
    rm.add_argument("--yes", action="store_true", help="delete without asking (default: ask)")
    rm.set_defaults(run=run, action="rm")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", type=path, metavar="STORE", help="the store's folder, as in disk.path of the configuration"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of records; give 1 or more")
    return int(text)
