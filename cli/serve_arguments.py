"""The arguments of `kvtier serve` and their validation."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from kvtier.cli.arguments import (
    MODELS,
    HelpFormatter,
    add_allowed_hosts,
    folder_and_size,
    nonempty_text,
    remote_url,
    size,
)
from kvtier.engine.config import ToolCallParser

EXAMPLES = """examples:
  kvtier serve --model Qwen/Qwen3-0.6B --config laptop
  kvtier serve Qwen/Qwen3-0.6B --device-memory 2GiB --host-memory 16GiB --disk ~/.cache/kvtier:200GiB
  kvtier serve Qwen/Qwen3-8B --gpu-memory-utilization 0.9 --host-memory 64GiB
  kvtier serve Qwen/Qwen3-8B --host-memory 64GiB --remote redis+cluster://cache-0:6379,cache-1:6379
  kvtier serve --model smollm2.gguf --check-config
  kvtier serve --model ./my-model --config kvtier.toml --check-config
  kvtier serve --model Qwen/Qwen3-0.6B --sidecar unix:///run/user/1000/kvtier.sock
  kvtier serve --model Qwen/Qwen3-0.6B --api-keys keys.toml --host 0.0.0.0 --log-format json

then:
  curl localhost:8000/v1/completions -d '{"model": "Qwen/Qwen3-0.6B", "prompt": "The capital of France is"}'

routes: /v1/completions, /v1/chat/completions, /v1/messages, /v1/models, /health, /ready, /metrics, /version, and
kvtier's own routes below /v1/kvtier/

Options override the configuration file.

signals: SIGTERM and Ctrl-C let running requests finish, write cached blocks to disk and stop the server; a second
signal stops it at once. SIGHUP reloads the file of API keys.

exit status: 0 stopped by a signal, or --check-config found no error; 2 the server could not start
"""
_MAX_PORT = 65535
_MAX_BLOCK_SIZE = 1024  # same limit as in the configuration
_OF_SERVER = (
    "host",
    "port",
    "model_name",
    "api_keys",
    "tenant_isolation",
    "allowed_hosts",
    "log_format",
    "tool_call_parser",
)


def add_serve(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier serve`, which calls *run*."""
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description="Serves a model over HTTP with OpenAI's API, and keeps the documents of 'kvtier doc' warm.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    serve.add_argument("model", nargs="?", type=nonempty_text, metavar="MODEL", help=MODELS)
    serve.add_argument(
        "--model",
        dest="named_model",
        type=nonempty_text,
        metavar="MODEL",
        help="another way to give the model (default: the argument MODEL)",
    )
    serve.add_argument(
        "--config",
        metavar="FILE_OR_NAME",
        help="a TOML file, or the name of a shipped configuration: laptop, longdoc-qa or gpu-8gb (default: the default "
        "of every key, without a disk tier)",
    )
    _add_tiers(serve)
    serve.add_argument(
        "--sidecar",
        type=nonempty_text,
        metavar="ADDRESS",
        help="use the host and disk tiers of the 'kvtier sidecar' at this socket, unix:///PATH (default: none)",
    )
    serve.add_argument(
        "--host", type=_address, metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    serve.add_argument("--port", type=_port, metavar="N", help="port to listen on; 0: any free port (default: 8000)")
    serve.add_argument(
        "--model-name",
        "--served-model-name",
        type=nonempty_text,
        metavar="NAME",
        help="name of the model in the API (default: its folder, file or hub id)",
    )
    serve.add_argument(
        "--lora",
        action="append",
        default=[],
        type=_adapter,
        metavar="NAME=FOLDER",
        help="serve a peft adapter as model NAME; may be repeated (default: none)",
    )
    serve.add_argument(
        "--api-keys",
        type=nonempty_text,
        metavar="FILE",
        help='TOML or JSON file with a table [keys] of "KEY" = "tenant" (default: requests need no key)',
    )
    add_allowed_hosts(serve)
    serve.add_argument(
        "--tenant-isolation",
        choices=["off", "strict"],
        help="strict: tenants share no cached blocks; off: they share blocks of requests without a cache_salt "
        "(default: strict)",
    )
    serve.add_argument(
        "--request-log",
        type=nonempty_text,
        metavar="FILE",
        help="file for one JSON line per request, with names and numbers but no text, to replay later (default: none)",
    )
    serve.add_argument("--log-format", choices=["human", "json"], help="json: one object per line (default: human)")
    serve.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        help="default sampling parameters; auto: those of the model, none: those of OpenAI's API (default: auto)",
    )
    serve.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParser),
        help="the model's format of tool calls (default: detected from its chat template)",
    )
    serve.add_argument("--check-config", action="store_true", help="print the resulting configuration and exit")
    serve.set_defaults(run=run)


