"""The arguments of `kvtier operate` and their validation."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, utf8_text

EXAMPLES = """examples:
  kvtier operate reset --tenant acme            the tenant's blocks on device, in host memory and on disk
  kvtier operate reset --all --url http://127.0.0.1:9464       a sidecar
  kvtier operate evict disk --bytes 100GiB      the oldest 100 GiB on disk
  kvtier operate spill                          copy down blocks without a lower copy, before draining a node
  kvtier operate pin --prompt system.txt --seconds 3600        prints the pin's name, for unpin
  kvtier operate unpin 41c6a5c93c07a1de
  kvtier operate check                          verify the cache's bookkeeping; prints what was verified
  kvtier operate log-level debug --logger kvtier.tiers

The token is taken from --token-file or KVTIER_OPERATOR_TOKEN. The server's tokens are in [operators] of its
configuration.

exit status: 0 done, 1 done in part (the disk failed), 2 the server refused or does not answer
"""
URL = "http://127.0.0.1:8000"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_operate(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier operate`, which calls *run*. `options.verb` is the operator's command, such as "reset"."""
    operate = commands.add_parser(
        "operate",
        help="reset, evict, spill, pin, check or set the log level of a running server or sidecar",
        description="Sends an operator's command (a verb) to a running 'kvtier serve' or 'kvtier sidecar'. The verb "
        "needs an operator's token, and is recorded in the audit log.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    operate.set_defaults(run=run)
    verbs = operate.add_subparsers(title="verbs", required=True, metavar="VERB", dest="verb")

    reset = _verb(
        verbs,
        "reset",
        "evict blocks from device, host memory and disk, not from a remote tier; blocks in use and pinned blocks stay",
    )
    which = reset.add_mutually_exclusive_group(required=True)
    which.add_argument("--tenant", type=utf8_text, metavar="NAME", help="evict the blocks of this tenant")
    which.add_argument(
        "--namespace",
        type=utf8_text,
        metavar="HEX",
        help="evict the blocks of the namespace whose name begins with HEX (see kvtier stats)",
    )
    which.add_argument("--all", action="store_true", default=None, help="evict all blocks")

    evict = _verb(verbs, "evict", "evict the oldest blocks of one tier; blocks without a copy in another tier are lost")
    evict.add_argument("tier", choices=["device", "host", "disk"], help="the tier to evict from")
    amount = evict.add_mutually_exclusive_group(required=True)
    amount.add_argument("--bytes", type=utf8_text, metavar="SIZE", help="number of bytes to evict, such as 4GiB")
    amount.add_argument("--blocks", type=_count, metavar="N", help="number of blocks to evict")

    spill = _verb(verbs, "spill", "copy down all blocks without a copy in a lower tier, and wait for the copies")
    spill.add_argument("--seconds", type=_seconds, metavar="TIME", help="maximum time to wait (default: 60s)")

    pin = _verb(verbs, "pin", "keep the cached blocks of a prompt in host memory")
    what = pin.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", metavar="FILE", help="UTF-8 text file, or - for standard input (a sidecar needs --token-ids)"
    )
    what.add_argument(
        "--token-ids", metavar="FILE", help="file with a JSON array of token ids, or - for standard input"
    )
    pin.add_argument(
        "--seconds", type=_seconds, required=True, metavar="TIME", help="duration of the pin: 90s, 30m, 12h, 7d"
    )
    pin.add_argument(
        "--model",
        type=utf8_text,
        metavar="NAME",
        help="model or LoRA adapter that the prompt is for (default: the server's model); a sidecar has no "
        "default and needs the model of an attached engine",
    )
    pin.add_argument(
        "--tenant", type=utf8_text, metavar="NAME", help="the tenant whose requests use the prompt (default: none)"
    )
    pin.add_argument(
        "--salt", type=utf8_text, metavar="SALT", help="the cache_salt of requests that use the prompt (default: none)"
    )

    unpin = _verb(verbs, "unpin", "end a pin")
    unpin.add_argument("pin", metavar="NAME", help="name of the pin, as printed by 'kvtier operate pin'")

    check = _verb(verbs, "check", "verify that the cache's bookkeeping is consistent")
    check.add_argument(
        "--now",
        action="store_true",
        default=None,
        help="check even while requests run; they wait until the check is done",
    )

    level = _verb(verbs, "log-level", "set the server's log level until it stops")
    level.add_argument("level", choices=["debug", "info", "warning", "error"], help="lowest level to log")
    level.add_argument(
        "--logger", type=utf8_text, metavar="NAME", help="name of the logger, such as kvtier.tiers (default: kvtier)"
    )


def _verb(verbs: "argparse._SubParsersAction[Any]", name: str, help_: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_,
        description=f"{help_[0].upper()}{help_[1:]}.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    verb.add_argument(
        "--url", default=URL, help=f"server URL (default: {URL}); for a local sidecar, give http://127.0.0.1:9464"
    )
    verb.add_argument(
        "--token-file", metavar="FILE", help="file with only the operator's token (default: KVTIER_OPERATOR_TOKEN)"
    )
    verb.add_argument("--json", action="store_true", help="print the server's response as one JSON object")
    return verb


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks; give 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write it as 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
