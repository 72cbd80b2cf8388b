"""Benchmarks of several questions behind one command: each has a name, and may be asked alone."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.report import Row

Ask = Callable[..., list[Row]]
"""Answers a question: given how much to do, the values that all questions get, and an empty folder, last."""


def parsed(parser: argparse.ArgumentParser, questions: Mapping[str, Ask]) -> argparse.Namespace:
    """The command line, whose `questions` are names of these; it ends the program for another."""
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(questions)}; all by default")
    options = parser.parse_args()
    unknown = set(options.questions) - set(questions)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: use {', '.join(questions)}")
    return options


def answers(options: argparse.Namespace, questions: Mapping[str, Ask], *given: object) -> list[Row]:
    """The rows of the questions that were asked, in the order of *questions*, each with a folder of its own."""
    rows: list[Row] = []
    for name, question in questions.items():
        if not options.questions or name in options.questions:
            with tempfile.TemporaryDirectory() as folder:
                rows += question(options.effort, *given, Path(folder))
    return rows
