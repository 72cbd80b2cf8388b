"""Log probabilities of a prompt's own tokens: those of plain transformers, cached or not, in chunks or whole."""

import asyncio

import pytest
import stepped_core
import torch
from equal_answers import prompt_of
from small_models import build, byte_tokenizer
from stepped_core import step_until
from transformers import PreTrainedModel
from urgent_requests import add_with

from kvtier import LLM, AsyncLLM, SamplingParams
from kvtier.engine import build_core as engine_build
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.model.runner import ModelRunner
from kvtier.engine.scheduling.request import Completion, FinishReason, RequestOptions
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Reason

TOLERANCE = 1e-4
SCORED = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2)


def configuration(num_slots: int = 200, **scheduler: object) -> dict[str, object]:
    return {
        "device": {"capacity": num_slots * 16 * 1024, "block_size": 16},
        "host": {"capacity": 200 * 16 * 1024},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always", **scheduler},
    }


def plain_logprobs(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """What plain transformers gives for the tokens after the first, [tokens - 1, vocab]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, :-1]
    finally:
        model.set_attn_implementation(before)
    return logits.double().log_softmax(dim=-1)


def assert_plain(told: list[TokenLogprobs | None], model: PreTrainedModel, prompt: list[int]) -> None:
    """They are those of plain transformers, and ranks and likeliest are what they say."""
    first, *others = told
    assert first is None
    assert [item.token_id for item in others] == prompt[1:]
    for item, row in zip(others, plain_logprobs(model, prompt), strict=True):
        assert item.logprob == pytest.approx(row[item.token_id].item(), abs=TOLERANCE)
        assert [logprob for _, logprob in item.top] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
        assert item.rank == pytest.approx(1 + int((row > row[item.token_id]).sum()), abs=1)  # of equals by rounding


def assert_balanced(done: Completion, num_tokens: int) -> None:
    tokens = done.tokens
    assert tokens.device + tokens.host + tokens.disk + tokens.recomputed == num_tokens
    assert sum(tokens.reasons.values()) == tokens.recomputed


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_they_are_those_of_plain_transformers_in_chunks_and_beside_other_requests(name: str) -> None:
    model = build(name)
    prompts = [prompt_of(1, 200), prompt_of(2, 31), prompt_of(3, 1)]
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        plain = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
        assert llm.reset_prefix_cache()

        scored = llm.generate(prompts, SCORED)
        llm.check()

    for prompt, done, other in zip(prompts, scored, plain, strict=True):
        assert done.token_ids == other.token_ids
        assert other.prompt_logprobs == []
        assert_balanced(done, len(prompt))
    for prompt, done in zip(prompts, scored, strict=True):
        assert_plain(done.prompt_logprobs, model, prompt)


def test_a_cached_prompt_is_computed_again_and_what_was_found_counts_as_scored(model: PreTrainedModel) -> None:
    known, more = prompt_of(1, 100), prompt_of(2, 50)
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        cold = llm.generate(known, SCORED)[0]
        again = llm.generate(known, SCORED)[0]
        longer = llm.generate([*known, *more], SCORED)[0]
        plain = llm.generate([*known, *more], SamplingParams(max_tokens=3, ignore_eos=True))[0]
        prefix = llm.statistics().prefix

    assert cold.tokens.reasons == {Reason.NEVER_SEEN: 96, Reason.LAST_BLOCK: 4}
    assert again.tokens.reasons == {Reason.SCORED: 99, Reason.LAST_BLOCK: 1}
    assert longer.tokens.reasons == {Reason.SCORED: 100, Reason.NEVER_SEEN: 44, Reason.LAST_BLOCK: 6}
    assert again.prompt_logprobs == pytest.approx(cold.prompt_logprobs)
    assert plain.tokens.device == 149
    assert plain.token_ids == longer.token_ids
    assert_plain(longer.prompt_logprobs, model, [*known, *more])
    assert (prefix.num_requests, prefix.queries) == (1, 150)  # the hit ratio is that of requests that read the cache


def test_a_step_has_few_logits_of_prompts_however_long_they_are(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_build, "MAX_SCORED_LOGITS", 20 * 256)
    num_rows = []

    def watched(runner: ModelRunner, chunks: list) -> torch.Tensor:
        logits = run(runner, chunks)
        num_rows.append(len(logits))
        return logits

    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", watched)
    prompts = [prompt_of(seed, 150) for seed in range(4)]
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        num_rows.clear()
        scored = llm.generate(prompts, SCORED)

    assert max(num_rows) <= 20 + len(prompts)  # and the row of each request's newest token
    for prompt, done in zip(prompts, scored, strict=True):
        assert_plain(done.prompt_logprobs, model, prompt)


@pytest.mark.parametrize("num_before", [100, 319])
def test_a_preempted_prompt_goes_on_from_what_was_scored(model: PreTrainedModel, num_before: int) -> None:
    prompt = prompt_of(1, 320)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    with stepped_core.engine(model, max_running=1) as core:
        slow = core.add(prompt, sampling, NO_EXTRA_KEYS, arrived_at=0.0, options=RequestOptions(priority=10))
        scores = slow.scores
        assert scores is not None
        step_until(core, lambda: scores.num_used >= num_before)
        num_used = scores.num_used
        urgent = add_with(core, prompt_of(2, 12 * 16), priority=0)
        step_until(core, lambda: urgent.finish_reason is not None)
        assert slow.timeline.num_preempted
        shares = [share for step in stepped_core.finish(core) for share in step if share.request is slow]
        stepped_core.assert_nothing_leased(core)

    assert sum(share.num_tokens for share in shares) <= 320 + 3 - num_used + 15  # the block in which scoring ended
    assert_plain(slow.completion().prompt_logprobs, model, prompt)
    assert_balanced(slow.completion(), 320)


def test_no_token_is_generated_where_none_is_asked_for(model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(), byte_tokenizer()) as llm:
        scored, plain = (
            llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=wanted))[0] for wanted in (2, None)
        )
        llm.check()

    for done in (scored, plain):
        assert (done.text, done.token_ids, done.finish_reason) == ("", [], FinishReason.LENGTH)
    assert_plain(scored.prompt_logprobs, model, prompt)
    assert plain.prompt_logprobs == []
    assert plain.tokens.device == 99


def test_every_piece_of_a_stream_has_them(model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 40)

    async def pieces(max_tokens: int) -> list:
        async with AsyncLLM(model, configuration(), byte_tokenizer()) as llm:
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=2)
            return [piece async for piece in llm.generate(prompt, sampling)]

    for max_tokens, num_pieces in ((2, 2), (0, 1)):
        told = asyncio.run(pieces(max_tokens))
        assert len(told) == num_pieces
        for piece in told:
            assert_plain(list(piece.prompt_logprobs), model, prompt)
        assert (told[-1].token_id is None) == (max_tokens == 0)


@pytest.mark.parametrize(("wanted", "message"), [(-1, "prompt_logprobs is -1"), (1.5, "use a whole number")])
def test_another_number_is_refused(wanted: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(prompt_logprobs=wanted)
