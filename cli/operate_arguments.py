"""The arguments of `kvtier operate`, and what they may be."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, sent_text

EXAMPLES = """examples:
  kvtier operate reset --tenant acme            its blocks leave device, host memory and disk, not a remote tier
  kvtier operate reset --all --url http://127.0.0.1:9464       of a sidecar
  kvtier operate evict disk --bytes 100GiB      the oldest 100 GiB on disk
  kvtier operate spill                          what has no copy below is copied down; before a node is drained
  kvtier operate pin --prompt system.txt --seconds 3600        it prints the pin's name, for unpin
  kvtier operate unpin 41c6a5c93c07a1de
  kvtier operate check                          all books agree; prints what was verified
  kvtier operate log-level debug --logger kvtier.tiers

The token is KVTIER_OPERATOR_TOKEN's, or in --token-file. The server has its own: [operators] of its configuration.

exit status: 0 it is done, 1 it is done in part (the disk failed), 2 the server refused or does not answer
"""
URL = "http://127.0.0.1:8000"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_operate(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier operate`, which calls *run*; `options.verb` is the name of its verb."""
    operate = commands.add_parser(
        "operate",
        help="have a running server or sidecar reset, evict, spill, pin, check or log",
        description="Has a running 'kvtier serve' or 'kvtier sidecar' do what an operator may ask for with a token"
        " of its own, each verb a line in the audit log.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    operate.set_defaults(run=run)
    verbs = operate.add_subparsers(title="verbs", required=True, metavar="VERB", dest="verb")

    reset = _verb(
        verbs,
        "reset",
        "evict blocks from device, host memory and disk; leased and pinned blocks stay, and blocks in a remote tier",
    )
    which = reset.add_mutually_exclusive_group(required=True)
    which.add_argument("--tenant", type=sent_text, metavar="NAME", help="those of this tenant")
    which.add_argument(
        "--namespace", type=sent_text, metavar="HEX", help="those of the model whose namespace begins so (kvtier stats)"
    )
    which.add_argument("--all", action="store_true", default=None, help="all")

    evict = _verb(verbs, "evict", "have the oldest blocks leave one tier; what has no copy elsewhere is gone")
    evict.add_argument("tier", choices=["device", "host", "disk"], help="the tier")
    amount = evict.add_mutually_exclusive_group(required=True)
    amount.add_argument("--bytes", type=sent_text, metavar="SIZE", help="so many bytes, such as 4GiB")
    amount.add_argument("--blocks", type=_count, metavar="N", help="so many blocks")

    spill = _verb(verbs, "spill", "copy down what has no copy below, and wait for it")
    spill.add_argument("--seconds", type=_seconds, metavar="TIME", help="wait for so long at most (default: 60s)")

    pin = _verb(verbs, "pin", "keep what is cached of a prompt in host memory")
    what = pin.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="FILE", help="a text in UTF-8; -: standard input (not of a sidecar)")
    what.add_argument("--token-ids", metavar="FILE", help="a JSON array of token ids; -: standard input")
    pin.add_argument("--seconds", type=_seconds, required=True, metavar="TIME", help="for so long: 90s, 30m, 12h, 7d")
    pin.add_argument(
        "--model",
        type=sent_text,
        metavar="NAME",
        help="an adapter's name; of a sidecar the model's (default: the model)",
    )
    pin.add_argument(
        "--tenant", type=sent_text, metavar="NAME", help="the tenant whose requests it is for (default: none)"
    )
    pin.add_argument(
        "--salt", type=sent_text, metavar="SALT", help="the cache_salt of the requests that it is for (default: none)"
    )

    unpin = _verb(verbs, "unpin", "end a pin")
    unpin.add_argument("pin", metavar="NAME", help="the name that pin printed")

    check = _verb(verbs, "check", "verify that all books of the cache agree")
    check.add_argument("--now", action="store_true", default=None, help="while requests run too: they wait meanwhile")

    level = _verb(verbs, "log-level", "have the server log more, or less, until it ends")
    level.add_argument("level", choices=["debug", "info", "warning", "error"], help="from which level on")
    level.add_argument("--logger", type=sent_text, metavar="NAME", help="kvtier, or kvtier.tiers (default: kvtier)")


def _verb(verbs: "argparse._SubParsersAction[Any]", name: str, help_: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_,
        description=f"{help_[0].upper()}{help_[1:]}.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    verb.add_argument("--url", default=URL, help=f"the server (default: {URL}; a sidecar's is http://127.0.0.1:9464)")
    verb.add_argument(
        "--token-file", metavar="FILE", help="the operator's token, alone (default: KVTIER_OPERATOR_TOKEN)"
    )
    verb.add_argument("--json", action="store_true", help="print what the server answers, as one JSON object")
    return verb


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of blocks; give 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
