"""The memory of the process: what the kernel says, and what /metrics says when the kernel says nothing."""

import mmap
from pathlib import Path

from kvtier.engine.observability.memory import MemoryStatistics, memory_statistics
from kvtier.engine.observability.metrics.memory import memory_metrics


def test_memory_that_is_written_to_is_resident() -> None:
    before = memory_statistics().resident_bytes
    with mmap.mmap(-1, 64 << 20) as memory:
        memory.write(b"x" * len(memory))
        during = memory_statistics().resident_bytes

    assert before is not None
    assert during is not None
    assert during - before > 48 << 20


def test_without_the_kernels_file_there_is_no_number_and_no_metric(tmp_path: Path) -> None:
    memory = memory_statistics(tmp_path / "statm")

    assert memory.resident_bytes is None
    assert list(memory_metrics(MemoryStatistics(None))) == []


def test_a_device_is_told_of_only_by_a_process_that_uses_one() -> None:
    with_device = MemoryStatistics(1 << 20, 3 << 30, 80 << 30)

    told = {family.name: family.samples[0].value for family in memory_metrics(with_device)}

    assert told == {
        "kvtier_process_resident_bytes": 1 << 20,
        "kvtier_device_memory_used_bytes": 3 << 30,
        "kvtier_device_memory_bytes": 80 << 30,
    }
