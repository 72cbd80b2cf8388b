"""Input of commands: text or tokens from files that options name, and confirmations from the terminal."""

import sys
from pathlib import Path

from rich.console import Console, RenderableType


def text_of(option: str, file: str) -> str:
    """Return the text of *file*, or of standard input if *file* is "-".

    Raises OSError if the file cannot be read, and ValueError if it is not UTF-8 text. Both errors name the *option*.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        return content.decode()
    except OSError as error:
        raise OSError(f"{option} {file}: {error.strerror}; give a file that can be read") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {file}: is not UTF-8 text; convert it first") from None


def token_of(file: str) -> str:
    """Return the token in *file*, the value of --token-file.

    Raises ValueError if *file* is empty, and the errors of `text_of`.
    """
    token = text_of("--token-file", file).strip()
    if not token:
        raise ValueError(f"--token-file {file}: is empty; give a file that contains the token")
    return token


def confirm(question: str, about: RenderableType | None = None) -> None:
    """Show *about* and ask *question*. Raise RuntimeError if the answer is not yes, or if there is no terminal."""
    if not sys.stdin.isatty():
        raise RuntimeError(f"{question} there is no terminal to ask on; add --yes")
    if about is not None:
        Console(stderr=True).print(about)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RuntimeError("nothing was deleted")
