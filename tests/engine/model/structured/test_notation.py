"""Schemas reach llguidance such that a text is valid by them: integers as they are, and nothing is left out unsaid."""

import json
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from small_models import byte_tokenizer

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.exact_integers import integer_range
from kvtier.engine.model.structured.notation import Notation, limits, notation
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

BIG = (1 << 53) + 1
LOW, HIGH = -(1 << 63), (1 << 63) - 1
ALPHABET = byte_tokenizer()


# As pydantic 2.12 describes a Decimal.
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}


def of(schema: object, *, strict: bool) -> Notation:
    return notation(StructuredOutputs(json=schema, strict=strict, parameter_name="response_format"))


def takes(found: Notation, text: str) -> bool:
    """Whether the grammar has the text."""
    tokens = LLTokenizer(ALPHABET.backend_tokenizer.to_str(), n_vocab=257, eos_token=0)
    matcher = LLMatcher(tokens, found.text, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    token_ids = ALPHABET(text)["input_ids"]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_integers_between_bounds_are_those_of_the_expression() -> None:
    rng = random.Random(1)
    for _ in range(100):
        low, high = sorted(rng.randrange(-1300, 1300) for _ in range(2))
        bounds = (rng.choice([low, low, None]), rng.choice([high, high, None]))
        expression = re.compile(integer_range(*bounds))
        for number in range(-1500, 1501):
            is_within = (bounds[0] is None or bounds[0] <= number) and (bounds[1] is None or number <= bounds[1])
            assert (expression.fullmatch(str(number)) is not None) == is_within, (bounds, number)
        assert not any(expression.fullmatch(text) for text in ("-0", "007", "-01", ""))


def test_bounds_of_many_digits_are_exact() -> None:
    expression = re.compile(integer_range(LOW, HIGH))

    assert all(expression.fullmatch(str(number)) for number in (LOW, LOW + 1, -1, 0, 10**18, HIGH))
    assert not any(expression.fullmatch(str(number)) for number in (LOW - 1, HIGH + 1, 10**19, -(10**19)))


NODE = {
    "type": "object",
    "properties": {"v": {"const": BIG}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
EXACT: list[tuple[dict[str, Any], Sequence[str], Sequence[str]]] = [
    ({"const": BIG}, [str(BIG)], [str(BIG - 1)]),
    ({"enum": [BIG, "a"], "title": "A"}, [str(BIG), '"a"'], [str(BIG - 1)]),
    ({"const": {"a": [BIG, 'q"\n']}}, ['{"a":[9007199254740993,"q\\"\\n"]}'], ['{"a":[9007199254740992,"q\\"\\n"]}']),
    ({"type": "integer", "exclusiveMinimum": BIG}, [str(BIG + 1)], [str(BIG)]),
    (
        {"type": "integer", "minimum": LOW, "maximum": HIGH, "format": "int64"},
        [str(LOW), "0", str(HIGH)],
        [str(HIGH + 1)],
    ),
    ({"type": ["integer", "null"], "minimum": LOW}, ["null", str(LOW)], [str(LOW - 1), '"a"']),
    ({"anyOf": [{"type": "integer", "minimum": HIGH}, {"type": "null"}]}, ["null", str(HIGH)], [str(HIGH - 1)]),
    (
        {
            "type": "object",
            "properties": {"a": {"const": BIG}, "b": {"type": "string"}, "c": {"type": "integer", "maximum": HIGH}},
            "required": ["c"],
        },
        [f'{{"a":{BIG},"b":"x","c":1}}', f'{{ "c" : {HIGH} }}', '{"b": "", "c":0}', f'{{"a":{BIG},"c":1}}'],
        ["{}", '{"b":"x"}', f'{{"c":{HIGH + 1}}}', '{"c":1,"b":"x"}', '{"c":1,}', '{,"c":1}'],
    ),
    ({"type": "object", "properties": {"a": {"const": BIG}}}, ["{}", "{ }", f'{{"a":{BIG}}}'], ["", '{"a":1}']),
    ({"type": "array", "items": {"const": BIG}}, ["[]", "[ ]", f"[{BIG}]", f"[{BIG}, {BIG}]"], [f"[{BIG},]", "[1]"]),
    (
        {"type": "array", "items": {"const": BIG}, "minItems": 2, "maxItems": 3},
        [f"[{BIG},{BIG}]", f"[{BIG},{BIG},{BIG}]"],
        ["[]", f"[{BIG}]", f"[{BIG},{BIG},{BIG},{BIG}]"],
    ),
    (
        {"type": "array", "prefixItems": [{"const": BIG}, {}], "minItems": 2, "maxItems": 2},
        [f"[{BIG},[1]]"],
        [f"[{BIG}]"],
    ),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [f'{{"v":{BIG},"next":{{"v":{BIG},"next":null}}}}'],
        ["{}", f'{{"v":{BIG - 1},"next":null}}'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=[json.dumps(schema)[:50] for schema, _, _ in EXACT])
def test_integers_that_doubles_do_not_have_are_exact(schema: dict, good: Sequence[str], bad: Sequence[str]) -> None:
    found = of(schema, strict=True)

    assert [takes(found, text) for text in good] == [True] * len(good)
    assert [takes(found, text) for text in bad] == [False] * len(bad)
    for text in good:
        jsonschema.validate(json.loads(text), schema)
    assert found.left_out == []


# What no grammar has: the keyword's place, a text that is valid, and one that is not even by what is left.
LEFT_OUT: list[tuple[dict[str, Any], list[str], str, str]] = [
    ({"type": "string", "pattern": "^(?=a).{1,3}$", "maxLength": 5}, ["pattern"], '"abcd"', '"abcdef"'),
    ({"type": "string", "pattern": r"\bfoo\b"}, ["pattern"], '"foo"', "1"),
    ({"type": "string", "pattern": r"^(a)\1$"}, ["pattern"], '"aa"', "1"),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["minimum", "maximum"], "-1.5", '"a"'),
    ({"type": "number", "minimum": 0, "maximum": 1e20}, ["maximum"], "1.5", "-1.5"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["uniqueItems"], "[1]", '["a"]'),
    ({"type": "string", "format": "post-code"}, ["format"], '"a"', "1"),
    ({"type": "string", "minLength": 10**10}, ["minLength"], '"a"', "1"),
    ({"properties": {"a": {"not": {"type": "null"}}}, "type": "object"}, ["properties.a.not"], '{"a":1}', "[]"),
    ({"type": "object", "patternProperties": {"^(?=a)": {}}}, ["patternProperties.^(?=a)"], '{"a":1}', "[]"),
    ({"type": "object", "patternProperties": {"a": {"const": BIG}}}, ["patternProperties.a.const"], '{"a":1}', "[]"),
    ({"anyOf": [{"multipleOf": 10**20, "type": "integer"}]}, ["anyOf[0].multipleOf"], "7", '"a"'),
]


@pytest.mark.parametrize(("schema", "places", "good", "bad"), LEFT_OUT, ids=[str(each[1]) for each in LEFT_OUT])
def test_what_no_grammar_has_is_left_out_and_named(schema: dict, places: list[str], good: str, bad: str) -> None:
    found = of(schema, strict=False)

    assert found.left_out == [f"response_format.{place}" for place in places]
    assert (takes(found, good), takes(found, bad)) == (True, False)


@pytest.mark.parametrize(("schema", "places"), [each[:2] for each in LEFT_OUT], ids=[str(each[1]) for each in LEFT_OUT])
def test_strict_schemas_with_it_are_refused_by_name(schema: dict, places: list[str]) -> None:
    with pytest.raises(InvalidParameter) as wrong:
        of(schema, strict=True)

    named = ", ".join(f"response_format.{place}" for place in places)
    assert str(wrong.value) == f"response_format cannot enforce {named}; leave it out, or set strict to false"


def test_a_schema_of_pydantics_decimal_is_used() -> None:
    found = of({"type": "object", "properties": {"amount": DECIMAL}, "required": ["amount"]}, strict=False)

    assert [takes(found, text) for text in ('{"amount": 1.5}', '{"amount":"1"}', "{}")] == [True, True, False]
    assert found.left_out == ["response_format.properties.amount.anyOf[1].pattern"]


@pytest.mark.parametrize("strict", [False, True])
def test_keywords_that_are_null_are_not_there(strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1], "pattern": None}}, "required": None}

    found = of(schema, strict=strict)

    assert (takes(found, '{"a":null}'), takes(found, '{"a":2}'), found.left_out) == (True, False, [])
    of_null = of({"const": None}, strict=strict)
    assert [takes(of_null, text) for text in ("null", "1")] == [True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": [1], "required": ["a"], "anyOf": [{"const": BIG}]},
        {"type": "object", "properties": {"a": {"const": BIG}}, "required": [{}]},
        {"type": "object", "properties": {"a": {"const": BIG}, "b": 7}, "minProperties": "1"},
        {"type": "integer", "minimum": "1", "maximum": BIG},
        {"type": "array", "items": {"const": BIG}, "maxItems": "3"},
        {"$ref": 7, "const": BIG},
        {"format": [], "uniqueItems": True},
        {"patternProperties": {"(": {}}, "minLength": {}},
    ],
    ids=str,
)
def test_a_schema_of_no_schemas_shape_ends_in_a_grammar_or_a_sentence(schema: dict) -> None:
    for strict in (False, True):
        with suppress(InvalidParameter):  # and no other error
            assert of(schema, strict=strict).text


def test_schemas_in_a_grammar_are_treated_likewise() -> None:
    lenient = json.dumps(
        {"type": "string", "pattern": "(?=a)", "x-guidance": {"lenient": True}, "$comment": "tools.f."}
    )
    exact = json.dumps({"const": BIG})
    text = f'start: "<" one "," two ">" | "%json {{"\none: %json {exact}\ntwo: %json{lenient}'

    found = notation(StructuredOutputs(grammar=text))

    assert (takes(found, f'<{BIG},"b">'), takes(found, f'<{BIG - 1},"b">'), takes(found, "%json {")) == (
        True,
        False,
        True,
    )
    assert found.left_out == ["tools.f.pattern"]
    with pytest.raises(InvalidParameter, match="cannot enforce pattern"):
        notation(StructuredOutputs(grammar='start: %json {"type": "string", "pattern": "(?=a)"}'))
