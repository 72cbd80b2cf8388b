"""What the examples share: the options that name a server, errors in one line, and where a prompt's tokens came from.

Start a server first:

    kvtier serve --model smollm2 --config laptop
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

# What to install for a package, where it is not in the extra "examples".
INSTALLED_BY = {"ray": "'.[ray]'", "llama_index": "llama-index-llms-openai-like", "kvtier": "'.[real]'"}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that name the server and the model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="address of the server (%(default)s)"
    )
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="the model's name there (%(default)s)")
    parser.add_argument(
        "--api-key", default="none", metavar="KEY", help="an API key, if the server requires one (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="maximum length of an answer (%(default)s)"
    )
    return parser


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file. Raise SystemExit if it holds something else."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SystemExit(f"{file}: this is not a text file in UTF-8; give a text file") from None


def origin(kvtier: Mapping[str, Any]) -> str:
    """Return the field `kvtier` of an answer in words: the tiers that the prompt's tokens came from, and the TTFT."""
    tokens = [f"{count:,} {tier}" for tier, count in kvtier["tokens"].items() if count]
    return f"[{', '.join(tokens)}; first token after {kvtier['ttft_s']:.2f} s]"


def advice(error: BaseException) -> str | None:
    """Return one line about an error that a user can mend; None for any other error.

    Clients are recognized by the names of their error classes, because only one of them is imported.
    """
    body = getattr(error, "body", None)
    if isinstance(error, ModuleNotFoundError):
        needed = INSTALLED_BY.get(f"{error.name}".partition(".")[0], "'.[examples]'")
        return f"the Python package {error.name} is not installed; run: pip install {needed}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if {"APIConnectionError", "ConnectError"} & {kind.__name__ for kind in type(error).__mro__}:
        address = getattr(getattr(error, "request", None), "url", "this address")
        return f"no server answers at {address}; start one with: kvtier serve --model smollm2 --config laptop"
    if hasattr(error, "status_code"):  # the server refused the request
        said = body.get("error", body) if isinstance(body, dict) else {}
        text = said.get("message") if isinstance(said, dict) else None
        return f"the server answered {error.status_code}: {text or error}"
    return None


def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one line for an error that a user can mend, and the traceback of any other."""
    said = advice(error)
    if issubclass(kind, KeyboardInterrupt):
        return
    if said is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(said, file=sys.stderr)


sys.excepthook = report
