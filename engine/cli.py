"""The command `kvtier`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

EXAMPLES = """examples:
  kvtier demo                                  the bundled model, offline, on the CPU; about a minute
  kvtier demo --tokens 16000                   a longer document
  kvtier demo --model Qwen/Qwen3-0.6B --device cuda --document report.txt
  kvtier demo --json > demo.json               one JSON object, for scripts
"""


class _OneLineParser(argparse.ArgumentParser):
    """Says a mistake in one line, as everything else here does; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvtier: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. A mistake of the user's is one line that says what to do."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("kvtier: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        print(f"kvtier: {message[0]}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="kvtier",
        description="Tiered KV-cache offload for LLM inference: device, host memory, disk; every load verified.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="ask many questions of a long document and see which tier answers",
        description="Asks questions of one long document: cold, from the device pool, from host memory, from disk, "
        "from disk in a new process, and with one damaged byte on disk. Prints answers, time to first token (TTFT) "
        "and where the prompt's tokens came from.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--model", metavar="PATH_OR_HUB_ID", help="a transformers causal LM; default: a bundled one")
    demo.add_argument("--document", metavar="FILE", help="a text to ask about; facts to ask for are woven into it")
    demo.add_argument("--tokens", type=int, default=10_000, metavar="N", help="length of the made document (10000)")
    demo.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda for --model only")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    # Imported here: torch and transformers take seconds, which `kvtier --help` need not.
    from kvtier.engine.demo_report import report

    # Ended from outside it cleans up as with Ctrl-C: its store is a temporary folder of some hundred megabytes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.tokens < 1000:
        raise ValueError(f"--tokens {options.tokens}: too short to show anything; use 1000 or more")
    return report(options.model, options.document, options.tokens, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
