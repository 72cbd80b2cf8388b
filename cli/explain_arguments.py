"""The arguments of `kvtier explain`."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, sent_text, some_text

EXAMPLES = """examples:
  kvtier explain 5f3c9a                        a request that has ended, by the id that its answer had in x-request-id
  kvtier explain --prompt question.txt         what would be found of a prompt now; nothing is computed
  kvtier explain --prompt chat.json            the body of a chat ("messages"), or token ids ("prompt": [1, 2])
  kvtier explain 5f3c9a --prompt question.txt  the request, with the text of the first token that differs
  kvtier explain cmpl-1 --url http://127.0.0.1:9464 --token-file ~/kvtier.token     a lookup, of a sidecar

exit status: 0 it is explained, 2 the request is not known, or no server answers
"""


def add_explain(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier explain`, which calls *run*."""
    explain = commands.add_parser(
        "explain",
        help="why a prompt was found in the cache or not, block by block",
        description="Says of a request of a running 'kvtier serve' or 'kvtier sidecar', or of a prompt, which tokens "
        "came from which tier, why the others did not, and where it departs from the nearest one that is known.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    explain.add_argument("id", nargs="?", type=sent_text, metavar="REQUEST_ID", help="a request that has ended")
    explain.add_argument(
        "--prompt", type=some_text, metavar="FILE", help="a text, or a JSON object; -: standard input (default: none)"
    )
    explain.add_argument("--model", type=sent_text, metavar="NAME", help="of the prompt (default: the server's model)")
    explain.add_argument("--cache-salt", type=sent_text, metavar="SALT", help="of the prompt (default: none)")
    explain.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    who = explain.add_mutually_exclusive_group()
    who.add_argument(
        "--api-key",
        type=some_text,
        metavar="KEY",
        help="other users can read it here: rather set KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    who.add_argument("--token-file", type=some_text, metavar="FILE", help="the token of a sidecar (default: none)")
    explain.add_argument("--json", action="store_true", help="print what the server answers, as one JSON object")
    explain.set_defaults(run=run)
