"""What a grammar has had written is what its family writes, by schema, and is read while it comes."""

import json
import random
from itertools import pairwise

import pytest
from small_models import byte_tokenizer
from tokenizers import AddedToken
from tool_texts import NAMES, PARIS, ROME
from transformers import PreTrainedTokenizerFast

from kvtier.engine.model.structured.grammars import Grammars
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.server.tool_calls.call_grammar import CallGrammar
from kvtier.server.tool_calls.call_syntax import CallShape
from kvtier.server.tool_calls.deltas import ArgumentsDelta, ReadAnswer, TextDelta, read_whole
from kvtier.server.tool_calls.families import SYNTAXES
from kvtier.server.tool_calls.free_reader import FreeReader
from kvtier.server.tool_calls.shaped_reader import ShapedReader
from kvtier.server.tool_calls.tool import Function

MARK, END = "[TOOL_CALLS]", "<end>"
MARK_ID = 256  # behind the bytes
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    Function("get_weather", None, CITY),
    Function("search"),
    Function("get", None, {"$ref": "#/$defs/A", "$defs": {"A": CITY}}),
]
GOOD = [("get_weather", PARIS), ("search", "{}"), ("get", PARIS)]
ANSWER = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.add_tokens([AddedToken(text, special=True) for text in (MARK, END)], special_tokens=True)
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer: PreTrainedTokenizerFast) -> Grammars:
    return Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.convert_tokens_to_ids(END)]))


def written(shape: CallShape, *calls: tuple[str, str]) -> str:
    each = [f"{shape.before}{name}{shape.between}{arguments}{shape.after}" for name, arguments in calls]
    return shape.opening + shape.separator.join(each) + shape.closing


def takes(grammars: Grammars, tokenizer: PreTrainedTokenizerFast, grammar: str, text: str) -> bool:
    """Whether the text is one of the grammar's."""
    matcher = grammars.compile(StructuredOutputs(grammar=grammar)).start.deep_copy()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def grammar_of(family: str, *, is_parallel: bool = True) -> CallGrammar:
    return CallGrammar(SYNTAXES[family].shape, FUNCTIONS, {MARK: MARK_ID}, is_parallel=is_parallel)


@pytest.mark.parametrize("family", SYNTAXES)
def test_a_forced_answer_is_calls_by_their_schemas(
    family: str, grammars: Grammars, tokenizer: PreTrainedTokenizerFast
) -> None:
    shape = SYNTAXES[family].shape
    several, one = grammar_of(family).forced(), grammar_of(family, is_parallel=False).forced()

    assert takes(grammars, tokenizer, several, written(shape, *GOOD))
    assert takes(grammars, tokenizer, several, written(shape, *GOOD) + "\n")
    assert takes(grammars, tokenizer, one, written(shape, GOOD[0]))
    for text in ("", "Hello", written(shape, ("get_weather", "{}")), written(shape, ("rm", "{}"))):
        assert not takes(grammars, tokenizer, several, text)
    assert not takes(grammars, tokenizer, several, written(shape, ("get", '{"city": 7}')))
    assert not takes(grammars, tokenizer, several, written(shape, ("search", "[]")))
    assert not takes(grammars, tokenizer, one, written(shape, *GOOD))


@pytest.mark.parametrize("family", SYNTAXES)
def test_a_free_answer_is_any_text_but_a_call_that_is_none(
    family: str, grammars: Grammars, tokenizer: PreTrainedTokenizerFast
) -> None:
    syntax, shape = SYNTAXES[family], SYNTAXES[family].shape
    free = grammar_of(family).free_except_json() if syntax.is_bare else grammar_of(family).free(syntax.markers[0])
    before = "" if syntax.is_bare else "So:\n"

    for text in ("", "Hello, <b>.\n", before + written(shape, *GOOD)):
        assert takes(grammars, tokenizer, free, text), text
    assert not takes(grammars, tokenizer, free, before + written(shape, ("get", "{}")))
    assert not takes(grammars, tokenizer, free, before + written(shape, GOOD[0]) + " So.")


