"""Metrics of the disk tier, for engines and sidecars."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvtier.engine.observability.metrics import names
from kvtier.engine.stores.reopening_store import StoreStanding, WhyClosed
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.statistics import DiskStatistics


def disk_metrics(disk: DiskStatistics) -> Iterator[Metric]:
    """Yield the metrics that only a disk tier has."""
    yield names.DISK_FILE_BYTES.of(disk.file_bytes)
    yield names.DISK_WRITTEN_BYTES.of(disk.written_bytes_total)
    yield names.DISK_INDEX_BLOCKS.of(disk.known_blocks)
    yield names.DISK_INDEX_LOADED.of(disk.is_indexed)
    yield names.DISK_BREAKER.by(
        {(side, state): state is now for side, now in disk.breakers.items() for state in BreakerState}
    )
    yield names.DISK_BREAKER_OPENED.by(disk.num_opened)
    if disk.budget_left_bytes is not None:
        yield names.DISK_BUDGET_LEFT_BYTES.of(disk.budget_left_bytes)
    if disk.life is not None:
        yield names.SSD_LIFE_USED.of(disk.life.used)
        yield names.SSD_YEARS_LEFT.of(disk.life.years_left)


def admission_metrics(admission: AdmissionStatistics) -> Iterator[Metric]:
    """Yield the metrics of the admission of blocks to the disk."""
    yield names.DISK_ADMISSION_BLOCKS.by({"admitted": admission.num_admitted, "refused": admission.num_refused})


def store_metrics(store: StoreStanding) -> Iterator[Metric]:
    """Yield the metrics of the disk tier's store: whether it is open, and its failures."""
    yield names.DISK_OPEN.of(store.not_open is None)
    yield names.DISK_NOT_OPEN.by({reason: reason is store.not_open for reason in WhyClosed})
    yield names.DISK_FOLDER_GONE.of(store.num_gone)
    yield names.DISK_PROCESS_ENDED.of(store.num_ended)
