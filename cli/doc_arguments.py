"""The arguments of `kvtier doc`, and what they may be."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, sent_text, some_text

EXAMPLES = """examples:
  kvtier doc add report.txt                    put it, and watch it being computed; its id is report.txt
  kvtier doc add - --id notes < notes.md       from standard input
  kvtier doc add law.txt --system "You are a lawyer."
  kvtier doc ls
  kvtier doc show report.txt --json
  kvtier doc warm report.txt                   from disk to host memory; --tier device: up to the device
  kvtier doc pin report.txt --ttl 12h          keep it in host memory; --end: no longer
  kvtier doc rm report.txt notes

then a question names the document instead of sending it:
  {"role": "user", "content": [{"type": "document", "document_id": "report.txt"}, {"type": "text", "text": "Who?"}]}

exit status: 0 it is done, 1 a document could not be computed or is damaged, 2 the server refused or does not answer
"""
MAX_DAYS = 3650  # as the server has it in document.py, whose numpy would make --help slow
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_doc(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier doc`, which calls *run*; `options.doc` is the name of its action."""
    doc = commands.add_parser(
        "doc",
        aliases=["docs"],
        help="put, list, pin or delete documents that a server keeps warm",
        description="Puts, lists, warms, pins and deletes documents of a running 'kvtier serve', which computes them in"
        " the background and keeps their keys and values, so that questions about them start at once.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    doc.set_defaults(run=run)
    actions = doc.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="doc")

    add = _action(actions, "add", "put a text on the server, which computes it")
    add.add_argument("file", metavar="FILE", help="a text in UTF-8; -: standard input")
    add.add_argument(
        "--id", type=sent_text, metavar="ID", help="up to 128 of A-Z a-z 0-9 . _ - (default: the file's name)"
    )
    add.add_argument(
        "--as",
        dest="form",
        choices=["chat", "text"],
        help="chat: it begins conversations; text: it begins prompts (default: chat if the model has a chat template)",
    )
    add.add_argument("--system", metavar="TEXT", help="the system message of the chats about it (default: none)")
    add.add_argument(
        "--model",
        type=sent_text,
        metavar="NAME",
        help="compute it with this adapter of the server (default: its model)",
    )
    add.add_argument(
        "--cache-salt",
        type=sent_text,
        metavar="SALT",
        help="share what is computed only with requests that have this cache_salt (default: none)",
    )
    add.add_argument("--no-wait", action="store_true", help="return at once (default: wait until it is computed)")

    _action(actions, "ls", "list the documents", "list")
    _add_id(_action(actions, "show", "show where a document is, and how long loading or computing it would take"))

    warm = _action(actions, "warm", "bring a document to host memory or to the device")
    _add_id(warm)
    warm.add_argument("--tier", choices=["host", "device"], default="host", help="where to bring it (default: host)")
    warm.add_argument("--no-wait", action="store_true", help="return at once (default: wait until it is there)")

    pin = _action(actions, "pin", "keep a document in host memory")
    _add_id(pin)
    how_long = pin.add_mutually_exclusive_group(required=True)
    how_long.add_argument("--ttl", type=_seconds, metavar="TIME", help="keep it for so long: 90s, 30m, 12h, 7d")
    how_long.add_argument("--end", action="store_true", help="keep it no longer")

    rm = _action(actions, "rm", "delete documents; what is computed of them is evicted in its turn", "remove", "delete")
    rm.add_argument("ids", nargs="+", metavar="ID", help="the documents' ids")


def _action(
    actions: "argparse._SubParsersAction[Any]", name: str, help_: str, *aliases: str
) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name,
        aliases=aliases,
        help=help_,
        description=f"{help_[0].upper()}{help_[1:]}.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    action.set_defaults(doc=name)  # also when it was called by an alias
    action.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    action.add_argument(
        "--api-key",
        type=some_text,
        metavar="KEY",
        help="other users can read it here: rather set KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    action.add_argument("--json", action="store_true", help="print what the server answers, as one JSON object")
    return action


def _add_id(action: argparse.ArgumentParser) -> None:
    action.add_argument("id", metavar="ID", help="the document's id")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 90s, 30m, 12h or 7d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DAYS * _SECONDS["d"]:
        raise argparse.ArgumentTypeError(f"{text!r} is too long; give {MAX_DAYS}d or less")
    return seconds
