"""Garbage: full collections wait for an idle engine, and the process's collector is given back as it was."""

import gc
from collections.abc import Iterator

import pytest
from async_play import opened, play
from transformers import PreTrainedModel

from kvtier.engine import garbage as garbage_module
from kvtier.engine.garbage import Garbage


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collector that looks after young objects often, so that a test need not make millions; as it was afterwards.
    Engines that another test has left hanging do not count."""
    monkeypatch.setattr(Garbage, "_num_serving", 0)
    gc.unfreeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    yield
    assert gc.get_threshold() == (10, 2, 2)
    assert gc.get_freeze_count() == 0
    gc.set_threshold(*thresholds)


def num_full() -> int:
    return int(gc.get_stats()[2]["collections"])


def make(num_objects: int) -> list[list[int]]:
    """Objects that the collector counts, and that stay."""
    return [[number] for number in range(num_objects)]


def test_beside_requests_nothing_is_walked_through_as_a_whole() -> None:
    with Garbage() as garbage:
        before, kept = num_full(), []
        for _ in range(50):
            kept.append(make(100))
            garbage.on_step()

        assert gc.get_count()[2] > 20  # each of which would have been a full collection
        assert num_full() == before


def test_what_has_gathered_is_collected_once_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_module, "ENOUGH", 20)
    with Garbage() as garbage:
        before = num_full()
        garbage.on_idle()
        assert num_full() == before  # nothing has gathered
        kept = make(2000)

        garbage.on_idle()
        garbage.on_idle()

        assert len(kept) == 2000
        assert num_full() == before + 1


def test_garbage_of_an_engine_that_is_never_idle_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(garbage_module, "TOO_MANY", 20)
    with Garbage() as garbage, caplog.at_level("INFO"):
        before = num_full()
        kept = make(2000)

        garbage.on_step()

        assert len(kept) == 2000
        assert num_full() == before + 1
        assert "garbage" in caplog.text


def test_the_last_engine_to_end_leaves_the_collector_as_it_was() -> None:
    with Garbage():
        with Garbage():
            assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[2] > 1000
        assert gc.get_threshold()[:2] == (10, 0)


def test_a_collection_of_young_objects_looks_at_few() -> None:
    looked_at = list[int]()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            looked_at.append(sum(len(gc.get_objects(generation)) for generation in (0, 1)))

    gc.set_threshold(2000, 10, 10)
    with Garbage():
        gc.callbacks.append(on_collection)
        kept = make(30_000)
        gc.callbacks.remove(on_collection)
    gc.set_threshold(10, 2, 2)

    assert len(kept) == 30_000
    assert 0 < max(looked_at) < 1000


def test_a_collector_that_is_switched_off_stays_so() -> None:
    gc.disable()
    try:
        before = num_full()
        with Garbage() as garbage:
            garbage.on_idle()
            garbage.on_step()
        assert num_full() == before
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_engine_that_serves_walks_through_everything_only_when_idle(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with opened(model) as llm:
            assert gc.get_freeze_count() > 0  # before the first request
            assert await llm.ask(lambda _: gc.get_threshold()[2]) > 1000
            assert await llm.ask(lambda _: gc.get_freeze_count()) > 0

    play(story())
