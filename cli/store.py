"""The commands `kvtier check`, `stats`, `store ls` and `store rm`, which verify, show and delete contents of a store.

LMDB does not verify its data file, so reading a damaged file may crash the process. The store is therefore read in a
separate process (`subprocess_call`).
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from kvtier.cli.subprocess_call import Crashed, call_in_process, iterate_in_process
from kvtier.cli.user_input import confirm
from kvtier.engine.config import size_text
from kvtier.store.lmdb import upkeep
from kvtier.store.lmdb.data_file import max_bytes
from kvtier.store.lmdb.inspection import (
    Condition,
    Inspection,
    NamespaceUse,
    NextStart,
    StoreDamaged,
    StoreLost,
    inspect,
)
from kvtier.store.lmdb.upkeep import Verification
from kvtier.store.record import Fault

_CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT"}  # signals with which LMDB crashes on a damaged tree or an unreadable page
_OTHER_WIDTH = 110  # width, in columns, of output that does not go to a terminal
_STATES = {
    Condition.CLEAN: "clean",
    Condition.OPEN: "open in process {owner}",
    Condition.LEFT_OPEN: "left open by a process that ended without closing it",
    Condition.MACHINE_DOWN: "the machine went down while it was open",
    Condition.DAMAGED: "its tree was found damaged",
    Condition.OTHER_LAYOUT: "written by another version of kvtier",
    Condition.UNKNOWN: "the file that records how it was closed is missing or unreadable",
}
_NEXT_STARTS = {
    NextStart.WARM: "",
    NextStart.CHECKPOINT: "; the next engine that opens it starts from the last checkpoint",
    NextStart.EMPTY: "; the next engine that opens it starts empty",
}

_T = TypeVar("_T")


class Damaged(RuntimeError):
    """An error for a store that is damaged as a whole.

    *is_trusted* means that the next engine would not notice the damage, and would use the store.
    """

    exit_status = 1

    def __init__(self, message: str, is_trusted: bool) -> None:
        super().__init__(message)
        self.is_trusted = is_trusted


def run(options: argparse.Namespace) -> int:
    """Carry out the action that *options* name, and return the exit status."""
    match options.action:
        case "check":
            return check(options.store, options.fix, options.sample, options.key_file, options.json)
        case "stats":
            return stats(options.store, options.json)
        case "rm":
            return remove(options.store, options.namespace, options.all_but, options.yes)
        case _:
            return list_namespaces(options.store)


def check(folder: Path, fix: bool, sample: int | None, key_file: Path | None, as_json: bool) -> int:
    """Verify the store, print the result, and return the exit status: 1 if faults remain, else 0.

    *sample* is the number of records to read, chosen at random, or None for all. If *fix*, bad records are deleted.
    """
    try:
        with (
            _damage(folder),
            iterate_in_process(upkeep.verify_store, folder, os.getpid(), fix, sample, key_file) as items,
        ):
            found = _last(items, Verification)
    except Damaged as damage:
        message = str(damage)
        if damage.is_trusted and fix:
            upkeep.mark_damaged(folder)
            message += "; the next engine that opens it starts empty"
        elif damage.is_trusted:
            message += "; with --fix the next engine that opens it starts empty"
        return _tell_damage(folder, message, as_json)
    if as_json:
        print(json.dumps(_verification_object(folder, found)))
    else:
        _print_verification(folder, found)
    num_unread = found.faults[Fault.KEY]
    if num_unread and num_unread == found.num_records:
        raise ValueError(f"none of the {num_unread:,} records can be verified with this key; correct --key-file")
    is_wrong = found.num_bad > found.num_deleted or found.faults[Fault.IO_ERROR] or found.miscount
    return 1 if is_wrong else 0


def stats(folder: Path, as_json: bool) -> int:
    """Print the store's contents. Return the exit status: 1 if the next engine will not find all of them, else 0."""
    try:
        inspection = _inspect(folder)
    except Damaged as damage:
        return _tell_damage(folder, str(damage), as_json)
    if as_json:
        print(json.dumps(_inspection_object(inspection)))
    else:
        output = _output()
        output.print(_summary(inspection))
        if inspection.content is not None and inspection.content.namespaces:
            output.print(_namespace_table(inspection.content.namespaces))
    return 0 if inspection.next_start is NextStart.WARM else 1


def list_namespaces(folder: Path) -> int:
    """Print the namespaces in the store, and return the exit status."""
    _output().print(_namespace_table(_namespaces(_inspect(folder))))
    return 0


