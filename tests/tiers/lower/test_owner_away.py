"""An owner that was away longer than a copy may take, in a long step: what has ended meanwhile does not hang."""

import pytest
from chaos import World
from small_cache import CHARGE, DOCUMENT, compute_and_leave, read, world

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.cache import TAKING_IN_S
from kvtier.tiers.lower import disk_spill, reads
from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.transfer.transfer_engine import Route


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_spill, "MAX_IN_BATCH", 1)
    monkeypatch.setattr(reads, "BATCH_BLOCKS", 1)


def go_away(w: World) -> None:
    """The owner comes back after a long step, and takes in one outcome at each look."""
    w.clock.now += HUNG_S + 1
    w.clock.tick_s = 2 * TAKING_IN_S


def in_host_memory(w: World) -> None:
    """A document in host memory, whose first blocks are on their way to disk."""
    tables = w.cache.allocate([10])
    assert tables is not None
    w.compute(tables, w.chain("a", DOCUMENT), 0, DOCUMENT)
    w.cache.release(tables)
    while not w.lanes[Route.HOST_TO_DISK].num_pending:
        w.cache.spill()
        w.lanes[Route.DEVICE_TO_HOST].stir(1.0)
        w.cache.poll()


def test_a_write_that_has_ended_does_not_hang() -> None:
    w = world(store=MemoryStore(100 * CHARGE))
    in_host_memory(w)
    w.lanes[Route.HOST_TO_DISK].stir(1.0)
    go_away(w)
    for _ in range(20):
        w.cache.poll()
        w.cache.spill()
    assert w.index.disk.writing.num_opened == 0


def test_a_write_that_hangs_does_however_long_its_owner_was_away() -> None:
    w = world(store=MemoryStore(100 * CHARGE))
    in_host_memory(w)
    go_away(w)
    w.cache.poll()
    w.cache.spill()
    assert w.index.disk.writing.num_opened == 1


@pytest.mark.parametrize("is_deadline", [True, False], ids=["a promotion's deadline", "a longest time of reads"])
def test_a_read_that_has_ended_does_not_hang(is_deadline: bool) -> None:
    w = world(num_host_slots=24)
    for document in "abcdef":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    promotion = w.cache.promote(hit, timeout_s=1.0 if is_deadline else None)
    assert w.lanes[Route.DISK_TO_HOST].num_pending > 1
    w.lanes[Route.DISK_TO_HOST].stir(1.0)
    go_away(w)
    w.cache.poll()
    if not is_deadline:
        w.lower.time_out_reads(HUNG_S)
    assert w.index.disk.reading.num_opened == 0
    w.clock.tick_s = 0.0
    w.settle()
    compute_and_leave(w, promotion, w.chain("a", DOCUMENT))
    w.check()
