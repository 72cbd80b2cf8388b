"""The arguments of `kvtier doc` and their validation."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, nonempty_text, utf8_text

EXAMPLES = """examples:
  kvtier doc add report.txt                    put a document and wait for its prefill; its id is report.txt
  kvtier doc add - --id notes < notes.md       from standard input
  kvtier doc add law.txt --system "You are a lawyer."
  kvtier doc ls
  kvtier doc show report.txt --json
  kvtier doc warm report.txt                   from disk to host memory; --tier device: up to the device
  kvtier doc pin report.txt --ttl 12h          keep it in host memory; --end: unpin it
  kvtier doc rm report.txt notes

then a request names the document instead of sending its text:
  {"role": "user", "content": [{"type": "document", "document_id": "report.txt"}, {"type": "text", "text": "Who?"}]}

exit status: 0 done, 1 a document could not be computed or is damaged, 2 the server refused or does not answer
"""
MAX_DAYS = 3650  # same as in the server's document.py, which is not imported because numpy would make --help slow
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_doc(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier doc`, which calls *run*. `options.doc` is the name of the action."""
    doc = commands.add_parser(
        "doc",
        aliases=["docs"],
        help="put, list, warm, pin or delete documents that a server keeps warm",
        description="Puts, lists, warms, pins and deletes documents of a running 'kvtier serve'. The server prefills "
        "the documents in the background and keeps their KV cache. So questions about them start at once.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    doc.set_defaults(run=run)
    actions = doc.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="doc")

    add = _action(actions, "add", "put a document on the server, which prefills it")
    add.add_argument("file", metavar="FILE", help="UTF-8 text file; -: standard input")
    add.add_argument(
        "--id",
        type=utf8_text,
        metavar="ID",
        help="document id of 1 to 128 characters A-Z a-z 0-9 . _ - (default: the file's name)",
    )
    add.add_argument(
        "--as",
        dest="form",
        choices=["chat", "text"],
        help="chat: chats begin with the document; text: text prompts begin with it (default: chat if the model has a "
        "chat template, else text)",
    )
    add.add_argument("--system", metavar="TEXT", help="system message of the chats about the document (default: none)")
    add.add_argument(
        "--model",
        type=utf8_text,
        metavar="NAME",
        help="compute the document with this LoRA adapter of the server (default: no adapter)",
    )
    add.add_argument(
        "--cache-salt",
        type=utf8_text,
        metavar="SALT",
        help="share the document's blocks only with requests that have this cache_salt (default: none)",
    )
    add.add_argument("--no-wait", action="store_true", help="return at once (default: wait until the prefill is done)")

    _action(actions, "ls", "list the documents", "list")
    _add_id(_action(actions, "show", "show which tiers hold a document, and the time to load or to compute it"))

    warm = _action(actions, "warm", "load a document into host memory or onto the device")
    _add_id(warm)
    warm.add_argument("--tier", choices=["host", "device"], default="host", help="destination tier (default: host)")
    warm.add_argument("--no-wait", action="store_true", help="return at once (default: wait for the load)")

    pin = _action(actions, "pin", "keep a document in host memory")
    _add_id(pin)
    how_long = pin.add_mutually_exclusive_group(required=True)
    how_long.add_argument("--ttl", type=_seconds, metavar="TIME", help="duration of the pin: 90s, 30m, 12h, 7d")
    how_long.add_argument("--end", action="store_true", help="unpin the document now")

    rm = _action(actions, "rm", "delete documents; their blocks stay until they are evicted", "remove", "delete")
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
    action.set_defaults(doc=name)  # also when the action was called by an alias
    action.add_argument("--url", default="http://127.0.0.1:8000", help="server URL (default: http://127.0.0.1:8000)")
    action.add_argument(
        "--api-key",
        type=nonempty_text,
        metavar="KEY",
        help="the API key; other users can read arguments, so prefer KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    action.add_argument("--json", action="store_true", help="print the server's response as one JSON object")
    return action


def _add_id(action: argparse.ArgumentParser) -> None:
    action.add_argument("id", metavar="ID", help="the document's id")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write it as 90s, 30m, 12h or 7d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DAYS * _SECONDS["d"]:
        raise argparse.ArgumentTypeError(f"{text!r} is too long; give {MAX_DAYS}d or less")
    return seconds