def _add_tiers(serve: argparse.ArgumentParser) -> None:
    """Add options for the most common settings of [device], [host], [disk] and [remote]."""
    serve.add_argument(
        "--block-size",
        type=_block_size,
        metavar="TOKENS",
        help="tokens per block; stored blocks of another size cannot be reused (default: 32)",
    )
    pool = serve.add_mutually_exclusive_group()
    pool.add_argument(
        "--device-memory", type=_memory, metavar="SIZE", help="size of the KV pool on the device (default: 1GiB)"
    )
    pool.add_argument(
        "--gpu-memory-utilization",
        type=_fraction,
        metavar="FRACTION",
        help="as in vLLM: fraction of the GPU's memory for weights, computation and KV pool together (default: use "
        "--device-memory)",
    )
    serve.add_argument(
        "--host-memory", type=size, metavar="SIZE", help="size of the host memory tier, 0: none (default: 4GiB)"
    )
    serve.add_argument(
        "--disk",
        type=folder_and_size,
        metavar="PATH:SIZE",
        help="folder and maximum size of the disk tier (default: none)",
    )
    serve.add_argument(
        "--remote",
        type=remote_url,
        metavar="URL",
        help="a store shared by machines, such as redis://cache:6379 or s3://bucket/prefix (default: none)",
    )


def model_of(options: argparse.Namespace) -> str:
    """Return the model, given with or without --model. Raise ValueError if none or two are given."""
    named = {model for model in (options.model, options.named_model) if model is not None}
    if len(named) > 1:
        raise ValueError(f"serve: two models, {options.model} and {options.named_model}; start a server for each")
    if not named:
        raise ValueError("serve: no model; name one, as in 'kvtier serve --model Qwen/Qwen3-0.6B'")
    return str(named.pop())


def given_tables(options: argparse.Namespace) -> Mapping[str, object]:
    """Return the options that were given, as tables of `Config`. Raise ValueError if options contradict each other."""
    server = {name: value for name in _OF_SERVER if (value := getattr(options, name)) is not None}
    own = {"--host-memory": options.host_memory, "--disk": options.disk, "--remote": options.remote}
    if options.sidecar is not None and any(own.values()):
        one = next(name for name, given in own.items() if given)
        raise ValueError(
            f"{one}: the sidecar has the tiers below the device; give {one} to 'kvtier sidecar', or omit --sidecar"
        )
    tables: dict[str, object] = {
        "device": _device(options) or None,
        "host": None if options.host_memory is None else {"capacity": options.host_memory},
        "disk": options.disk,
        "remote": None if options.remote is None else {"url": options.remote},
        "sidecar": options.sidecar,
        "server": server or None,
        "lora": _adapters(options.lora) or None,
        "request_log": None if options.request_log is None else {"path": options.request_log},
        "model": None if options.generation_config is None else {"generation_config": options.generation_config},
    }
    return {table: values for table, values in tables.items() if values is not None}


def _device(options: argparse.Namespace) -> Mapping[str, object]:
    given: dict[str, object] = {} if options.block_size is None else {"block_size": options.block_size}
    if options.device_memory is not None:  # it must override gpu_memory_utilization in the file, not only capacity
        given |= {"capacity": options.device_memory, "gpu_memory_utilization": None}
    if options.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = options.gpu_memory_utilization
    return given


def _adapters(given: Sequence[tuple[str, str]]) -> Mapping[str, object]:
    adapters: dict[str, object] = {}
    for name, folder in given:
        if name in adapters:
            raise ValueError(f"--lora {name}: is given twice; give each adapter a name of its own")
        adapters[name] = {"path": folder}
    return adapters


def _address(text: str) -> str:
    if re.fullmatch(r"[0-9.]+ ?[KMGT]i?B", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a size, not an address; give the size of host memory as --host-memory"
        )
    return nonempty_text(text)


def _memory(text: str) -> int:
    if not (num_bytes := size(text)):
        raise argparse.ArgumentTypeError(f"{text!r} holds no block; give a size such as 1GiB")
    return num_bytes


def _block_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_BLOCK_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from 1 to {_MAX_BLOCK_SIZE}; common sizes are 16 and 32"
        )
    return int(text)


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a fraction of the GPU's memory above 0 and at most 1; give one, such as 0.9"
        )
    return fraction


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to {_MAX_PORT}")
    return int(text)


def _adapter(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER; write it as legal=adapters/legal")
    return name, folder
