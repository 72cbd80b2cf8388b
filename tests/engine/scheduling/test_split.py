"""A hit whose front is computed while the rest of it is loaded."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from damaged_blocks import damage_in_host
from small_models import build, plain_greedy
from stepped_core import (
    BLOCK_SIZE,
    _disk_with_a_gate,  # noqa: F401
    add,
    assert_nothing_leased,
    engine,
    finish,
    finish_too_late,
    prompt_of,
    reads_hang,
    step,
    step_until,
    stopped_clock,
    store_prompt,
)
from transformers import PreTrainedModel

from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling import loading
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.load_planner import Demand, LoadPlan, Moves
from kvtier.transfer.lane import LaneSpeed, Transfer
from kvtier.transfer.transfer_engine import Route

PROMPT = prompt_of(1, 300)  # 18 whole blocks that may hit
HIT = 18 * BLOCK_SIZE


def split_engine(model: PreTrainedModel, folder: Path, share: float = 0.5, **options: float) -> EngineCore:
    """An engine that splits every hit below the device, whether or not that is faster."""
    core = engine(model, folder=folder, load="split", **options)

    def best(demand: Demand, *_: object) -> LoadPlan:
        return LoadPlan(int(demand.ends[int(share * (len(demand.ends) - 1))]), int(demand.ends[-1]))

    core.planner.best = best
    return core


def answer(request: Request) -> list[int]:
    assert request.finish_reason is FinishReason.LENGTH
    return request.generated


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_tokens_are_the_same_and_the_front_counts_as_computed_for_its_cost(
    model: PreTrainedModel, tmp_path: Path, share: float
) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path, share) as core:
        request = add(core, PROMPT)
        finish(core)
        assert_nothing_leased(core)

    start = int(share * 18) * BLOCK_SIZE
    assert answer(request) == plain_greedy(model, PROMPT, 8)
    assert request.tokens is not None
    assert request.tokens.disk == HIT - start
    assert request.tokens.reasons == {Reason.COST: start, Reason.LAST_BLOCK: len(PROMPT) - HIT}


def test_what_is_on_the_device_is_neither_computed_nor_loaded(model: PreTrainedModel, tmp_path: Path) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        first = add(core, PROMPT[: 4 * BLOCK_SIZE + 1], max_tokens=1)
        finish(core)
        second = add(core, PROMPT)
        finish(core)
        assert_nothing_leased(core)

    assert first.tokens is not None
    assert second.tokens is not None
    assert answer(second) == plain_greedy(model, PROMPT, 8)
    assert (second.tokens.device, second.tokens.disk) == (4 * BLOCK_SIZE, 7 * BLOCK_SIZE)
    assert second.tokens.reasons[Reason.COST] == 7 * BLOCK_SIZE


def test_the_front_is_computed_while_the_disk_reads_and_others_go_on_decoding(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        other = add(core, prompt_of(2, 20), max_tokens=60)
        step(core)
        with reads_hang():
            request = add(core, PROMPT)
            step_until(core, lambda: request.num_computed == HIT // 2)
            for _ in range(5):  # it waits for the rest, and no other request for it
                assert [share.request for share in step(core)] == [other]
            assert request.tokens is None
        finish(core)
        assert_nothing_leased(core)

    assert answer(request) == plain_greedy(model, PROMPT, 8)
    assert answer(other) == plain_greedy(model, prompt_of(2, 20), 60)


def test_a_rest_that_comes_too_late_is_computed(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_prompt(model, tmp_path, PROMPT)

    clock = stopped_clock(monkeypatch)
    with split_engine(model, tmp_path) as core:
        with reads_hang():
            request = add(core, PROMPT)
            finish_too_late(core, clock)
        assert_nothing_leased(core)

    assert answer(request) == plain_greedy(model, PROMPT, 8)
    assert request.tokens is not None
    assert request.tokens.disk == 0
    assert request.tokens.reasons == {
        Reason.COST: HIT // 2,
        Reason.DEADLINE: HIT // 2,
        Reason.LAST_BLOCK: len(PROMPT) - HIT,
    }


def test_a_split_whose_front_has_come_to_the_device_meanwhile_is_none(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HIT_LASTS_S", float("inf"))
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        waiting = add(core, PROMPT)
        assert waiting.loading is not None
        assert waiting.loading.look_up().start == HIT // 2
        core.scheduler.waiting.remove(waiting)
        add(core, PROMPT[: 12 * BLOCK_SIZE + 1], max_tokens=1)
        finish(core)
        core.scheduler.waiting.add(waiting)
        finish(core)
        assert_nothing_leased(core)

    assert answer(waiting) == plain_greedy(model, PROMPT, 8)
    assert waiting.tokens is not None
    assert (waiting.tokens.device, waiting.tokens.disk) == (12 * BLOCK_SIZE, 6 * BLOCK_SIZE)


def test_what_is_looked_up_again_after_a_damaged_block_is_not_split(model: PreTrainedModel, tmp_path: Path) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        best, core.planner.best = core.planner.best, lambda demand, *_: LoadPlan(0, int(demand.ends[-1]))
        add(core, PROMPT, max_tokens=1)
        finish(core)
        for seed in range(10, 40):  # until the device has none of it
            add(core, prompt_of(seed, 200), max_tokens=1)
            finish(core)
        request = add(core, PROMPT)
        damage_in_host(core, request.chain.names[5])
        step_until(core, lambda: request in core.scheduler.promoting)  # copies that make room for it go first
        core.planner.best = best
        finish(core)
        assert_nothing_leased(core)

    assert answer(request) == plain_greedy(model, PROMPT, 8)
    assert request.tokens is not None
    assert request.tokens.disk > 0


@pytest.mark.parametrize("num_computed", [0, 64, HIT // 2])
def test_aborting_frees_the_front_and_the_rest(model: PreTrainedModel, tmp_path: Path, num_computed: int) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        with reads_hang():
            request = add(core, PROMPT)
            core.scheduler.schedule()
            core.cache.spill()
            while request.num_computed < num_computed:
                core.step()
            core.abort(request)
            core.check()
        assert_nothing_leased(core)
        again = add(core, PROMPT)
        finish(core)

    assert request.finish_reason is FinishReason.ABORT
    assert answer(again) == plain_greedy(model, PROMPT, 8)


def test_two_with_the_same_prompt_share_what_each_computes_and_loads(model: PreTrainedModel, tmp_path: Path) -> None:
    store_prompt(model, tmp_path, PROMPT)

    with split_engine(model, tmp_path) as core:
        with reads_hang():
            requests = [add(core, PROMPT)]
            step(core)
            requests.append(add(core, PROMPT))
            step(core)
        finish(core)
        assert_nothing_leased(core)

    assert [answer(request) for request in requests] == [plain_greedy(model, PROMPT, 8)] * 2


@pytest.mark.long
def test_random_arrivals_and_aborts_in_a_small_pool_give_the_tokens_of_being_alone(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    rng = random.Random(5)
    prompts = [prompt_of(seed, rng.randrange(20, 300)) for seed in range(8)]
    expected = {tuple(prompt): plain_greedy(model, prompt, 8) for prompt in prompts}
    answered: list[tuple[Sequence[int], Request]] = []
    splits = 0

    with split_engine(model, tmp_path, num_slots=40, num_host_slots=30) as core:
        for _ in range(400):
            if rng.random() < 0.3 and len(core.scheduler.running) < 4:
                prompt = rng.choice(prompts)
                answered.append((prompt, add(core, prompt)))
            if rng.random() < 0.03 and answered:
                core.abort(answered[-1][1])
            step(core)
            core.check()
            splits += any(request.loading is not None for request in core.scheduler.running)
        finish(core)
        assert_nothing_leased(core)

    assert splits > 0
    for prompt, request in answered:
        assert request.generated == expected[tuple(prompt)][: len(request.generated)]
        assert request.finish_reason is not None


def is_split(core: EngineCore) -> bool:
    """Whether the engine's planner computes the front of a hit where loading takes as long as computing."""
    tokens_per_s = 1000
    for num_tokens in (64, 64, 64):
        core.planner.prefill.on_computed(num_tokens, 0, num_tokens / tokens_per_s)
    ends = np.arange(0, 1024, BLOCK_SIZE, dtype=np.float64)
    demand, lane = Demand(ends, {Route.HOST_TO_DEVICE: Moves(ends, 0)}), LaneSpeed()
    lane.update_from(Transfer(int, tokens_per_s, lambda transfer: None, seconds=1.0, finished_at=time.monotonic()))
    return core.planner.best(demand, 1024, 0.0, {Route.HOST_TO_DEVICE: lane}).start > 0


def test_a_model_with_windows_is_not_split() -> None:
    with engine(build("gemma3"), load="split") as core:
        assert not is_split(core)
    with engine(build("llama"), load="split") as core:
        assert is_split(core)
