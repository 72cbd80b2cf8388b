"""The `kvtier operate` command, which sends an operator's command, such as reset or pin, to a server or sidecar."""

import argparse
import json
import os
from typing import Any

from kvtier.cli.user_input import text_of, token_of
from kvtier.engine.config import size_text
from kvtier.web.json_client import JsonClient

TIMEOUT_S = 3600.0  # evicting everything from a large disk takes long
PATH = "/v1/kvtier/operate"
TOKEN = "KVTIER_OPERATOR_TOKEN"
_NOT_ASKED = frozenset({"run", "verb", "url", "token_file", "json"})


def run(options: argparse.Namespace) -> int:
    """Send the operator's command `options.verb` to the server, and return the exit status."""
    client = JsonClient(options.url, _token(options.token_file), f"--token-file or {TOKEN}", "kvtier serve", TIMEOUT_S)
    asked = {name: value for name, value in vars(options).items() if name not in _NOT_ASKED and value is not None}
    for name, read in (("prompt", _text), ("token_ids", _numbers)):
        if name in asked:
            asked[name] = read(asked[name])
    answer = client.ask("POST", f"{PATH}/{options.verb}", asked)
    if options.json:
        print(json.dumps(answer))
    else:
        for line in _lines(answer):
            print(line)
    return 1 if any("why_not" in tier for tier in answer.get("tiers", {}).values()) else 0


def _lines(answer: dict[str, Any]) -> list[str]:
    lines = []
    for tier, counts in answer.get("tiers", {}).items():
        leased = f", {counts['leased']:,} leased or pinned stay" if counts["leased"] else ""
        why_not = f"; {counts['why_not']}" if "why_not" in counts else ""
        lines.append(f"{tier:<8}{counts['blocks']:>12,} blocks evicted, {size_text(counts['bytes'])}{leased}{why_not}")
    lines += [f"verified: {what}" for what in answer.get("verified", [])]
    if "note" in answer:
        lines.append(answer["note"])
    others = {name: value for name, value in answer.items() if name not in ("verb", "tiers", "verified", "note")}
    return lines + [f"{name}: {value}" for name, value in others.items()]


def _token(file: str | None) -> str:
    if file is None:
        if not (token := os.environ.get(TOKEN)):
            raise ValueError(f"there is no operator's token; set {TOKEN}, or give --token-file FILE")
        return token
    return token_of(file)


def _text(file: str) -> str:
    return text_of("--prompt", file)


def _numbers(file: str) -> list[int]:
    try:
        numbers = json.loads(text_of("--token-ids", file))
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(f"--token-ids {file}: is not a JSON array of integers; write it as [1, 2, 3]")
    return numbers
