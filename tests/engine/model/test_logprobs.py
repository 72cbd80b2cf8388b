"""Logarithmic probabilities of generated tokens."""

import math

import pytest
import torch
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.model.logprobs import token_logprobs

CONFIG = {"device": {"capacity": "1MiB"}, "host": {"capacity": 0}}


def test_they_are_of_the_models_probabilities() -> None:
    told = token_logprobs(torch.tensor([0.5, 0.25, 0.125, 0.125]).log() + 7, token_id=2, num_top=2)

    assert told.token_id == 2
    assert told.logprob == pytest.approx(math.log(0.125))
    assert [token_id for token_id, _ in told.top] == [0, 1]
    assert [logprob for _, logprob in told.top] == pytest.approx([math.log(0.5), math.log(0.25)])


def test_none_are_taken_of_more_tokens_than_there_are() -> None:
    assert len(token_logprobs(torch.zeros(3), token_id=0, num_top=20).top) == 3


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
