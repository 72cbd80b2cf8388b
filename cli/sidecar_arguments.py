"""The command line of `kvtier sidecar`."""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.cli.arguments import HelpFormatter, folder_and_size, remote_url, size

EXAMPLES = """examples:
  kvtier sidecar --host 32GiB --disk ~/.cache/kvtier-sidecar:500GiB
  kvtier sidecar --config sidecar.toml --check-config     what the configuration comes to, and the engine's command
  kvtier sidecar --host 8GiB --listen ipc:///run/user/1000/lmcache.sock

It prints the command with which vLLM attaches. A second engine with the same command shares what the first has cached.

exit status: 0 it was told to end, 2 it could not serve
"""


def add_sidecar(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command to argparse's *commands*; *run* carries it out."""
    sidecar = commands.add_parser(
        "sidecar",
        help="host memory and disk for engines that attach to it, such as vLLM",
        description="Keep the KV cache of engines on this machine in host memory and on disk, in a process of its own: "
        "engines attach by configuration, share what they have cached, and find it again after they were restarted.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    sidecar.add_argument("--config", metavar="FILE", help="a TOML file; the options below count more (default: none)")
    sidecar.add_argument(
        "--host", "--host-memory", type=size, metavar="SIZE", help="host memory, in /dev/shm (default: 4GiB)"
    )
    sidecar.add_argument(
        "--disk",
        type=folder_and_size,
        metavar="PATH:SIZE",
        help="a folder, and how large it may become (default: no disk)",
    )
    sidecar.add_argument(
        "--remote",
        type=remote_url,
        metavar="URL",
        help="a store that machines share, as redis://cache:6379 or s3://bucket/prefix (default: none)",
    )
    sidecar.add_argument(
        "--socket",
        metavar="PATH",
        help='where kvtier\'s own engines attach, or "none" (default: $XDG_RUNTIME_DIR/kvtier.sock, or in /run)',
    )
    sidecar.add_argument(
        "--listen", type=_endpoint, metavar="ENDPOINT", help="where vLLM attaches (default: tcp://127.0.0.1:5555)"
    )
    sidecar.add_argument("--chunk-tokens", type=_chunk_tokens, metavar="N", help="tokens of a chunk (default: 256)")
    sidecar.add_argument(
        "--http-port", type=_port, metavar="PORT", help='of HTTP on this machine, or "none" (default: 9464)'
    )
    sidecar.add_argument(
        "--request-log",
        metavar="FILE",
        help="a line of JSON for each lookup of engines, in names and numbers, for replays (default: none)",
    )
    sidecar.add_argument("--log-format", choices=["human", "json"], help="json: one object a line (default: human)")
    sidecar.add_argument("--check-config", action="store_true", help="print what the configuration comes to, and end")
    sidecar.set_defaults(run=run)


def given_tables(options: argparse.Namespace) -> Mapping[str, object]:
    """The options that were given, as tables of `SidecarConfig`."""
    lmcache = {"listen": options.listen, "chunk_tokens": options.chunk_tokens}
    tables: dict[str, object] = {
        "host": None if options.host is None else {"capacity": options.host},
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
        raise argparse.ArgumentTypeError(f"{text!r} is no endpoint; give tcp://127.0.0.1:PORT, or ipc:///PATH")
    return text


def _chunk_tokens(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give a multiple of the engine's block size, as 256")
    return int(text)


def _port(text: str) -> int | str:
    if text != "none" and not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f'{text!r} is no port; give 0 to 65535 (0: a free one), or "none"')
    return text if text == "none" else int(text)
