"""The `kvtier prove` command, which tests a server and prints what came from its cache and whether it was correct."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtier.cli.prove.endpoint import Endpoint
from kvtier.cli.prove.judgement import Finding, ProofRow, Verdict
from kvtier.cli.prove.proof import Proof, ProofConfig, prove
from kvtier.cli.prove.push_out import EvictionStep
from kvtier.cli.stages import show_stage

_OTHER_WIDTH = 120  # width, in columns, of output that does not go to a terminal
_MAX_FINDINGS = 12  # max number of findings to print; --json has all
_STATUS = {Verdict.PROVEN: 0, Verdict.WRONG: 1, Verdict.UNPROVEN: 2}
_STYLE = {Verdict.PROVEN: "green", Verdict.WRONG: "bold red", Verdict.UNPROVEN: "yellow"}


def run(options: argparse.Namespace) -> int:
    """Test the server, print the result, and return the exit status. Raises the errors of `prove`."""
    proof = _proved(_order(options))
    if options.json:
        print(json.dumps(_object(proof)))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_OTHER_WIDTH)
        _print(console, proof)
    return _STATUS[proof.judgement.verdict]


def _order(options: argparse.Namespace) -> ProofConfig:
    key = options.api_key or os.environ.get("KVTIER_API_KEY")
    push_out = None
    if options.evict is not None or options.between is not None:
        push_out = EvictionStep(options.evict or 0, options.between)
    return ProofConfig(
        endpoint=Endpoint(options.url, key),
        other=None if options.other_url is None else Endpoint(options.other_url, key),
        model=options.model,
        adapters=options.adapter,
        lengths=options.lengths,
        num_rounds=options.rounds,
        concurrency=options.concurrency,
        push_out=push_out,
        seed=options.seed,
    )


def _proved(order: ProofConfig) -> Proof:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        stages = _Stages()
        return prove(order, stages.note)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def note(what: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=what, completed=num_done, total=num_all)

        return prove(order, note)


class _Stages:
    """The progress as lines on stderr: one for each stage, and one for each tenth of its requests."""

    def __init__(self) -> None:
        self._shown = ("", 0)

    def note(self, stage: str, num_done: int, num_all: int) -> None:
        """Show the *stage* if it is new, or if another tenth of it is done."""
        latest = (stage, 10 * num_done // max(1, num_all))
        if latest != self._shown:
            self._shown = latest
            show_stage(f"{stage}, {num_done:,} of {num_all:,}" if num_done else stage)


def _print(console: Console, proof: Proof) -> None:
    measures, judgement = proof.measures, proof.judgement
    console.print(_table(judgement.rows))
    noise = "not measured" if measures.noise is None else f"{measures.noise:.2g}"
    console.print(
        Text(
            "off: the largest difference in log probability from answers to the same prompt without the cache. Noise "
            f"among those answers: {noise}. An answer is wrong if off is more than {measures.bound:.2g}. TTFT: time to "
            "first token."
        )
    )
    for finding in judgement.findings[:_MAX_FINDINGS]:
        console.print(Text(f"WRONG {_place(finding)}: {finding.what}", style=_STYLE[Verdict.WRONG]))
    if len(judgement.findings) > _MAX_FINDINGS:
        console.print(Text(f"… and {len(judgement.findings) - _MAX_FINDINGS} more; use --json to see all"))
    if proof.doubts:
        console.print(Text("\nWhat this run cannot tell:"))
        for doubt in proof.doubts:
            console.print(Text(f"- {doubt}"))
    console.print(Text(f"\n{_conclusion(proof)}", style=_STYLE[judgement.verdict]))


def _table(rows: Sequence[ProofRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "asked", "cached", "TTFT computed", "TTFT", "off"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    length = rows[0].length if rows else 0
    for row in rows:
        if row.length != length:
            table.add_section()
            length = row.length
        verdict = f"{row.verdict}: {row.why}" if row.why else str(row.verdict)
        table.add_row(
            Text(row.family),
            f"{row.length:,}",
            f"{row.num_asked:,}",
            "?" if row.cached_tokens is None else f"{row.cached_tokens:,.0f}",
            _milliseconds(row.computed_ttft_s),
            _milliseconds(row.ttft_s),
            "?" if row.apart is None else f"{row.apart:.2g}",
            Text(verdict, style=_STYLE[row.verdict]),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:,.0f} ms"


def _place(finding: Finding) -> str:
    asked = finding.asked
    how = "alone" if asked.is_alone else "concurrent"
    if finding.question is None:
        return f"{asked.request.asker.name}, {len(asked.request.pieces):,} tokens or words without a shared prefix"
    return f"{finding.question.family}, {finding.question.length:,} tokens, {how}"


def _conclusion(proof: Proof) -> str:
    judgement = proof.judgement
    if judgement.verdict is Verdict.WRONG:
        return f"wrong: {len(judgement.findings):,} findings; --json has their prompts"
    if judgement.verdict is Verdict.UNPROVEN:
        return "unproven: no wrong answer was found, but no answer that came from a cache could be compared"
    num_asked = sum(row.num_asked for row in judgement.rows if row.verdict is Verdict.PROVEN)
    return f"proven, as far as this test can tell: {num_asked:,} answers match those computed without the cache"


def _object(proof: Proof) -> dict[str, object]:
    """Return the report as one JSON object, with None for infinite numbers."""
    measures, judgement = proof.measures, proof.judgement
    return {
        "verdict": judgement.verdict,
        "askers": [{"name": each.name, "url": each.endpoint.url, "model": each.model} for each in proof.askers],
        "noise": _finite(measures.noise),
        "bound": _finite(measures.bound),
        "rows": [
            {
                "prompt": row.family,
                "tokens": row.length,
                "asked": row.num_asked,
                "cached_tokens": row.cached_tokens,
                "computed_ttft_s": row.computed_ttft_s,
                "ttft_s": row.ttft_s,
                "off": _finite(row.apart),
                "verdict": row.verdict,
                "why": row.why,
            }
            for row in judgement.rows
        ],
        "findings": list(_findings(proof)),
        "doubts": list(proof.doubts),
    }


def _findings(proof: Proof) -> Iterator[dict[str, object]]:
    for finding in proof.judgement.findings:
        asked, question = finding.asked, finding.question
        request = asked.request
        references = proof.measures.references(request.asker, request.pieces)
        yield {
            "where": _place(finding),
            "what": finding.what,
            "asker": request.asker.name,
            "cache_salt": request.salt,
            "cached_tokens": asked.answer.cached_tokens,
            "earlier": None if question is None else proof.writing.write(question.pair.earlier),
            "prompt": proof.writing.write(request.pieces),
            "answer": asked.answer.text,
            "computed": sorted({reference.answer.text for reference in references}),
        }


def _finite(number: float | None) -> float | None:
    return None if number is None or number == float("inf") else number
