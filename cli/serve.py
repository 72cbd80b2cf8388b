"""The `kvtier serve` command: configuration, API keys, port, signals and log of the server's process."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from kvtier.cli.early_checks import check_device, check_disk, check_files, check_memory, check_model, check_weights
from kvtier.cli.signals import draining_on_signals
from kvtier.cli.stages import IMPORTING, show_stage
from kvtier.engine.config import Config, config_from_dict, is_loopback, load_toml, merge_tables
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.extras import extra
from kvtier.web.api_keys import ApiKeys
from kvtier.web.log_lines import write_log
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators

log = logging.getLogger(__name__)


def serve(model: str, source: str | None, given: Mapping[str, object], checks_only: bool) -> int:
    """Serve *model* until a signal arrives, and return the exit status.

    Raises ValueError or OSError for unusable settings, before anything is loaded.

    Args:
        model: Folder, GGUF file or hub id of the model.
        source: Configuration file, or the name of a shipped configuration. None: the default of each key.
        given: Tables of settings from the command line, which override keys of *source*.
        checks_only: Whether to only print the resulting configuration, and return 2 if the server would refuse it.
    """
    tables = merge_tables({} if source is None else load_toml(source), given)
    config = config_from_dict(tables, source or "config")
    if not checks_only:
        write_log(config.server.log_format)
    keys = None if config.server.api_keys is None else _keys(config.server.api_keys)
    if _asks_to_isolate(given) and keys is None:  # "strict" is also the default, which has no effect without keys
        raise ValueError(
            "--tenant-isolation strict: only API keys define tenants, and none are given; give --api-keys FILE"
        )
    operators = Operators.of(config.operators.tokens, os.environ)
    if operators is not None:
        operators.refuse_keys_of(keys)
    return _check(model, config, keys) if checks_only else _serve(model, config, keys, operators)


def _asks_to_isolate(given: Mapping[str, object]) -> bool:
    server = given.get("server")
    return isinstance(server, dict) and server.get("tenant_isolation") == "strict"


def _keys(file: str) -> ApiKeys:
    return ApiKeys.from_file(Path(file).expanduser())


def _check(model: str, config: Config, keys: ApiKeys | None) -> int:
    check_model(model, show_stage)
    check_memory(config)
    show_stage(IMPORTING)
    from kvtier.server.plan import make_plan  # imported late, so that errors above need not wait for torch

    show_stage(f"computing the sizes for {model}")
    plan = make_plan(model, config, keys)
    for line in plan.lines():
        print(line)
    return 2 if plan.refusals else 0


def _serve(model: str, config: Config, keys: ApiKeys | None, operators: Operators | None) -> int:
    settings = config.server
    check_model(model, log.info)  # checked before torch is imported, so that errors appear at once
    check_weights(model)
    check_device(config)
    check_memory(config)
    check_disk(config)
    check_files(config)
    name = Checkpoint.of(model).served_name
    with _bound(settings.host, settings.port) as bound:
        port = bound.getsockname()[1]
        log.info("listening", extra={"fields": {"host": settings.host, "port": port, "pid": os.getpid()}})
        if keys is None and not is_loopback(settings.host):
            log.warning("without API keys, all clients that reach %s may send requests; give --api-keys", settings.host)
        if asyncio.run(_run(model, settings.model_name or name, config, keys, operators, bound)):
            return 0
    # The thread that loads the model cannot be stopped. It must not run while the interpreter shuts down, so end the
    # process without a shutdown of the interpreter.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _run(
    model: str, name: str, config: Config, keys: ApiKeys | None, operators: Operators | None, bound: socket.socket
) -> bool:
    """Serve until a signal arrives. Return False if it arrived before the model was loaded."""
    with extra("serve", "kvtier serve"):
        from kvtier.server.build_server import build_server
        from kvtier.web.operating.routes import Operating

    settings = config.server
    shows_bars = sys.stderr.isatty() and settings.log_format == "human"
    audit = None if operators is None else AuditLog(config.operators.audit, config.operators.audit_bytes)
    operating = None if operators is None or audit is None else Operating(operators, audit)
    server = build_server(model, config, bound, name, keys, operating=operating, shows_bars=shows_bars)
    loop = asyncio.get_running_loop()

    def read_keys() -> None:
        try:
            read = None if settings.api_keys is None else _keys(settings.api_keys)
            if operators is not None:
                operators.refuse_keys_of(read)
        except (ValueError, OSError) as error:
            log.error("SIGHUP: the API keys are unchanged, because the new file is unusable: %s", error)
            return
        if read is None:
            log.warning("SIGHUP: nothing is reloaded, because the server has no file of API keys")
            return
        server.replace_keys(read)
        log.info("SIGHUP: reloaded the API keys of %d tenants", len(read.tenants))

    before = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(read_keys))
    try:
        with draining_on_signals(server.stop):
            return await server.run()
    finally:
        signal.signal(signal.SIGHUP, before)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while attempting")[0]  # drop "to bind on address ..."
        raise OSError(f"serve: cannot listen on {host}:{port} ({why}); choose another --host or --port") from error
