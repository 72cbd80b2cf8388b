"""Logarithmic probabilities of generated tokens."""

import math

import pytest
import torch
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.model.logprobs import step_logprobs

CONFIG = {"device": {"capacity": "1MiB"}, "host": {"capacity": 0}}


def test_they_are_of_the_models_probabilities() -> None:
    (told,) = step_logprobs(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() + 7, [2], [2])

    assert told is not None
    assert told.token_id == 2
    assert told.logprob == pytest.approx(math.log(0.125))
    assert [token_id for token_id, _ in told.top] == [0, 1]
    assert [logprob for _, logprob in told.top] == pytest.approx([math.log(0.5), math.log(0.25)])


def test_none_are_taken_of_more_tokens_than_there_are() -> None:
    (told,) = step_logprobs(torch.zeros(1, 3), [0], [20])

    assert told is not None
    assert len(told.top) == 3


def test_each_row_of_a_step_has_as_many_as_it_asked_for() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    chosen, num_tops = [3, 1, 4, 1, 5], [2, None, 0, 5, None]

    together = step_logprobs(logits, chosen, num_tops)

    alone = [step_logprobs(logits[i : i + 1], [chosen[i]], [num_tops[i]])[0] for i in range(5)]
    assert together == alone
    assert [None if told is None else len(told.top) for told in together] == num_tops


@pytest.mark.parametrize(("wanted", "num_top"), [(None, None), (0, 0), (3, 3)])
def test_a_completion_has_them_if_they_were_asked_for(
    model: PreTrainedModel, wanted: int | None, num_top: int | None
) -> None:
    with LLM(model, CONFIG, byte_tokenizer()) as llm:
        (done,) = llm.generate("Hello", SamplingParams(max_tokens=5, logprobs=wanted))

    expected = [] if num_top is None else [(token_id, num_top) for token_id in done.token_ids]
    assert [(item.token_id, len(item.top)) for item in done.logprobs] == expected


def test_fewer_than_none_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="logprobs is -1"):
        SamplingParams(logprobs=-1)