@pytest.mark.parametrize("family", [name for name, syntax in SYNTAXES.items() if not syntax.is_bare])
def test_an_answer_may_be_json_or_calls(family: str, grammars: Grammars, tokenizer: PreTrainedTokenizerFast) -> None:
    grammar = grammar_of(family).or_json(ANSWER, strict=True)

    assert takes(grammars, tokenizer, grammar, '{"q": 7}')
    assert takes(grammars, tokenizer, grammar, written(SYNTAXES[family].shape, *GOOD))
    assert not takes(grammars, tokenizer, grammar, '{"r": 7}')


@pytest.mark.parametrize("family", SYNTAXES)
def test_it_is_read_wherever_it_is_cut_and_by_the_free_reader_too(family: str) -> None:
    shape = SYNTAXES[family].shape
    calls = [("get_weather", PARIS), ("search", ROME)]
    text = written(shape, *calls)

    for place in range(len(text) + 1):
        reader, answer = ShapedReader(shape), ReadAnswer()
        for piece in (text[:place], text[place:]):
            answer.add(reader.push(piece))
        answer.add(reader.end())
        assert ([(call.name, call.arguments) for call in answer.calls], answer.text) == (calls, ""), place
    free = read_whole(FreeReader(SYNTAXES[family], NAMES), text)
    assert [(call.name, call.arguments) for call in free.calls] == calls


@pytest.mark.parametrize("family", SYNTAXES)
def test_arguments_are_told_as_they_come(family: str) -> None:
    shape = SYNTAXES[family].shape
    reader = ShapedReader(shape)

    told = [delta for character in written(shape, ("search", ROME)) for delta in reader.push(character)]

    assert [delta.text for delta in told if isinstance(delta, ArgumentsDelta)] == list(ROME)


@pytest.mark.parametrize("seed", range(10))
def test_text_before_a_call_is_told_without_the_space_before_it(seed: int) -> None:
    shape = SYNTAXES["hermes"].shape
    text = f"So, <tool_, {{\n\n{written(shape, ('get_weather', PARIS))}\n"
    places = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))
    reader, answer = ShapedReader(shape), ReadAnswer()

    for start, end in pairwise([0, *places, len(text)]):
        answer.add(reader.push(text[start:end]))
    answer.add(reader.end())

    assert (answer.text, [call.name for call in answer.calls]) == ("So, <tool_, {", ["get_weather"])
    assert json.loads(answer.calls[0].arguments) == {"city": "Paris"}


def test_half_a_marker_at_the_end_is_text_unless_a_call_had_to_follow() -> None:
    for said, left in (("Well, <tool_c", [TextDelta(" <tool_c")]), ('Well, <tool_call>\n{"na', [])):
        reader = ShapedReader(SYNTAXES["hermes"].shape, "<tool_call>")
        assert reader.push(said) == [TextDelta("Well,")]
        assert reader.end() == left


@pytest.mark.parametrize("family", SYNTAXES)
def test_a_call_that_is_cut_off_shows_no_markup(family: str) -> None:
    text = written(SYNTAXES[family].shape, ("get_weather", PARIS), ("search", ROME))

    for place in range(len(text)):
        answer = read_whole(ShapedReader(SYNTAXES[family].shape), text[:place])
        assert answer.text == "", text[:place]


@pytest.mark.parametrize(
    ("parameters", "takes_arguments"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": None, "required": None}, False),
        ({"type": "object", "properties": {}, "additionalProperties": False, "title": "F"}, False),
        (CITY, True),
        ({"type": "object", "additionalProperties": True}, True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": CITY}}, True),
    ],
)
def test_a_tool_that_names_no_argument_gets_none(
    grammars: Grammars, tokenizer: PreTrainedTokenizerFast, parameters: dict | None, takes_arguments: bool
) -> None:
    shape = SYNTAXES["hermes"].shape
    grammar = CallGrammar(shape, [Function("f", None, parameters)], {}, is_parallel=False).forced()

    assert takes(grammars, tokenizer, grammar, written(shape, ("f", "{}"))) or takes_arguments
    assert takes(grammars, tokenizer, grammar, written(shape, ("f", '{"city": "Paris"}'))) == takes_arguments
