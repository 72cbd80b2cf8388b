"""The arguments of `kvtier sidecar` and their validation."""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.cli.arguments import HelpFormatter, folder_and_size, remote_url, size

EXAMPLES = """examples:
  kvtier sidecar --host-memory 32GiB --disk ~/.cache/kvtier-sidecar:500GiB
  kvtier sidecar --config sidecar.toml --check-config     print the resulting configuration and the engines' commands
  kvtier sidecar --host-memory 8GiB --listen ipc:///run/user/1000/lmcache.sock

The sidecar prints the commands that attach engines: vLLM with kvtier's connector, kvtier serve, and vLLM with LMCache's
client. Engines of one model and one kind of command share their blocks.

signals: SIGTERM and Ctrl-C write chunks to disk that are only in host memory, and stop the sidecar; a second signal
stops it at once.

exit status: 0 stopped by a signal, or --check-config found no error; 2 the sidecar could not start
"""


def add_sidecar(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier sidecar`, which calls *run*."""
    sidecar = commands.add_parser(
        "sidecar",
        help="keep the KV cache of attached engines, such as vLLM, in host memory and on disk",
        description="Keeps the KV cache of the engines on this machine in host memory and on disk, in a separate "
        "process. Engines attach by configuration. They share cached blocks, and find them again after a restart.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    sidecar.add_argument("--config", metavar="FILE", help="a TOML file; options override it (default: none)")
    sidecar.add_argument(
        "--host-memory", type=size, metavar="SIZE", help="size of host memory, in /dev/shm (default: 4GiB)"
    )
    sidecar.add_argument("--host", dest="host_memory", type=size, help=argparse.SUPPRESS)  # the option's former name
    sidecar.add_argument(
        "--disk",
        type=folder_and_size,
        metavar="PATH:SIZE",
        help="folder and maximum size of the disk tier (default: no disk)",
    )
    sidecar.add_argument(
        "--remote",
        type=remote_url,
        metavar="URL",
        help="a store shared by machines, such as redis://cache:6379 or s3://bucket/prefix (default: none)",
    )
    sidecar.add_argument(
        "--socket",
        metavar="PATH",
        help="Unix socket to which vLLM (with kvtier's connector) and 'kvtier serve' attach; none: no socket (default: "
        "kvtier.sock in $XDG_RUNTIME_DIR, or else in /run)",
    )
    sidecar.add_argument(
        "--listen",
        type=_endpoint,
        metavar="ENDPOINT",
        help="address for vLLM with LMCache's client (default: tcp://127.0.0.1:5555)",
    )
    sidecar.add_argument(
        "--chunk-tokens",
        type=_chunk_tokens,
        metavar="N",
        help="tokens per chunk, the unit that LMCache's client stores and loads (default: 256)",
    )
    sidecar.add_argument(
        "--http-port", type=_port, metavar="PORT", help='HTTP port on this machine, or "none" (default: 9464)'
    )
    sidecar.add_argument(
        "--request-log",
        metavar="FILE",
        help="file for one JSON line per lookup, with names and numbers but no text, to replay later (default: none)",
    )
    sidecar.add_argument("--log-format", choices=["human", "json"], help="json: one object per line (default: human)")
    sidecar.add_argument("--check-config", action="store_true", help="print the resulting configuration and exit")
    sidecar.set_defaults(run=run)


def given_tables(options: argparse.Namespace) -> Mapping[str, object]:
    """Return the options that were given, as tables of `SidecarConfig`."""
    lmcache = {"listen": options.listen, "chunk_tokens": options.chunk_tokens}
    tables: dict[str, object] = {
        "host": None if options.host_memory is None else {"capacity": options.host_memory},
        "disk": options.disk,
        "remote": None if options.remote is None else {"url": options.remote},
        "socket": None if options.socket is None else {"path": options.socket},
        "lmcache": {key: value for key, value in lmcache.items() if value is not None} or None,
        "http": None if options.http_port is None else {"port": options.http_port},
        "request_log": None if options.request_log is None else {"path": options.request_log},
        "log_format": options.log_format,
    }
    return {table: values for table, values in tables.items() if values is not None}


def _endpoint(text: str) -> str:
    tcp = re.fullmatch(r"tcp://.+:([0-9]{1,5})", text)
    if not (int(tcp[1]) < 1 << 16 if tcp else text.startswith("ipc:///")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an endpoint; give tcp://127.0.0.1:PORT, or ipc:///PATH")
    return text


def _chunk_tokens(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; give a multiple of the engine's block size, such as 256"
        )
    return int(text)


def _port(text: str) -> int | str:
    if text != "none" and not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f'{text!r} is not a port; give 0 to 65535 (0: any free port), or "none"')
    return text if text == "none" else int(text)
