"""SamplingParams: mistakes are refused by name."""

import pytest

from kvtier.engine.model.sampling import InvalidParameter, SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": "half a pair \ud800"},
        {"stop": ["a", b"b"]},
        {"top_k": 2.5},
        {"logprobs": 1.5},
        {"max_tokens": float("inf")},
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"min_tokens": -1},
        {"min_tokens": 1.5},
        {"min_tokens": 17},
        {"bad_words": ["a", ""]},
        {"bad_words": " "},
        {"bad_words": ["half a pair \ud800"]},
    ],
)
def test_a_parameter_out_of_range_is_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*; "):
        SamplingParams(**wrong)


def test_a_wrong_parameter_says_its_name():
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(min_p=2)

    assert error.value.name == "min_p"


def test_a_bias_beyond_100_counts_as_100():
    params = SamplingParams(logit_bias={1: 250.0, 2: -float("inf"), 3: 5})

    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 5}


def test_what_is_changed_later_in_a_bias_that_was_given_changes_nothing():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)

    bias[2] = 1.0

    assert params.logit_bias == {1: 1.0}


def test_equal_parameters_can_be_counted_in_a_set():
    assert len({SamplingParams(logit_bias={1: 2.0}, bad_words=["a"]) for _ in range(2)}) == 1


def test_stop_takes_one_string_or_several():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words="a").bad_words == ("a",)
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
