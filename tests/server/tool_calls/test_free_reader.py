"""What models write where they are free to call tools is read as calls, however it is cut; the rest stays text."""

import json
import random
from typing import get_args

import pytest
from tool_texts import BROKEN, NAMES, RECORDED, Recorded

from kvtier.engine.config import ConfigError, ToolCallParser, as_config
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, ReadAnswer, TextDelta, read_whole
from kvtier.server.tool_calls.families import SYNTAXES
from kvtier.server.tool_calls.free_reader import FreeReader

ALL = [pytest.param(name, each, id=f"{name}: {each}") for name, those in RECORDED.items() for each in those]


def read(family: str, *pieces: str, **options: bool) -> tuple[ReadAnswer, list[Delta]]:
    """What is read of an answer in these pieces, and the deltas that told it."""
    reader = FreeReader(SYNTAXES[family], NAMES, **options)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.end()
    answer = ReadAnswer()
    answer.add(deltas)
    return answer, deltas


def said(answer: ReadAnswer) -> tuple[list[tuple[str, str]], str]:
    return [(call.name, call.arguments) for call in answer.calls], answer.text


@pytest.mark.parametrize(("family", "recorded"), ALL)
def test_calls_are_read_and_the_rest_is_text(family: str, recorded: Recorded) -> None:
    answer = read_whole(FreeReader(SYNTAXES[family], NAMES), recorded.text)

    assert said(answer) == (recorded.calls, recorded.content)
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)


@pytest.mark.parametrize(("family", "recorded"), ALL)
def test_it_makes_no_difference_where_an_answer_is_cut(family: str, recorded: Recorded) -> None:
    text = recorded.text

    for place in range(len(text) + 1):
        assert said(read(family, text[:place], text[place:])[0]) == (recorded.calls, recorded.content), place
    assert said(read(family, *text)[0]) == (recorded.calls, recorded.content)
    for seed in range(20):
        pick = random.Random(seed)
        places = sorted(pick.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert said(read(family, *pieces)[0]) == (recorded.calls, recorded.content), seed


@pytest.mark.parametrize(("family", "recorded"), ALL)
def test_a_call_is_told_once_and_in_order(family: str, recorded: Recorded) -> None:
    _, deltas = read(family, *recorded.text)

    begun = [delta for delta in deltas if isinstance(delta, CallBegin)]
    assert [(delta.index, delta.name) for delta in begun] == list(enumerate(name for name, _ in recorded.calls))
    for at, delta in enumerate(deltas):
        if isinstance(delta, ArgumentsDelta):
            assert CallBegin(delta.index, recorded.calls[delta.index][0]) in deltas[:at]
        assert not isinstance(delta, TextDelta) or delta.text


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("family", SYNTAXES)
def test_what_is_no_call_stays_text_wherever_it_is_cut(family: str, broken: str) -> None:
    for marker in ("", *SYNTAXES[family].markers):
        text = f"{marker}{BROKEN[broken]} So."
        places = range(len(text) + 1) if len(text) < 200 else range(0, len(text) + 1, 97)

        whole, _ = read(family, text)

        assert said(whole) == ([], text)
        for place in places:
            assert said(read(family, text[:place], text[place:])[0]) == ([], text), place


@pytest.mark.parametrize("family", SYNTAXES)
def test_no_half_of_a_marker_is_told_as_text(family: str) -> None:
    for marker in SYNTAXES[family].markers:
        reader = FreeReader(SYNTAXES[family], NAMES)
        told = [delta for character in f"Yes, {marker}" for delta in reader.push(character)]
        assert "".join(delta.text for delta in told if isinstance(delta, TextDelta)) == "Yes,"


@pytest.mark.parametrize("family", SYNTAXES)
def test_text_is_told_as_it_comes(family: str) -> None:
    reader = FreeReader(SYNTAXES[family], NAMES)

    told = [reader.push(piece) for piece in ("Well", ", it", " is\n", "7.")]

    assert told == [[TextDelta("Well")], [TextDelta(", it")], [TextDelta(" is")], [TextDelta("\n7.")]]


def test_an_answer_in_json_is_held_back_no_longer_than_it_may_be_a_call() -> None:
    reader = FreeReader(SYNTAXES["llama3_json"], NAMES)

    told = [reader.push(piece) for piece in ('{"', "na", "t", "ion")]

    assert told == [[], [], [TextDelta('{"nat')], [TextDelta("ion")]]


def test_without_parallel_calls_the_first_one_is_told() -> None:
    (two,) = (each for each in RECORDED["hermes"] if each.name == "two")

    answer, _ = read("hermes", *two.text, is_parallel=False)

    assert said(answer) == (two.calls[:1], "")


def test_a_long_call_is_read_in_a_time_that_grows_with_its_length() -> None:
    """Each character is looked at once: a call of a megabyte, token by token, takes about a second."""
    arguments = json.dumps({"text": 'a "b" {' * 30_000})
    reader = FreeReader(SYNTAXES["hermes"], NAMES)
    text = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
    pieces = [text[at : at + 40] for at in range(0, len(text), 40)]

    deltas = [delta for piece in pieces for delta in reader.push(piece)]

    assert deltas == [CallBegin(0, "search"), ArgumentsDelta(0, arguments)]


def test_the_families_are_those_that_the_configuration_names() -> None:
    assert tuple(SYNTAXES) == get_args(ToolCallParser)
    assert as_config({"server": {"tool_call_parser": "mistral"}}).server.tool_call_parser == "mistral"
    with pytest.raises(ConfigError, match=r"tool_call_parser: Invalid enum value 'x'; use one of hermes, .*, json"):
        as_config({"server": {"tool_call_parser": "x"}})
