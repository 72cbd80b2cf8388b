"""How far answers are from each other, and how they are read from a stream."""

import json
import math

import pytest

from kvtier.cli.prove.answer import Answer, Step, distance
from kvtier.cli.prove.completion_stream import CompletionStream


def answer(*steps: tuple[str, dict[str, float]], text: str = "") -> Answer:
    return Answer(text, tuple(Step(*step) for step in steps), None, None, 0.0)


def test_it_is_the_largest_difference_of_any_listed_token() -> None:
    one = answer(("a", {"a": -0.5, "b": -1.0}), ("c", {"c": -0.1, "d": -3.0}))
    other = answer(("a", {"a": -0.6, "b": -1.0}), ("c", {"c": -0.1, "d": -3.4}))

    assert distance(one, other) == pytest.approx(0.4)
    assert distance(one, one) == 0


def test_what_comes_behind_the_first_token_that_differs_does_not_count() -> None:
    one = answer(("a", {"a": -0.69, "b": -0.70}), ("c", {"c": -0.1, "d": -3.0}))
    other = answer(("b", {"a": -0.70, "b": -0.69}), ("d", {"c": -5.0, "d": -0.1}))

    assert distance(one, other) == pytest.approx(0.01)


def test_a_token_that_only_one_list_has_is_compared_with_the_least_of_the_other() -> None:
    one = answer(("a", {"a": -0.2, "b": -2.0}))
    other = answer(("a", {"a": -0.2, "c": -3.0}))

    assert distance(one, other) == distance(other, one) == pytest.approx(1.0)


def test_next_to_impossible_tokens_are_equally_impossible() -> None:
    one = answer(("a", {"a": 0.0, "b": -12.0}))
    other = answer(("a", {"a": 0.0, "b": -9999.0}))

    assert distance(one, other) == 0


def test_a_text_that_several_tokens_have_is_not_compared_and_ends_the_comparison() -> None:
    one = answer(("\ufffd", {"\ufffd": -0.1, "b": -3.0}), ("c", {"c": -0.1}))
    other = answer(("\ufffd", {"\ufffd": -2.0, "b": -3.1}), ("c", {"c": -7.0}))

    assert distance(one, other) == pytest.approx(0.1)


def test_what_is_no_number_is_as_far_as_can_be() -> None:
    assert distance(answer(("a", {"a": math.nan})), answer(("a", {"a": -0.1}))) == math.inf


def test_without_log_probabilities_texts_are_compared() -> None:
    assert distance(answer(text="yes"), answer(text="yes")) == 0
    assert distance(answer(text="yes"), answer(text="no")) == math.inf
    assert distance(answer(), answer()) is None


def streamed(*events: object) -> Answer:
    stream = CompletionStream(asked_at=10.0)
    for number, event in enumerate(events):
        stream.add(f"data: {json.dumps(event)}", 11.0 + number)
    stream.add("", 99.0)
    stream.add("data: [DONE]", 99.0)
    return stream.answer()


def test_a_stream_of_completions_is_put_together() -> None:
    logprobs = {"tokens": [" a"], "token_logprobs": [-0.1], "top_logprobs": [{" a": -0.1, " b": -2.5}]}
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}

    found = streamed(
        {"choices": [{"text": "", "logprobs": None}], "usage": None},
        {"choices": [{"text": " a", "logprobs": logprobs}]},
        {"choices": [{"text": " a", "logprobs": logprobs, "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    )

    assert found == Answer(" a a", (Step(" a", {" a": -0.1, " b": -2.5}),) * 2, 7, 4, 2.0)


def test_log_probabilities_may_come_as_those_of_chats() -> None:
    top = [{"id": 5, "token": " a", "logprob": -0.1}, {"id": 6, "token": " b", "logprob": -2.5}]
    content = [{"id": 5, "token": " a", "logprob": -0.1, "top_logprobs": top}]

    found = streamed({"choices": [{"text": " a", "logprobs": {"content": content}}]})

    assert found.steps == (Step(" a", {" a": -0.1, " b": -2.5}),)
    assert (found.prompt_tokens, found.cached_tokens) == (None, None)


def test_what_is_no_number_comes_as_null() -> None:
    logprobs = {"tokens": [" a"], "token_logprobs": [None], "top_logprobs": [{" a": None}]}

    found = streamed({"choices": [{"text": " a", "logprobs": logprobs}]})

    assert distance(found, found) == math.inf


@pytest.mark.parametrize("events", [[], [{"choices": []}], [{"usage": {}}], ["text"]])
def test_what_is_no_stream_of_completions_is_an_error(events: list[object]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        streamed(*events)
