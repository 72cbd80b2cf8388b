"""Confirmation on the terminal before a command deletes data."""

import sys

from rich.console import Console, RenderableType


def confirm(question: str, about: RenderableType | None = None) -> None:
    """Show *about* and ask *question*. Raise RuntimeError if the answer is not yes, or if there is no terminal."""
    if not sys.stdin.isatty():
        raise RuntimeError(f"{question} there is no terminal to ask on; add --yes")
    if about is not None:
        Console(stderr=True).print(about)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RuntimeError("nothing was deleted")
