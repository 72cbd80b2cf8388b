"""Prompts that are pinned for a while: which blocks, in which tenant's share, and until when."""

from collections.abc import Iterator

import pytest
from document_tables import BLOCK_BYTES, BLOCK_SIZE, tables
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.server.documents.worker import DocumentWorker


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def core(model: PreTrainedModel, clock: FakeClock) -> Iterator[EngineCore]:
    """A configuration with room for pins of eight blocks."""
    with build_core(model, byte_tokenizer(), as_config(tables(num_host_slots=16))) as core:
        core.pins = TimedPins(core.cache, clock)
        yield core


def held_blocks(core: EngineCore) -> int:
    return (core.cache.pins.max_bytes - core.cache.pins.free_bytes) // BLOCK_BYTES


def kept(worker: DocumentWorker, tenant: str | None, num_blocks: int, ttl_s: float = 60.0) -> bool:
    prompt = [num_blocks] * (num_blocks * BLOCK_SIZE)
    return worker.pin_prompt(tenant, prompt, None, None, ttl_s)


def test_a_prompt_shorter_than_a_block_is_not_kept_and_leaves_nothing_behind(core: EngineCore) -> None:
    worker = DocumentWorker(core, lambda _: None, num_tenants=1)

    assert not any(worker.pin_prompt(None, [1, 2, 3], None, None, 60.0) for _ in range(10))

    assert (held_blocks(core), core.pins.num_remembered) == (0, 10)
    assert kept(worker, None, 1)
    assert held_blocks(core) == 1


def test_a_prompt_is_kept_until_its_time_is_over(core: EngineCore, clock: FakeClock) -> None:
    worker = DocumentWorker(core, lambda _: None, num_tenants=1)
    assert kept(worker, None, 2, ttl_s=30.0)
    assert kept(worker, None, 3, ttl_s=60.0)

    left = []
    for now in (29.0, 30.0, 60.0):
        clock.now = now
        core.idle()
        left.append(held_blocks(core))

    assert left == [5, 3, 0]
    core.cache.check()


def test_a_tenants_share_is_its_own_and_as_large_as_there_are_tenants(core: EngineCore, clock: FakeClock) -> None:
    worker = DocumentWorker(core, lambda _: None, num_tenants=2)
    assert [kept(worker, "ann", num_blocks) for num_blocks in (3, 2, 1)] == [True, False, True]
    assert kept(worker, "bob", 4)

    worker.share_among(4)
    clock.now = 60.0
    core.idle()

    assert [kept(worker, "ann", num_blocks) for num_blocks in (3, 2)] == [False, True]


def test_when_every_block_is_forgotten_tenants_may_keep_as_much_as_before(core: EngineCore) -> None:
    worker = DocumentWorker(core, lambda _: None, num_tenants=1)
    assert kept(worker, None, 8)
    assert not kept(worker, None, 1)

    assert core.reset()

    assert held_blocks(core) == 0
    assert kept(worker, None, 8)
