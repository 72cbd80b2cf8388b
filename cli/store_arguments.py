"""The arguments of `kvtier check`, `kvtier stats` and `kvtier store`, and what they may be."""

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

from kvtier.cli.arguments import HelpFormatter, path

CHECK_EXAMPLES = """examples:
  kvtier check ~/.cache/kvtier                 the accounting, and every record
  kvtier check ~/.cache/kvtier --sample 1000   the accounting, and a thousand random records
  kvtier check ~/.cache/kvtier --fix           delete bad records
  kvtier check ~/.cache/kvtier --key-file ~/kv.key --json

exit status: 0 all is fine (or was fixed), 1 something is wrong, 2 it could not be checked
"""
STATS_EXAMPLES = """examples:
  kvtier stats ~/.cache/kvtier
  kvtier stats ~/.cache/kvtier --json | jq .stored_bytes

exit status: 0 the next engine finds all of it, 1 it starts empty or from a checkpoint, 2 it could not be read
"""
STORE_EXAMPLES = """examples:
  kvtier store ls ~/.cache/kvtier
  kvtier store rm ~/.cache/kvtier --namespace 3f2a
  kvtier store rm ~/.cache/kvtier --namespace 3f2a --namespace 71 --yes
  kvtier store rm ~/.cache/kvtier --all-but 3f2a
  kvtier store rm ~/.cache/kvtier --all

exit status: 0 it is done, 1 the store is damaged, 2 it could not be read, or the answer was no
"""

_Commands: TypeAlias = "argparse._SubParsersAction[Any]"
_Run: TypeAlias = Callable[[argparse.Namespace], int]


def add_store(commands: _Commands, run: _Run) -> None:
    """Add `kvtier check`, `kvtier stats`, `kvtier store` and short forms of its actions, which call *run*;
    `options.action` is the name of what is to be done."""
    _add_check(commands, run)
    _add_stats(commands, run)
    store = commands.add_parser(
        "store",
        help="list or delete the namespaces of a store",
        description="Lists or deletes the namespaces of a store; a namespace is what one model, with its weights, dtype"
        " and layout of KV, has in it.",
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
        help="verify a store: its accounting and every byte in it",
        description="Reads all records of a store that no engine has open, verifies them, and compares the store's "
        "accounting with a full count; without --fix it deletes nothing.",
        epilog=CHECK_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(check)
    check.add_argument("--fix", action="store_true", help="delete bad records (not those with another encryption key)")
    check.add_argument("--sample", type=_count, metavar="N", help="read only N random records (default: all)")
    check.add_argument("--key-file", type=path, metavar="FILE", help="the key of an encrypted store (default: none)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    check.set_defaults(run=run, action="check")


def _add_stats(commands: _Commands, run: _Run) -> None:
    stats = commands.add_parser(
        "stats",
        aliases=["info"],
        help="show what is in a store",
        description="Shows what is in a store, by namespace, and how it was left; also while an engine has it open.",
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
        description="Lists the namespaces of a store, also while an engine has it open.",
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
        description="Deletes the records of namespaces of a store that no engine has open, and gives their room back to"
        " the file system, so that their bytes cannot be read there any more.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(rm)
    which = rm.add_mutually_exclusive_group(required=True)
    beginning = "the beginning of its name in hexadecimal; may be repeated"
    which.add_argument("--namespace", action="append", default=[], metavar="HEX", help=f"delete this one: {beginning}")
    which.add_argument(
        "--all-but", action="append", default=[], metavar="HEX", help=f"delete all but this one: {beginning}"
    )
    which.add_argument("--all", action="store_true", help="delete every record")
    rm.add_argument("--yes", action="store_true", help="do not ask (default: ask on the terminal)")
    rm.set_defaults(run=run, action="rm")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=path, metavar="STORE", help="the store's folder, as [disk] path names it")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of records; give 1 or more")
    return int(text)