def remove(folder: Path, named: Sequence[str], all_but: Sequence[str], is_confirmed: bool) -> int:
    """Delete the records of some namespaces, and return the exit status. Ask first, unless *is_confirmed*.

    If *named* is not empty, the namespaces in it are deleted. Otherwise all namespaces except those in *all_but* are
    deleted. A namespace is given by the beginning of its hexadecimal name.
    """
    inspection = _inspect(folder)
    there = _namespaces(inspection)
    if inspection.owner is not None:
        raise RuntimeError(f"store {folder} is open in process {inspection.owner}; stop the process first")
    keep = {_namespace(there, text, folder) for text in all_but}
    wanted = {_namespace(there, text, folder) for text in named} or {use.namespace for use in there} - keep
    going = [use for use in there if use.namespace in wanted]
    if not going:
        print(f"store {folder}: there is nothing to delete")
        return 0
    num_records, num_bytes = sum(use.num_records for use in going), sum(use.stored_bytes for use in going)
    if not is_confirmed:
        question = f"delete {num_records:,} records, {size_text(num_bytes)}, of {folder}?"
        confirm(question, _namespace_table(going))
    with _damage(folder), iterate_in_process(upkeep.delete_namespaces, folder, os.getpid(), wanted, num_bytes) as items:
        gone = _last(items, upkeep.Deletion)
    print(
        f"store {folder}: {gone.num_records:,} records deleted, {size_text(gone.stored_bytes)}, "
        "unused space returned to the file system"
    )
    return 0


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Catch errors which show that the whole store is damaged, and raise `Damaged` instead."""
    try:
        yield
    except StoreLost as error:
        raise Damaged(str(error), is_trusted=isinstance(error, StoreDamaged)) from error
    except Crashed as error:
        if error.signal_name not in _CRASHES:
            raise
        raise Damaged(f"store {folder} is damaged: reading it crashed, {error.signal_name}", is_trusted=True) from error


def _tell_damage(folder: Path, message: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"store": str(folder), "damage": message}))
    print(f"kvtier: {message}", file=sys.stderr)
    return Damaged.exit_status


def _inspect(folder: Path) -> Inspection:
    with _damage(folder):
        return call_in_process(inspect, folder)


def _namespaces(inspection: Inspection) -> tuple[NamespaceUse, ...]:
    if inspection.content is None:
        raise Damaged(f"store {inspection.folder}: {_state(inspection)}", is_trusted=False)
    return inspection.content.namespaces


def _namespace(there: Collection[NamespaceUse], text: str, folder: Path) -> bytes:
    """Return the namespace whose hexadecimal name starts with *text*. *there* has all namespaces of the store."""
    names = [use.namespace.hex() for use in there if use.namespace.hex().startswith(text.lower())]
    if len(names) == 1 and text:
        return bytes.fromhex(names[0])
    if names:
        raise ValueError(f"namespace {text!r} is ambiguous; give more digits to choose one of {', '.join(names)}")
    raise ValueError(f"namespace {text!r} does not exist; see kvtier store ls {folder}")


def _last(items: Iterator[upkeep.Progress | _T], kind: type[_T]) -> _T:
    """Return the last of *items*, the result of type *kind*. The items before are progress, shown on a terminal."""
    console = Console(stderr=True)
    amount = _Amount(Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        for item in items:
            if isinstance(item, kind):
                return item
            assert isinstance(item, upkeep.Progress)
            total = item.total_bytes or None
            bar.update(task, description=item.doing, completed=item.done_bytes, total=total, refresh=total is None)
    raise AssertionError("the separate process returned no result")


class _Amount(ProgressColumn):
    """A column of the progress bar that shows bytes done, total bytes and bytes per second."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{size_text(task.completed)} of {size_text(task.total)}, {size_text(task.speed or 0)}/s")


def _print_verification(folder: Path, found: Verification) -> None:
    output = _output()
    whole = "" if found.num_records == found.num_stored else f" of {found.num_stored:,}, a sample,"
    read = f"{found.num_records:,} records{whole} verified, {size_text(found.read_bytes)} in {found.seconds:.1f} s"
    output.print(f"store {folder}: {read}", highlight=False, soft_wrap=True)
    if found.was_restored:
        what = "the machine went down while the store was open, so it went back to its last checkpoint"
        output.print(what, soft_wrap=True)
    if found.tallies:
        output.print(_tally_table(found))
    num_left = found.num_bad - found.num_deleted
    if found.num_deleted:
        output.print(f"{found.num_deleted:,} bad records deleted", highlight=False)
    if num_left:
        output.print(f"{num_left:,} bad records: --fix deletes them", highlight=False)
    if num_unread := found.faults[Fault.IO_ERROR]:
        what = f"{num_unread:,} records could not be read: look for errors of the drive in the kernel log (dmesg)"
        output.print(what, highlight=False, soft_wrap=True)
    if num_unread := found.faults[Fault.KEY]:
        what = f"{num_unread:,} records have another encryption key (or none) and cannot be verified: see --key-file"
        output.print(what, highlight=False, soft_wrap=True)
    accounting = found.miscount and f"is wrong, {found.miscount}; to repair it, start with an empty folder"
    output.print(f"accounting: {accounting or 'agrees with a full count'}", highlight=False, soft_wrap=True)


