"""The construction of a sidecar: the one place where its parts are created and connected."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvtier.engine.config import DiskConfig
from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.records.request_log import open_request_log
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.stores.disk_store import BACKGROUND_NICENESS, codec_of_others, store_settings
from kvtier.engine.stores.remote_store import open_remote
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.sidecar.config import SidecarConfig
from kvtier.sidecar.endpoint import Endpoint
from kvtier.sidecar.finished_transfers import FinishedTransfers
from kvtier.sidecar.layouts import READ_TIMEOUT_S, Layouts
from kvtier.sidecar.lease_ledger import LeaseLedger, ledger_bytes, why_not_taken_over
from kvtier.sidecar.sidecar import DriveLife, Sidecar
from kvtier.store.process.channel import SharedMemory
from kvtier.store.process.store_process import SWITCH_INTERVAL_S
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.transfer.lane import Lane, ThreadLane
from kvtier.transfer.segment import Segment, discard_handover, handover_error, name_of
from kvtier.transfer.transfer_engine import Route, TransferEngine

log = logging.getLogger(__name__)

NUM_READERS = 4  # concurrent reads from disk
NUM_WRITERS = 3  # two writes in progress, and one that gathers blocks behind them
NUM_CHECKERS = 2  # threads that verify chunks before engines read them; as many more compute digests of new chunks
OPENING_WAIT_S = 5.0  # longest wait for the disk before engines may attach; if it opens later, it is used from then on

MakeEndpoints = Callable[[Layouts, TransferEngine], Sequence[Endpoint]]


def build_sidecar(
    config: SidecarConfig,
    make_endpoints: MakeEndpoints,
    progress: Callable[[str], None] = lambda line: None,
    left: int | None = None,
) -> Sidecar:
    """Create a sidecar.

    Args:
        config: The sidecar's configuration.
        make_endpoints: Creates the sockets at which engines attach.
        progress: Called with a line of text about each slow step.
        left: File descriptor of the previous process's segment (shared memory), if there is one. The segment is
            reused if possible. Otherwise, the descriptor is closed.

    Raises:
        OSError: A part of the sidecar cannot be created. The message says what to do.
        ValueError: A setting cannot be used. The message says what to do.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    with ExitStack() as undo:
        num_extents = config.host.capacity // config.extent
        segment = _segment(config.extent, num_extents, left, progress)
        undo.callback(segment.close)
        ledger = LeaseLedger(segment.beside, config.extent, num_extents)
        if ledger.left_out:
            progress(
                f"host memory: {len(ledger.left_out)} of {num_extents} extents are not used, because engines may still "
                "copy from or to them"
            )
        store = None
        if config.disk is not None:
            progress(f"opening the store {config.disk.path}")
            store = _open_store(config, config.disk, segment)
            undo.callback(store.close)
            store.wait_opened(OPENING_WAIT_S)
        finished = FinishedTransfers()
        remote = None if config.remote is None else open_remote(config.remote, finished)
        if remote is not None:
            undo.callback(remote.close)
        transfers = TransferEngine(_lanes(finished) | ({} if remote is None else remote.lanes()), finished)
        undo.callback(transfers.close)
        request_log = open_request_log(config.request_log)
        if request_log is not None:
            undo.callback(request_log.close)
        tracer = Tracer.of(config.tracing, "kvtier-sidecar")
        if tracer is not None:
            undo.callback(tracer.close)
        layouts = Layouts(
            segment,
            transfers,
            store,
            lambda: 0 if store is None else store.opening(),
            time.monotonic,
            extent_bytes=config.extent,
            quotas={tenant_of(salt): each.host for salt, each in config.tenants.items() if each.host is not None},
            written_bytes_per_day=None if config.disk is None else config.disk.max_written_bytes_per_day,
            read_timeout_s=READ_TIMEOUT_S if config.disk is None else config.disk.read_timeout_s,
            make_remote=(lambda namespace: None) if remote is None else remote.tier,
            ledger=ledger,
            seen=None if config.disk is None else _beside(Path(config.disk.path)),
            records=RecentRecords(
                [] if tracer is None else [tracer.on_record], [] if request_log is None else [request_log.on_record]
            ),
            tracer=tracer,
        )
        life = None
        if store is not None and config.disk is not None and config.disk.endurance is not None:
            life = DriveLife(config.disk.endurance, store)
        sidecar = Sidecar(
            segment,
            finished,
            transfers,
            layouts,
            make_endpoints(layouts, transfers),
            store,
            life,
            request_log,
            tracer,
            remote=remote,
        )
        undo.pop_all()
    return sidecar


def _beside(store: Path) -> Path:
    return store.with_name(f"{store.name}-seen")


def _segment(extent_bytes: int, num_extents: int, left: int | None, progress: Callable[[str], None]) -> Segment:
    """Return the segment that the previous process left if it can be reused, or else a new one."""
    if left is not None:
        why = handover_error(left) or why_not_taken_over(left, extent_bytes, num_extents)
        if not why:
            progress(f"host memory: {name_of(left)} of the previous process is taken over, without its content")
        else:
            log.warning(
                "host: the previous process's shared memory is not taken over: %s; new memory is allocated", why
            )
            discard_handover(left)
            left = None
    if left is None:
        progress(f"host memory: {num_extents * extent_bytes >> 20} MiB")
    return Segment(num_extents * extent_bytes, num_beside=ledger_bytes(num_extents), left=left)


def _lanes(finished: FinishedTransfers) -> dict[Route, Lane]:
    return {
        Route.HOST_TO_DISK: ThreadLane(finished, "store", num_threads=NUM_WRITERS),
        Route.DISK_TO_HOST: ThreadLane(finished, "load", num_threads=NUM_READERS),
        Route.DEVICE_TO_HOST: ThreadLane(finished, "digest", num_threads=NUM_CHECKERS),
        Route.HOST_TO_DEVICE: ThreadLane(finished, "verify", num_threads=NUM_CHECKERS),
    }


def _open_store(config: SidecarConfig, disk: DiskConfig, segment: Segment) -> ReopeningStore:
    settings = store_settings(disk, codec_of_others(disk), config.tenants, writer_niceness=BACKGROUND_NICENESS)
    return ReopeningStore(settings, [SharedMemory(*segment.span)])
