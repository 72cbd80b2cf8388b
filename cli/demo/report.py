"""Output of `kvtier demo`: its progress on stderr, then a table or one JSON object on stdout."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from kvtier.cli.demo.demo import DemoSettings, Note, Step, default_store, run_demo, usual_length
from kvtier.cli.stages import show_stage

MEANING = {
    "cold": "first question, nothing cached",
    "device": "more questions",
    "host": "after other documents filled the device pool",
    "disk": "after more documents filled host memory",
    "restart": "in a new process",
    "corrupt": "after one byte on disk was flipped",
}


def report(model: str | None, document: str | None, num_tokens: int | None, device: str, as_json: bool) -> int:
    """Run the demo, print its table, and return the exit status.

    The status is 0 if each question got the same answer in all steps and, with the bundled model, all are correct.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the demo shows its own progress
    logging.basicConfig(level=logging.ERROR)
    with default_store() as store, _progress() as note:
        plan = DemoSettings(model, document, num_tokens or usual_length(model, device), store, device)
        steps = run_demo(plan, note)
    if as_json:
        print(msgspec.json.encode({"steps": steps}).decode())
    else:
        output = Console()
        output = output if output.is_terminal else Console(width=100)
        output.print(_table(steps))
        output.print(_legend(steps), highlight=False)
    equal = all(step.answers_equal for step in steps)
    right = model is not None or all(step.answers_correct == step.questions for step in steps)
    if not (equal and right):
        print("kvtier: an answer changed or is wrong; please report this with the output of --json", file=sys.stderr)
    return 0 if equal and right else 1


@contextmanager
def _progress() -> Iterator[Note]:
    """Return a function that shows the progress: in one changing line on a terminal, elsewhere in a line for each step.

    Use it as a context manager, whose end removes the changing line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield show_stage
        return
    with console.status("starting") as status:
        yield status.update


def _table(steps: list[Step]) -> Table:
    table = Table(title="Questions to one document: where the prompt's tokens came from", box=box.SIMPLE_HEAD)
    table.add_column("step", no_wrap=True)
    for heading in ("TTFT", "of cold", "device", "host", "disk", "computed", "right"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("for example", no_wrap=True)
    cold = steps[0].ttft_s
    for step in steps:
        name, answer = next(iter(step.answers.items()))
        tokens = [step.tokens.device, step.tokens.host, step.tokens.disk, step.tokens.recomputed]
        table.add_row(
            step.name,
            f"{1000 * step.ttft_s:,.0f} ms",
            f"1/{cold / step.ttft_s:.0f}" if step.ttft_s < cold / 1.5 else f"{step.ttft_s / cold:.2f}",
            *(f"{count:,}" if count else "·" for count in tokens),
            f"{step.answers_correct} of {step.questions}",
            f"{name}: {answer[:24]}",
        )
    return table


def _legend(steps: list[Step]) -> str:
    lines = [f"  {step.name:8}{MEANING[step.name]}" for step in steps]
    num_corrupt = sum(step.corrupt_blocks for step in steps)
    return "\n".join([*lines, f"  {num_corrupt} corrupt block found and recomputed; TTFT: time to first token"])