def _tally_table(found: Verification) -> Table:
    causes = [fault for fault in Fault if found.faults[fault]]
    table = Table(box=box.SIMPLE_HEAD, show_footer=len(found.tallies) > 1)
    table.add_column("namespace", "all", overflow="fold")
    fine = {namespace: tally.num_records - tally.faults.total() for namespace, tally in found.tallies.items()}
    totals = [f"{found.num_records:,}", size_text(found.read_bytes), f"{sum(fine.values()):,}"]
    totals += [f"{found.faults[cause]:,}" for cause in causes]
    headings = ["records", "read", "fine", *("other key" if cause is Fault.KEY else str(cause) for cause in causes)]
    for heading, total in zip(headings, totals, strict=True):
        table.add_column(heading, total, justify="right", no_wrap=True)
    for namespace, tally in sorted(found.tallies.items()):
        numbers = [f"{tally.num_records:,}", size_text(tally.read_bytes), f"{fine[namespace]:,}"]
        table.add_row(namespace.hex(), *numbers, *(f"{tally.faults[cause]:,}" for cause in causes))
    return table


def _summary(inspection: Inspection) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("store", str(inspection.folder))
    table.add_row("state", _state(inspection))
    if inspection.durability is not None:
        table.add_row("durability", str(inspection.durability))
    if (content := inspection.content) is not None:
        share = content.stored_bytes / content.capacity_bytes if content.capacity_bytes else 0.0
        table.add_row("records", f"{content.num_records:,}")
        table.add_row(
            "stored", f"{size_text(content.stored_bytes)} of {size_text(content.capacity_bytes)} ({share:.0%})"
        )
    limit = (
        "" if content is None else f", at most {size_text(max_bytes(content.capacity_bytes))} with index and reserve"
    )
    table.add_row("files", f"{size_text(inspection.file_bytes)} of disk space{limit}")
    if content is not None:
        table.add_row("written", f"{size_text(content.written_bytes_total)} in total")
        table.add_row("evicted", f"{content.evicted_total:,} records in total")
    return table


def _namespace_table(uses: Sequence[NamespaceUse]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("namespace", overflow="fold")
    for heading in ("records", "bytes", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    total = sum(use.stored_bytes for use in uses)
    for use in uses:
        share = f"{use.stored_bytes / total:.0%}"
        table.add_row(use.namespace.hex(), f"{use.num_records:,}", size_text(use.stored_bytes), share)
    return table


def _state(inspection: Inspection) -> str:
    return _STATES[inspection.state].format(owner=inspection.owner) + _NEXT_STARTS[inspection.next_start]


def _verification_object(folder: Path, found: Verification) -> dict[str, Any]:
    return {
        "store": str(folder),
        "damage": None,
        "miscount": found.miscount or None,
        "went_back_to_checkpoint": found.was_restored,
        "stored_records": found.num_stored,
        "records": found.num_records,
        "read_bytes": found.read_bytes,
        "seconds": round(found.seconds, 3),
        "faults": _by_name(found.faults),
        "bad": found.num_bad,
        "deleted": found.num_deleted,
        "namespaces": [
            {
                "namespace": namespace.hex(),
                "records": tally.num_records,
                "read_bytes": tally.read_bytes,
                "faults": _by_name(tally.faults),
            }
            for namespace, tally in sorted(found.tallies.items())
        ],
    }


def _by_name(faults: Counter[Fault]) -> dict[str, int]:
    return {str(fault): count for fault, count in faults.items()}


def _inspection_object(inspection: Inspection) -> dict[str, Any]:
    told: dict[str, Any] = {
        "store": str(inspection.folder),
        "damage": None,
        "state": inspection.state,
        "next_start": inspection.next_start,
        "owner_pid": inspection.owner,
        "durability": inspection.durability,
        "file_bytes": inspection.file_bytes,
    }
    if (content := inspection.content) is not None:
        told |= {
            "records": content.num_records,
            "stored_bytes": content.stored_bytes,
            "capacity_bytes": content.capacity_bytes,
            "written_bytes_total": content.written_bytes_total,
            "evicted_total": content.evicted_total,
            "namespaces": [
                {"namespace": use.namespace.hex(), "records": use.num_records, "stored_bytes": use.stored_bytes}
                for use in content.namespaces
            ],
        }
    return told


class _Output(Console):
    """A console that raises BrokenPipeError, as print does, when the reader of standard output has closed the pipe."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _output() -> Console:
    output = _Output()
    return output if output.is_terminal else _Output(width=_OTHER_WIDTH)
