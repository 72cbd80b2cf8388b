"""The `kvtier doc` command, which puts, lists, shows, warms, pins and deletes documents of a running server."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from kvtier.server.documents.client import DocumentClient

_OTHER_WIDTH = 120  # width, in columns, of output that does not go to a terminal
_POLL_S = 0.2
_TIERS = ("device", "host", "disk", "nowhere")
_AT_WORK = ("queued", "prefilling")


def run(options: argparse.Namespace) -> int:
    """Carry out the action that *options* name, and return the exit status."""
    client = DocumentClient(options.url, options.api_key or os.environ.get("KVTIER_API_KEY"))
    actions: dict[str, Callable[[DocumentClient, argparse.Namespace], int]] = {
        "add": _add,
        "ls": _list,
        "show": _show,
        "warm": _warm,
        "pin": _pin,
        "rm": _remove,
    }
    return actions[options.doc](client, options)


def _add(client: DocumentClient, options: argparse.Namespace) -> int:
    document_id = options.id or _id_of(options.file)
    content = {
        "text": _read(options.file),
        "as": options.form,
        "system": options.system,
        "model": options.model,
        "cache_salt": options.cache_salt,
    }
    there = client.put(document_id, {name: value for name, value in content.items() if value is not None})
    if not options.no_wait:
        there = _watch(client, there, lambda it: it["prefilled_tokens"], lambda it: it["status"] in _AT_WORK)
    return _tell(there, options.json)


def _list(client: DocumentClient, options: argparse.Namespace) -> int:
    answer = client.list()
    if options.json:
        print(json.dumps(answer))
        return 0
    columns: list[Column | str] = [Column("id", overflow="fold"), "status", "as"]
    columns += [Column(title, justify="right") for title in ("tokens", *_TIERS, "load", "compute", "pinned")]
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for it in answer["data"]:
        if it["status"] == "damaged":
            table.add_row(Text(str(it["file"])), it["status"], Text(it["error"]))
            continue
        counts = [f"{it['tokens'][tier]:,}" if it["tokens"][tier] else "·" for tier in _TIERS]
        times = [_time(it["load_s"]), _time(it["compute_s"]), _pinned(it)]
        table.add_row(Text(it["id"]), it["status"], it["as"], f"{it['num_tokens']:,}", *counts, *times)
    output = _output()
    output.print(table if answer["data"] else "no documents")
    if not answer["survive_restarts"]:
        advice = "to keep them, set [disk], or path in [documents]"
        output.print(f"documents are lost when the server stops; {advice}", markup=False)
    return 0


def _show(client: DocumentClient, options: argparse.Namespace) -> int:
    return _tell(client.get(options.id), options.json)


def _warm(client: DocumentClient, options: argparse.Namespace) -> int:
    there = client.warm(options.id, options.tier)
    if not options.no_wait:
        there = _watch(client, there, _num_warm, lambda it: it["is_warming"] or it["status"] in _AT_WORK)
    return _tell(there, options.json)


def _pin(client: DocumentClient, options: argparse.Namespace) -> int:
    return _tell(client.unpin(options.id) if options.end else client.pin(options.id, options.ttl), options.json)


def _remove(client: DocumentClient, options: argparse.Namespace) -> int:
    for document_id in options.ids:
        answer = client.delete(document_id)
        print(json.dumps(answer) if options.json else f"{document_id}: deleted")
    return 0


def _watch(
    client: DocumentClient,
    there: dict[str, Any],
    num_done: Callable[[dict[str, Any]], int],
    is_at_work: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Wait while the server works on a document, and return the document's final state. Show progress on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(there["status"], total=there["num_tokens"])
        while is_at_work(there):
            bar.update(task, description=there["status"], completed=num_done(there))
            time.sleep(_POLL_S)
            there = client.get(there["id"])
    return there


def _num_warm(it: dict[str, Any]) -> int:
    return int(it["tokens"]["device"] + it["tokens"]["host"])


def _tell(it: dict[str, Any], as_json: bool) -> int:
    """Print the state of one document, and return the exit status: 1 if its status is failed or damaged, else 0."""
    if as_json:
        print(json.dumps(it))
    else:
        table = Table(Column(style="bold"), Column(overflow="fold"), box=None, show_header=False)
        for name, value in _rows(it):
            table.add_row(name, Text(value))
        _output().print(table)
    return 1 if it["status"] in ("failed", "damaged") else 0


def _rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    if it["status"] == "damaged":
        return [("id", it["id"] or it["file"]), ("status", "damaged"), ("error", it["error"])]
    status = it["status"]
    if status == "prefilling":
        status += f", {it['prefilled_tokens']:,} of {it['num_tokens']:,} tokens"
    rows = [("id", it["id"]), ("status", status)]
    if it["error"] is not None:
        rows.append(("error", it["error"]))
    rows.append(("tokens", f"{it['num_tokens']:,} as {it['as']}, of {it['model']}"))
    for tier in _TIERS:
        if it["tokens"][tier]:
            size = f", {it['bytes'][tier] / 2**20:,.1f} MiB" if tier in it["bytes"] else ""
            rows.append((tier, f"{it['tokens'][tier]:,} tokens{size}"))
    rows.append(("to load", _time(it["load_s"])))
    rows.append(("to compute", _time(it["compute_s"])))
    if it["pin"] is not None:
        rows.append(("pinned", _pinned(it) + ("" if it["pin"]["is_held"] else ", not all in host memory yet")))
    return rows


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"


def _pinned(it: dict[str, Any]) -> str:
    if it["pin"] is None:
        return ""
    left_s = it["pin"]["ttl_s"]
    for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60)):
        if left_s >= 2 * seconds:
            return f"{left_s / seconds:.0f}{unit}"
    return f"{left_s:.0f}s"


def _id_of(file: str) -> str:
    """Return the default id of a document: the file's name, with "-" for characters that ids cannot have."""
    if file == "-":
        raise ValueError("doc add -: give --id; standard input has no name")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).name)[:128] or "-"


def _read(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise OSError(f"{file}: {error.strerror}; give a file that can be read") from error
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: is not UTF-8 text; convert it first") from None
    if not text:
        raise ValueError(f"{file}: is empty; give a file with text in it")
    return text


def _output() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_OTHER_WIDTH)
