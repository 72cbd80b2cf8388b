"""The arguments of `kvtier doc`."""

import argparse
import re
from collections.abc import Callable
from typing import Any

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

exit status: 0, or 1 if a document could not be computed, 2 if the server refused or is not there
"""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_doc(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command, which *run* does; `options.doc` says what of it."""
    doc = commands.add_parser(
        "doc",
        help="documents that a server keeps warm",
        description="Puts documents to a running 'kvtier serve', which computes them in the background and keeps their "
        "keys and values, so that questions about them start at once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doc.set_defaults(run=run)
    actions = doc.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="doc")

    add = _action(actions, "add", "put a text and have it computed")
    add.add_argument("file", metavar="FILE", help="a text in UTF-8; -: standard input")
    add.add_argument("--id", metavar="ID", help="A-Z a-z 0-9 . _ -, up to 128 (the file's name)")
    add.add_argument("--as", dest="form", choices=["chat", "text"], help="how prompts have it (chat if there are any)")
    add.add_argument("--system", metavar="TEXT", help="the system message of the chats about it")
    add.add_argument("--model", metavar="NAME", help="an adapter of the server's (its model)")
    add.add_argument("--cache-salt", metavar="SALT", help="only requests with it share what is computed")
    add.add_argument("--no-wait", action="store_true", help="do not wait until it is computed")

    _action(actions, "ls", "list the documents")
    _add_id(_action(actions, "show", "where a document is, and how long loading or computing it would take"))

    warm = _action(actions, "warm", "bring a document up")
    _add_id(warm)
    warm.add_argument("--tier", choices=["host", "device"], default="host", help="where to (host)")
    warm.add_argument("--no-wait", action="store_true", help="do not wait until it is there")

    pin = _action(actions, "pin", "keep a document in host memory")
    _add_id(pin)
    how_long = pin.add_mutually_exclusive_group(required=True)
    how_long.add_argument("--ttl", type=_seconds, metavar="TIME", help="for so long: 90s, 30m, 12h, 7d")
    how_long.add_argument("--end", action="store_true", help="no longer")

    rm = _action(actions, "rm", "forget documents; what is computed of them is evicted in its turn")
    rm.add_argument("ids", nargs="+", metavar="ID", help="the documents' ids")


def _action(actions: "argparse._SubParsersAction[Any]", name: str, help_: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help_,
        description=f"{help_[0].upper()}{help_[1:]}.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action.add_argument("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    action.add_argument("--api-key", metavar="KEY", help="others can see it here: rather set KVTIER_API_KEY")
    action.add_argument("--json", action="store_true", help="print what the server answers, as one JSON object")
    return action


def _add_id(action: argparse.ArgumentParser) -> None:
    action.add_argument("id", metavar="ID", help="the document's id")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
