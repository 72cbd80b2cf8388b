"""Priorities: urgent requests run first, and cached prefixes of waiting ones are brought from disk."""

import random
from pathlib import Path

from small_models import plain_greedy
from stepped_core import (
    BLOCK_SIZE,
    _disk_with_a_gate,  # noqa: F401
    add,
    assert_nothing_leased,
    engine,
    finish,
    prompt_of,
    step,
    step_until,
    store_prompt,
)
from transformers import PreTrainedModel
from urgent_requests import add_with

from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.tiers.naming.tier import Tier


def test_the_queue_is_ordered_by_priority_and_then_by_arrival(model: PreTrainedModel) -> None:
    with engine(model, max_running=1) as core:
        first = add_with(core, prompt_of(0, 20), 0)
        step(core)
        late, later, urgent = (add_with(core, prompt_of(n, 20), priority) for n, priority in ((1, 5), (2, 5), (3, 0)))

        assert list(core.scheduler.waiting) == [urgent, late, later]
        finish(core)

    times = [request.timeline.first_token_at for request in (first, urgent, late, later)]
    assert times == sorted(times)


def test_an_urgent_request_takes_the_slots_of_one_that_is_not_and_both_answers_are_right(
    model: PreTrainedModel,
) -> None:
    background, question = prompt_of(1, 20 * BLOCK_SIZE), prompt_of(2, 12 * BLOCK_SIZE)
    with engine(model, num_slots=26) as core:
        slow = add_with(core, background, 10, max_tokens=40)
        step_until(core, lambda: len(slow.generated) > 3)
        urgent = add_with(core, question, 0)
        step_until(core, lambda: urgent.finish_reason is not None)
        assert slow.finish_reason is None
        finish(core)
        assert_nothing_leased(core)
        statistics = core.scheduler.hit_ratio.statistics()

    assert statistics.num_preempted == 1
    assert urgent.generated == plain_greedy(model, question, 8)
    assert slow.generated == plain_greedy(model, background, 40)


def test_equals_wait_for_each_other(model: PreTrainedModel) -> None:
    with engine(model, num_slots=26) as core:
        first = add_with(core, prompt_of(1, 20 * BLOCK_SIZE), 3)
        step(core)
        second = add_with(core, prompt_of(2, 12 * BLOCK_SIZE), 3)
        step_until(core, lambda: first.finish_reason is not None)
        assert not second.generated
        finish(core)


def test_urgent_prompts_are_computed_first_while_both_run(model: PreTrainedModel) -> None:
    with engine(model, token_budget=64, prefill_chunk=64) as core:
        slow = add_with(core, prompt_of(1, 600), 10)
        step(core)
        urgent = add_with(core, prompt_of(2, 300), 0)
        step(core)  # the budget had gone to the one that was running already
        computed = slow.num_computed
        step_until(core, lambda: urgent.timeline.first_token_at is not None)

        assert slow.num_computed <= computed + 64
        finish(core)


def test_random_priorities_in_a_small_pool_give_the_tokens_of_being_alone(model: PreTrainedModel) -> None:
    rng = random.Random(3)
    prompts = [prompt_of(seed, rng.randrange(20, 300)) for seed in range(10)]
    asked = []
    with engine(model, num_slots=30, num_host_slots=60) as core:
        for prompt in prompts:
            asked.append(add_with(core, prompt, rng.randrange(3), max_tokens=20))
            for _ in range(rng.randrange(6)):
                step(core)
                core.check()
        finish(core)
        assert_nothing_leased(core)
        assert core.scheduler.hit_ratio.statistics().num_preempted > 0

    for prompt, request in zip(prompts, asked, strict=True):
        assert request.generated == plain_greedy(model, prompt, 20)


# --- what waits


def where(core: EngineCore, request: Request) -> set[Tier | None]:
    return set(core.cache.lookups.where(request.chain))


def test_what_a_waiting_request_needs_comes_from_disk_while_it_waits(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 10 * BLOCK_SIZE + 1)
    store_prompt(model, tmp_path, prompt)
    with engine(model, folder=tmp_path, max_running=1) as core:
        running = add(core, prompt_of(2, 20), max_tokens=120)
        step(core)
        waiting = add(core, prompt)
        assert where(core, waiting) == {Tier.DISK}

        step_until(core, lambda: where(core, waiting) == {Tier.HOST})
        assert running.finish_reason is None
        finish(core)
        assert_nothing_leased(core)
        assert core.cache.pins.free_bytes == core.cache.pins.max_bytes

    assert waiting.tokens is not None
    assert waiting.tokens.host == 10 * BLOCK_SIZE
    assert waiting.generated == plain_greedy(model, prompt, 8)


def test_the_budget_goes_to_the_head_of_the_queue_and_time_takes_it_back(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    prompts = [prompt_of(seed, 10 * BLOCK_SIZE + 1) for seed in (1, 2, 3)]
    for prompt in prompts:
        store_prompt(model, tmp_path, prompt)
    now = 0.0
    with engine(model, folder=tmp_path, max_running=1, look_ahead=0.0) as core:
        budget = 2 * 10 * BLOCK_SIZE * 1024
        pins = TimedPins(core.cache, lambda: now)
        ahead = LookAhead(core.cache, pins, lambda: budget, lasts_s=30.0)
        add(core, prompt_of(4, 20), max_tokens=200)
        step(core)
        first, second, third = (add(core, prompt) for prompt in prompts)
        for _ in range(5):
            ahead.look(core.scheduler.waiting)

        step_until(core, lambda: all(where(core, request) == {Tier.HOST} for request in (first, second)))
        assert where(core, third) == {Tier.DISK}
        assert ahead.num_bytes == budget
        ahead.forget(first)
        core.abort(first)
        ahead.look(core.scheduler.waiting)
        step_until(core, lambda: where(core, third) == {Tier.HOST})
        assert ahead.num_bytes == budget
        now = 31.0
        pins.tick()
        assert ahead.num_bytes == 0
        finish(core)
        assert_nothing_leased(core)
