"""Grammars: what is asked for as a schema, an expression, choices or a grammar is what comes out, with any logits."""

import json
import re

import jsonschema
import pytest
import torch
from small_models import VOCAB, byte_tokenizer

from kvtier.engine.model.drawing.draws import draw_tokens
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.sampling import SamplingParams, WrongParameter
from kvtier.engine.model.structured.grammars import Grammars
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOKENIZER = byte_tokenizer()
END = 0  # the id of a byte that no text here has


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, frozenset([END]))


def text_of(grammars: Grammars, asked: StructuredOutputs, seed: int, **params: object) -> str:
    """A text that random logits give, up to its end; 400 tokens are enough for all that is asked for here."""
    sampler = Sampler(
        SamplingParams(temperature=1.0, seed=seed, **params), (), grammar=grammars.compile(asked).begin([END])
    )
    source = torch.Generator().manual_seed(seed)
    token_ids = []
    for _ in range(400):
        [token_id] = draw_tokens(3 * torch.randn(1, VOCAB, generator=source), [sampler])
        if token_id == END:
            break
        token_ids.append(token_id)
        if sampler.grammar.is_complete:
            break
    else:
        raise AssertionError("it did not end")
    return TOKENIZER.decode(token_ids)


@pytest.mark.parametrize("seed", range(10))
def test_json_is_valid_by_its_schema(grammars: Grammars, seed: int):
    jsonschema.validate(json.loads(text_of(grammars, StructuredOutputs(json=PERSON), seed)), PERSON)


@pytest.mark.parametrize("seed", range(5))
def test_a_text_matches_its_expression_as_a_whole(grammars: Grammars, seed: int):
    expression = r"[a-z]{2,5}/\d+"

    assert re.fullmatch(expression, text_of(grammars, StructuredOutputs(regex=expression), seed), re.ASCII)


def test_a_text_is_one_of_its_choices(grammars: Grammars):
    choices = ["yes", "yes, but", 'a "quote"\n', "\\d", "naïve", "🙂 smile", "/"]

    found = {text_of(grammars, StructuredOutputs(choice=choices), seed) for seed in range(60)}

    assert found == set(choices)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" b+ "."\nb: "c" | "dd"', 'root ::= "a" b+ "."\nb ::= "c" | "dd"'],
    ids=["lark", "gbnf"],
)
def test_a_text_is_of_its_grammar(grammars: Grammars, grammar: str):
    texts = [text_of(grammars, StructuredOutputs(grammar=grammar), seed) for seed in range(5)]

    assert all(re.fullmatch(r"a(c|dd)+\.", text) for text in texts)


def test_what_cannot_be_compiled_is_the_callers_mistake(grammars: Grammars):
    with pytest.raises(WrongParameter, match="response_format cannot be used"):
        grammars.compile(StructuredOutputs(json={"type": "nothing"}, asked_as="response_format"))
