"""Requests of different sampling in one step: each has the answer that it has alone, also preempted or cached."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from small_models import VOCAB, byte_tokenizer
from transformers import PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.scheduling.request import Request
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
NUM_NEW = 40
KINDS: Sequence[dict[str, object]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {32: 4.0}},
    {"temperature": 1.0, "bad_words": ["a", "be"], "min_tokens": 10, "logprobs": 0},
]


def params_of(kind: int) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_NEW, "ignore_eos": True, "seed": kind, **KINDS[kind]})


def prompt_of(kind: int, num_tokens: int = 60) -> list[int]:
    rng = random.Random(kind)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def opened(model: PreTrainedModel, num_slots: int) -> LLM:
    device = {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE}
    return LLM(model, {"device": device, "host": {"capacity": 0}}, byte_tokenizer())


def together(llm: LLM, kinds: Sequence[int]) -> list[Request]:
    """The requests of these kinds, asked at once and finished."""
    requests = [llm.core.add(prompt_of(kind), params_of(kind), NO_EXTRA_KEYS, 0.0) for kind in kinds]
    while llm.core.has_work:
        llm.core.step()
    llm.check()
    return requests


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> list[Request]:
    """Each kind of request, asked when no other runs and nothing is cached."""
    requests = []
    for kind in range(len(KINDS)):
        with opened(model, 100) as llm:
            requests += together(llm, [kind])
    return requests


def assert_same(requests: Sequence[Request], expected: Sequence[Request]) -> None:
    assert [request.generated for request in requests] == [request.generated for request in expected]
    for request, other in zip(requests, expected, strict=True):
        assert len(request.logprobs) == len(other.logprobs)
        for told, by_other in zip(request.logprobs, other.logprobs, strict=True):
            assert told.token_id == by_other.token_id
            assert told.logprob == pytest.approx(by_other.logprob, abs=1e-4)
            assert [token_id for token_id, _ in told.top] == [token_id for token_id, _ in by_other.top]


def test_each_request_of_a_mixed_step_has_the_answer_that_it_has_alone(
    model: PreTrainedModel, alone: list[Request]
) -> None:
    with opened(model, 100) as llm:
        requests = together(llm, range(len(KINDS)))

    assert_same(requests, alone)
    assert len({tuple(request.generated) for request in requests}) == len(KINDS)


def test_a_cached_prompt_has_the_same_answer(model: PreTrainedModel, alone: list[Request]) -> None:
    with opened(model, 100) as llm:
        together(llm, range(len(KINDS)))
        again = together(llm, range(len(KINDS)))

    assert all(request.balance().device > 0 for request in again)
    assert_same(again, alone)


def test_a_preempted_request_has_the_same_answer(model: PreTrainedModel, alone: list[Request]) -> None:
    with opened(model, 20) as llm:  # each needs 7 at its end
        requests = together(llm, range(len(KINDS)))

    assert any(request.timeline.num_preempted for request in requests)
    assert_same(requests, alone)


def test_a_bad_word_of_two_tokens_does_not_appear_in_the_output(model: PreTrainedModel) -> None:
    bias = dict.fromkeys(byte_tokenizer()("be")["input_ids"], 60.0)
    params = SamplingParams(max_tokens=30, temperature=9.0, seed=1, logit_bias=bias, ignore_eos=True)
    forbidding = replace(params, bad_words=["be"])
    with opened(model, 100) as llm:
        (free,), (bound,) = llm.generate(prompt_of(1), params), llm.generate(prompt_of(1), forbidding)

    assert "be" in free.text
    assert "be" not in bound.text
    assert "e" in bound.text
    assert len(bound.token_ids) == 30
