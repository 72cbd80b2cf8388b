"""The stages of a request, as its timeline has them once it has ended."""

import pytest
from small_cache import BLOCK_SIZE, DOCUMENT, read, world
from small_models import byte_tokenizer

from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.loading import Loading, LoadingContext, LoadingState
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.timeline import Stage, Stretch, Timeline
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.tiers.lower.breaker import CircuitBreaker


def test_a_request_that_waits_for_room_has_spilled_and_then_promoted() -> None:
    w = world(num_device_slots=16, num_host_slots=40)
    read(w, "a")
    while w.cache.drain.spill_rest():
        w.settle()
    chain = w.chain("b", 15 * BLOCK_SIZE)
    tables = w.cache.allocate([15])  # a's blocks leave the device
    assert tables is not None
    w.compute(tables, chain, 0, 15 * BLOCK_SIZE)
    w.cache.release(tables)  # b's have no copy below yet
    wanted = w.chain("a", DOCUMENT + 1)
    arrived_at = w.clock.now
    timeline = Timeline(arrived_at)
    request = Request(
        list(range(DOCUMENT + 1)), SamplingParams(), wanted, Detokenizer(byte_tokenizer()), timeline=timeline
    )
    around = LoadingContext(w.cache, w.clock, 20.0, CircuitBreaker(w.clock), lambda besides: 0.0)
    loading = Loading(request, around)
    w.clock.now += 1.0
    loading.look_up()

    while not loading.ask_for_room():
        w.clock.now += 0.25
        w.settle()
    begun_s = w.clock.now - arrived_at
    loading.begin()
    while not loading.has_come:
        w.clock.now += 0.5
        w.settle()
    loading.take_in()

    assert loading.state is LoadingState.LOADED
    assert begun_s > 1.0
    found = {stretch.stage: stretch for stretch in timeline.stretches()}
    assert found[Stage.LOOKUP] == Stretch(Stage.LOOKUP, 1.0, 1.0)
    assert found[Stage.PLAN] == Stretch(Stage.PLAN, 1.0, 1.0)
    assert found[Stage.SPILL] == Stretch(Stage.SPILL, 1.0, begun_s)
    assert found[Stage.PROMOTE_HOST].start_s == begun_s
    assert begun_s < found[Stage.PROMOTE_HOST].end_s <= w.clock.now - arrived_at
    assert Stage.PROMOTE_DISK not in found
    w.cache.release(request.tables)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_stages_that_were_not_reached_are_left_out(is_aborted: bool) -> None:
    timeline = Timeline(10.0)
    timeline.on_begun(11.0)
    if not is_aborted:
        timeline.on_loaded(12.0)
        timeline.on_token(14.0)
    timeline.on_ended(15.0)

    stages = [Stretch(Stage.QUEUE, 0.0, 1.0)]
    if not is_aborted:
        stages += [Stretch(Stage.PREFILL, 2.0, 4.0), Stretch(Stage.DECODE, 4.0, 5.0)]
    assert list(timeline.stretches()) == stages
