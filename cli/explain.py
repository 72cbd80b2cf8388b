"""The `kvtier explain` command, which asks a running server or sidecar why a prompt was a cache hit or a miss."""

import argparse
import json
import os
import sys
import time
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.user_input import text_of, token_of
from kvtier.web.json_client import JsonClient

_TIMEOUT_S = 60.0
_OTHER_WIDTH = 120  # width, in columns, of output that does not go to a terminal
_PATH = "/v1/kvtier/explain"
FIELDS = (  # of a completion or chat request, those that decide its prompt and where the prompt is cached
    *("prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("reasoning_effort", "model", "cache_salt"),
)
_MAX_ID = 4096  # characters; engines that use a sidecar may have long request ids
_WHY = {
    "other": "seen, but with another {differs}",
    "other_template": "the same messages were seen, but the template rendered them differently",
    "shorter_than_block": "the prompt has fewer tokens than a block",
    "behind_a_missed_block": "in a tier, but unusable because an earlier block is missing",
    "evicted_long_ago": "seen, but evicted too long ago for the cause to be known",
    "never_seen": "never seen",
    "not_kept": "computed before, but kvtier kept no state or window for resuming there",
    "capacity": "found, but the tier above had no free slot for it",
    "corrupt": "found, but its bytes differed from those stored",
    "failed": "found, but the copy failed",
    "deadline": "found, but the copy was too late",
    "cost": "found, but computing it was expected to be faster",
    "skipped": "the request asked not to read the cache, or limited how much of it to read",
    "scored": "found, but the request asked for log probabilities of its prompt",
    "aborted": "the request ended before its prefix was loaded",
    "last_block": "always computed: the block is not full, or has the last token",
}
_CAUSES = {
    "room": "newer blocks needed its slot",
    "quota": "its tenant exceeded its quota",
    "layout": "another layout of the sidecar needed its slot",
    "superseded": "a longer block has its tokens",
    "corrupt": "its bytes were damaged",
    "unreadable": "it could not be read",
}


def explain(options: argparse.Namespace) -> int:
    """Ask the server why a prompt hit or missed its cache, print the answer, and return the exit status.

    Raises ValueError for an unusable option, OSError if no server answers, and `Refused` for an error response.
    """
    if options.id is None and options.prompt is None:
        raise ValueError("explain: give the id of a request, or --prompt FILE")
    if options.prompt is None and (options.model or options.cache_salt):
        raise ValueError("explain: --model and --cache-salt belong to a prompt; give --prompt FILE as well")
    if options.id is not None and len(options.id) > _MAX_ID:
        raise ValueError(f"explain: the id has {len(options.id):,} characters; give an id with at most {_MAX_ID:,}")
    if options.id is not None and not options.id.isprintable():
        raise ValueError(f"explain: id {options.id!r} has a character that request ids cannot have; correct the id")
    where = "--api-key, KVTIER_API_KEY or --token-file"
    client = JsonClient(options.url, _key(options), where, "kvtier serve --model …", _TIMEOUT_S)
    if options.prompt is None:
        answer = client.ask("GET", f"{_PATH}/{_id(options.id)}")
    else:
        answer = client.ask("POST", _PATH, _question(options))
    if options.json:
        print(json.dumps(answer))
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=_OTHER_WIDTH)
    for found in answer["data"]:
        _show(console, found)
    return 0


def _key(options: argparse.Namespace) -> str | None:
    if options.token_file is not None:
        return token_of(options.token_file)
    key: str | None = options.api_key or os.environ.get("KVTIER_API_KEY")
    return key


def _id(request_id: str) -> str:
    return quote(request_id, safe="")


def _question(options: argparse.Namespace) -> dict[str, object]:
    """Return the body to send. The `--prompt` file has a prompt's text, or the JSON of a completion or chat request."""
    text = text_of("--prompt", options.prompt)
    if not text:
        raise ValueError(f"--prompt {options.prompt}: is empty; give a prompt")
    question: dict[str, object] = {"prompt": text}
    if text.lstrip()[:1] == "{":
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        except RecursionError:
            raise ValueError(f"--prompt {options.prompt}: the JSON is nested too deep; give a prompt") from None
        if isinstance(found, dict) and ("messages" in found or "prompt" in found):
            question = {name: found[name] for name in FIELDS if name in found}
    given = {"model": options.model, "cache_salt": options.cache_salt, "request_id": options.id}
    return question | {name: value for name, value in given.items() if value is not None}


def _show(console: Console, found: dict[str, Any]) -> None:
    title = "a lookup of this prompt" if found["id"] is None else f"request {found['id']}, {_when(found['arrived_at'])}"
    console.print(Text(f"{title}: {found['prompt_tokens']:,} tokens, in blocks of {found['block_size']}"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("because")
    for row in found["rows"]:
        where = "computed" if row["hit"] is None else row["hit"]
        table.add_row(f"{row['start']:,} to {row['end']:,}", where, Text(_because(row)))
    console.print(table)
    console.print(Text(_departure(found["departure"])))
    for note in found["notes"]:
        console.print(Text(note))


def _because(row: dict[str, Any]) -> str:
    if row["hit"] is not None:
        return "copied out of a block that begins with these tokens" if row["copied"] else ""
    evicted, missed = row["evicted"], str(row["missed"])
    if evicted is None:
        return _WHY.get(missed, missed).format(differs=", ".join(row["differs"]))
    tier = missed.removeprefix("evicted_from_")
    when = _when(evicted["first_at"])
    if round(evicted["last_at"] - evicted["first_at"]):
        when += f" to {_when(evicted['last_at'])}"
    if evicted["cause"] == "cleared":
        return f"cleared by a reset or an operator, {when}; last in {tier}"
    during = f", during {', '.join(evicted['during'])}" if evicted["during"] else ""
    return f"evicted from {tier}, {when}: {_CAUSES.get(evicted['cause'], evicted['cause'])}{during}"


def _departure(departure: dict[str, Any] | None) -> str:
    if departure is None:
        return "No known prompt shares its first tokens."
    shared = f"The nearest known prompt shares the first {departure['shared_tokens']:,} tokens"
    if not departure["departs"]:
        return f"{shared}, and one of the two ends there."
    if departure["text"] is None:
        return f"{shared}, then differs. (Give --prompt FILE to see the text.)"
    return f"{shared}, then differs: only this prompt has {departure['text']!r} after {departure['before']!r}."


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
