"""Scheduler, driven step by step on a real model: which requests compute or wait, and which slots come back."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_models import MODELS, MORE_MODELS, VOCAB, build, plain_greedy
from stepped_core import (
    BLOCK_SIZE,
    PLENTY,
    _disk_with_a_gate,  # noqa: F401
    add,
    assert_nothing_leased,
    engine,
    finish,
    finish_too_late,
    num_hanging,
    prompt_of,
    reads_hang,
    step,
    step_until,
    stopped_clock,
    store_prompt,
)
from transformers import PreTrainedModel

from kvtier.engine import core as engine_core
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling import loading
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.step_times import MIN_S, CopyHangs, Stall
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.promotion import Hit


def smallest_engine(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, token_budget: int) -> EngineCore:
    """The engine with the smallest device that accepts the prompt."""
    for num_slots in range(2, PLENTY):
        core = engine(model, num_slots, token_budget=token_budget)
        try:
            core.abort(add(core, prompt, max_tokens))
        except ValueError:
            core.close()
        else:
            return core
    raise AssertionError("no device accepts the prompt")


def test_no_step_computes_more_tokens_than_the_budget(model: PreTrainedModel) -> None:
    with engine(model, token_budget=96, prefill_chunk=64) as core:
        for seed, num_tokens in enumerate((300, 40, 7, 130, 64)):
            add(core, prompt_of(seed, num_tokens))

        sizes = [sum(share.num_tokens for share in shares) for shares in finish(core)]

    assert max(sizes) == 96
    assert sum(sizes) == 300 + 40 + 7 + 130 + 64 + 5 * 7  # the last token of an answer is never computed


def test_a_long_prompt_is_computed_in_chunks(model: PreTrainedModel) -> None:
    with engine(model, token_budget=1000, prefill_chunk=64) as core:
        add(core, prompt_of(1, 300), max_tokens=3)

        sizes = [[share.num_tokens for share in shares] for shares in finish(core)]

    assert sizes == [[64], [64], [64], [64], [44], [1], [1]]


def test_a_chunk_gets_what_decoding_leaves_of_the_budget(model: PreTrainedModel) -> None:
    with engine(model, token_budget=64, prefill_chunk=64) as core:
        early = [add(core, prompt_of(seed, 10), max_tokens=30) for seed in range(3)]
        step(core)
        late = add(core, prompt_of(9, 150), max_tokens=2)

        shares = step(core)

    assert [(share.request, share.num_tokens) for share in shares] == [*((request, 1) for request in early), (late, 61)]


def test_requests_that_decode_get_a_token_in_every_step_while_a_long_prompt_is_computed(
    model: PreTrainedModel,
) -> None:
    with engine(model, token_budget=32, prefill_chunk=32) as core:
        early = [add(core, prompt_of(seed, 10), max_tokens=12) for seed in range(2)]
        step(core)
        late = add(core, prompt_of(9, 600), max_tokens=2)

        steps = step_until(core, lambda: early[0].finish_reason is not None)

        assert len(steps) == 11
        assert late.timeline.first_token_at is None
        for shares in steps:
            assert [share.request for share in shares] == [*early, late]
            assert [share.was_decoding for share in shares] == [True, True, False]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_requests_that_arrive_while_others_decode_join_them_and_get_the_tokens_of_being_alone(name: str) -> None:
    model = build(name)
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate((150, 33, 16, 90, 5, 64))]
    expected = [plain_greedy(model, prompt, 20) for prompt in prompts]

    with engine(model) as core:
        requests, widths = [], []
        for prompt in prompts:
            requests.append(add(core, prompt, max_tokens=20))
            widths += [len(step(core)) for _ in range(3)]
        widths += [len(shares) for shares in finish(core)]
        assert_nothing_leased(core)

    assert [request.generated for request in requests] == expected
    assert max(widths) >= 5


def test_no_more_requests_are_active_than_max_running(model: PreTrainedModel, tmp_path: Path) -> None:
    prompts = [prompt_of(seed, 40) for seed in range(7)]
    store_prompt(model, tmp_path, prompts[0])
    with engine(model, folder=tmp_path, max_running=3) as core:
        requests = [add(core, prompt) for prompt in prompts]
        scheduler = core.scheduler
        num_active = []

        with reads_hang():  # the first one is parked, and counts
            for _ in range(6):
                step(core)
                num_active.append(len(scheduler.promoting) + len(scheduler.running))
        while core.has_work:
            step(core)
            num_active.append(len(scheduler.promoting) + len(scheduler.running))

    assert max(num_active) == 3
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


def test_a_request_whose_prefix_is_being_promoted_is_parked_while_others_go_on(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    stored, others = prompt_of(1, 150), [prompt_of(seed, 50) for seed in (2, 3)]
    expected = [plain_greedy(model, prompt, 8) for prompt in (stored, *others)]
    store_prompt(model, tmp_path, stored)

    with engine(model, folder=tmp_path) as core:
        with reads_hang():
            parked = add(core, stored)
            requests = [add(core, prompt) for prompt in others]
            steps = step_until(core, lambda: all(request.finish_reason for request in requests))
            assert core.scheduler.promoting == [parked]
            core.check()
        finish(core)
        assert_nothing_leased(core)

    assert all(share.request is not parked for shares in steps for share in shares)
    assert [request.generated for request in (parked, *requests)] == expected
    assert parked.tokens.disk == 144
    assert parked.tokens.reasons == {Reason.LAST_BLOCK: 6}


def test_a_prompt_that_waits_for_slots_is_looked_up_again_only_when_enough_of_them_are_free(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HIT_LASTS_S", 0.0)
    prompt = prompt_of(2, 12 * BLOCK_SIZE)
    with engine(model, num_slots=26) as core:
        lookup = core.cache.lookup
        num_lookups = 0

        def counted(chain: BlockChain, num_tokens: int) -> Hit:
            nonlocal num_lookups
            num_lookups += chain is waiting.chain
            return lookup(chain, num_tokens)

        monkeypatch.setattr(core.cache, "lookup", counted)
        running = add(core, prompt_of(1, 20 * BLOCK_SIZE), max_tokens=40)
        small = add(core, prompt_of(3, 10), max_tokens=3)  # its end frees slots, and too few of them
        waiting = add(core, prompt)
        step_until(core, lambda: running.finish_reason is not None)
        assert small.finish_reason is not None
        assert (num_lookups, waiting.timeline.first_token_at) == (1, None)
        finish(core)

    assert num_lookups == 2
    assert waiting.generated == plain_greedy(model, prompt, 8)


def test_a_promotion_that_is_late_is_recomputed_for_the_reason_deadline(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = prompt_of(1, 150)
    expected = plain_greedy(model, stored, 8)
    store_prompt(model, tmp_path, stored)

    clock = stopped_clock(monkeypatch)
    with engine(model, folder=tmp_path) as core:
        with reads_hang():
            request = add(core, stored)
            finish_too_late(core, clock)
            core.check()
            assert num_hanging() > 0
        assert_nothing_leased(core)
        again = add(core, stored)
        finish(core)

    assert (request.generated, again.generated) == (expected, expected)
    assert (request.tokens.recomputed, request.tokens.reasons[Reason.DEADLINE]) == (150, 144)
    assert again.tokens.device == 149


def test_a_disk_that_hangs_keeps_no_device_slots_from_the_request_that_gave_it_up(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = prompt_of(1, 150)
    expected = plain_greedy(model, stored, 8)
    store_prompt(model, tmp_path, stored)

    clock = stopped_clock(monkeypatch)
    with engine(model, num_slots=12, folder=tmp_path) as core, reads_hang():
        request = add(core, stored)
        finish_too_late(core, clock)

        assert request.generated == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_youngest_is_preempted_when_slots_run_out_and_all_answers_stay_right(name: str, tmp_path: Path) -> None:
    model = build(name)
    prompts = [prompt_of(seed, 100 + seed) for seed in range(3)]
    expected = [plain_greedy(model, prompt, 60) for prompt in prompts]

    with engine(model, num_slots=24, folder=tmp_path) as core:  # each needs 10 in the end
        requests = [add(core, prompt, max_tokens=60) for prompt in prompts]
        preempted: list[Request] = []
        while core.has_work:
            step(core)
            core.check()
            preempted += [request for request in core.scheduler.waiting if request.generated]
        assert_nothing_leased(core)

    assert [request.generated for request in requests] == expected
    assert preempted
    assert requests[0] not in preempted
    assert core.scheduler.admitted_tokens.num_tokens == sum(map(len, prompts))


@pytest.mark.long
@pytest.mark.parametrize("token_budget", [128, 50])
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_the_smallest_device_that_accepts_a_prompt_can_run_it(name: str, token_budget: int) -> None:
    model = build(name)
    prompt = prompt_of(1, 170)
    expected = plain_greedy(model, prompt, 30)

    with smallest_engine(model, prompt, 30, token_budget) as core:
        cold = add(core, prompt, max_tokens=30)
        add(core, prompt_of(2, 20), max_tokens=30)
        finish(core)
        again = add(core, prompt, max_tokens=30)
        finish(core)
        assert_nothing_leased(core)

    assert [cold.generated, again.generated] == [expected, expected]


def test_a_prompt_that_can_never_fit_is_refused_in_one_line_that_says_what_to_do(model: PreTrainedModel) -> None:
    with engine(model, num_slots=10) as core:
        with pytest.raises(ValueError, match=r"(?s).*need 11 blocks, the device holds 10; raise device.capacity") as no:
            add(core, prompt_of(1, 153), max_tokens=8)
        assert not core.has_work

        add(core, prompt_of(1, 152), max_tokens=8)
        finish(core)

    assert "\n" not in str(no.value)


def test_a_prompt_without_tokens_is_refused(model: PreTrainedModel) -> None:
    with engine(model) as core, pytest.raises(ValueError, match="is empty"):
        add(core, [])


@pytest.mark.parametrize("token_id", [VOCAB, -1, 1 << 40])
def test_a_token_id_that_the_model_does_not_know_is_refused(model: PreTrainedModel, token_id: int) -> None:
    with engine(model) as core:
        with pytest.raises(ValueError, match=str(token_id)) as no:
            add(core, [*prompt_of(1, 20), token_id, 5])
        assert not core.has_work

    assert "\n" not in str(no.value)


def test_a_full_queue_refuses_one_more_and_serves_the_others(model: PreTrainedModel) -> None:
    with engine(model, max_waiting=2) as core:
        requests = [add(core, prompt_of(seed, 20)) for seed in range(2)]
        with pytest.raises(ValueError, match=r"raise scheduler\.max_waiting") as no:
            add(core, prompt_of(2, 20))

        finish(core)

    assert "\n" not in str(no.value)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("state", ["waiting", "promoting", "prefilling", "decoding"])
def test_aborting_frees_every_lease_and_leaves_the_others_alone(state: str, name: str, tmp_path: Path) -> None:
    model = build(name)
    stored, other = prompt_of(1, 150), prompt_of(2, 40)
    expected = plain_greedy(model, other, 8)
    if state == "promoting":
        store_prompt(model, tmp_path, stored)

    with engine(model, folder=tmp_path) as core:
        scheduler = core.scheduler
        with reads_hang():
            aborted, stays = add(core, stored), add(core, other)
            if state == "promoting":
                step_until(core, lambda: aborted in scheduler.promoting and num_hanging() > 0)
            elif state == "prefilling":
                step_until(core, lambda: aborted.num_computed > 0)
                assert not aborted.generated
            elif state == "decoding":
                step_until(core, lambda: len(aborted.generated) > 1)
            core.abort(aborted)
            core.abort(aborted)
            core.check()
        finish(core)
        assert_nothing_leased(core)

    assert aborted.finish_reason is FinishReason.ABORT
    assert stays.generated == expected


def test_aborting_one_of_two_that_wait_for_the_same_blocks_takes_nothing_from_the_other(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    stored = prompt_of(1, 150)
    expected = plain_greedy(model, stored, 8)
    store_prompt(model, tmp_path, stored)

    with engine(model, folder=tmp_path) as core:
        with reads_hang():
            first, second = add(core, stored), add(core, stored)
            step_until(core, lambda: len(core.scheduler.promoting) == 2)
            core.abort(first)
        finish(core)
        assert_nothing_leased(core)

    assert second.generated == expected
    assert second.tokens.disk == 144


def test_an_engine_whose_slots_never_come_back_ends_with_an_error_that_says_so(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def step_on(core: EngineCore) -> None:
        nonlocal now
        while now < 10_000:
            core.step()
            now += 1.0

    monkeypatch.setattr(engine_core, "Stall", lambda deadline_s: Stall(deadline_s, lambda: now))
    with engine(model, num_slots=20) as core:
        core.step()
        now += 1000.0  # idle for long
        held = core.cache.allocate([18])  # as copies do that hang
        assert held is not None
        request = add(core, prompt_of(1, 10 * BLOCK_SIZE))

        with pytest.raises(CopyHangs, match="restart"):
            step_on(core)

        assert 1000 + MIN_S < now < 1000 + 3 * MIN_S
        assert request.finish_reason is None
        core.cache.release(held)
        finish(core)

    assert request.generated == plain_greedy(model, prompt_of(1, 10 * BLOCK_SIZE), 8)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_arrivals_and_aborts_in_a_small_pool_give_the_tokens_of_being_alone(
    name: str, seed: int, tmp_path: Path
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = build(name)
    stems = [prompt_of(stem, 130) for stem in range(3)]
    prompts = [stems[i % 3][: rng.randrange(20, 130)] + prompt_of(50 + i, rng.randrange(30)) for i in range(10)]
    expected = [plain_greedy(model, prompt, 25) for prompt in prompts]

    with engine(model, num_slots=26, num_host_slots=30, folder=tmp_path, max_running=5) as core:
        asked: list[tuple[int, Request]] = []
        for _ in range(120):
            dice = rng.random()
            if dice < 0.25:
                i = rng.randrange(len(prompts))
                asked.append((i, add(core, prompts[i], max_tokens=rng.randrange(1, 26))))
            elif dice < 0.30 and asked:
                core.abort(rng.choice(asked)[1])
            elif core.has_work:
                step(core)
            core.check()
        finish(core)
        assert_nothing_leased(core)

    for i, request in asked:
        assert request.generated == expected[i][: len(request.generated)]
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.generated) == request.sampling.max_tokens
            assert request.tokens.num_tokens == len(prompts[i])
            assert sum(request.tokens.reasons.values()) == request.tokens.recomputed
    assert sum(request.finish_reason is FinishReason.LENGTH for _, request in asked) > 10
