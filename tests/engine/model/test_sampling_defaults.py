"""SamplingDefaults: what a model's generation_config says holds where a request does not say."""

import pytest
from small_models import build, byte_tokenizer
from transformers import GenerationConfig, PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.model.sampling_defaults import NO_DEFAULTS, SamplingDefaults

CONFIG = {"device": {"capacity": "1MiB"}, "host": {"capacity": 0}}


def advising(**settings: object) -> PreTrainedModel:
    """The small Llama with a generation_config."""
    model = build("llama")
    model.generation_config = GenerationConfig(**settings)
    return model


def test_a_model_that_says_nothing_has_none() -> None:
    assert SamplingDefaults.of(build("llama")) == NO_DEFAULTS


def test_they_are_the_models_settings_of_sampling() -> None:
    model = advising(
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=7,
        num_beams=3,
    )

    assert SamplingDefaults.of(model) == SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1, 7)


def test_a_top_k_of_minus_one_keeps_every_token() -> None:
    model = advising(temperature=0.6)
    model.generation_config.top_k = -1

    assert SamplingDefaults.of(model).over(SamplingParams()).top_k == 0


def test_settings_that_cannot_be_used_are_refused_when_the_model_is_loaded() -> None:
    model = advising()
    model.generation_config.top_p = 1.5

    with pytest.raises(ValueError, match=r"generation_config: top_p is 1.5; .* set model.generation_config to none"):
        LLM(model, CONFIG, byte_tokenizer())

    LLM(model, {**CONFIG, "model": {"generation_config": "none"}}, byte_tokenizer()).close()


@pytest.mark.parametrize(("setting", "num_tokens"), [("auto", 5), ("none", 16)])
def test_the_library_samples_by_them_if_it_is_given_no_parameters(setting: str, num_tokens: int) -> None:
    model = advising(max_new_tokens=5, temperature=0.8, top_k=3)
    with LLM(model, {**CONFIG, "model": {"generation_config": setting}}, byte_tokenizer()) as llm:
        sampling = llm.default_sampling()
        (done,) = llm.generate([[1, 2, 3]])

    expected = SamplingParams(max_tokens=5, temperature=0.8, top_k=3) if setting == "auto" else SamplingParams()
    assert sampling == expected
    assert len(done.token_ids) == num_tokens


def test_parameters_that_are_given_hold_alone() -> None:
    with LLM(advising(max_new_tokens=5, temperature=0.8), CONFIG, byte_tokenizer()) as llm:
        answers = [llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))[0].token_ids for _ in range(3)]

    assert answers == [answers[0]] * 3
    assert len(answers[0]) == 9
