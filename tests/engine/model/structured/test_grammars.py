"""Grammars: what is asked for as a schema, an expression, choices or a grammar is what comes out, with any logits."""

import json
import re
import sys
from collections.abc import Sequence

import jsonschema
import pytest
import torch
from small_models import VOCAB, byte_tokenizer

from kvtier.engine.model.drawing.draws import sample_tokens
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.drawing.token_bans import NO_BANS, TokenBans
from kvtier.engine.model.sampling import InvalidParameter, SamplingParams
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
END = TOKENIZER("~")["input_ids"][0]  # the model's end token is one that texts may have
STOP = TOKENIZER("}")["input_ids"][0]
WORD = StructuredOutputs(regex="[a-e]+")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, frozenset([END]))


def sampler_of(
    grammars: Grammars,
    asked: StructuredOutputs,
    ends: Sequence[int] = (END,),
    bans: TokenBans = NO_BANS,
    **params: object,
) -> Sampler:
    return Sampler(SamplingParams(**params), (), bans, grammars.compile(asked).begin(ends))


def text_of(grammars: Grammars, asked: StructuredOutputs, seed: int) -> str:
    """A text that random logits give, up to its end; 400 tokens are enough for all that is asked for here."""
    sampler = sampler_of(grammars, asked, temperature=1.0, seed=seed)
    source = torch.Generator().manual_seed(seed)
    token_ids = []
    for _ in range(400):
        [token_id] = sample_tokens(3 * torch.randn(1, VOCAB, generator=source), [sampler])
        if token_id == END:
            break
        token_ids.append(token_id)
        if sampler.grammar.is_complete:
            break
    else:
        raise AssertionError("it did not end")
    return TOKENIZER.decode(token_ids)


def favoured(*texts: str) -> torch.Tensor:
    """Logits, of which those of these characters are the largest, in this order."""
    logits = torch.zeros(1, VOCAB)
    for place, text in enumerate(texts):
        logits[0, TOKENIZER(text)["input_ids"]] = 20.0 - place
    return logits


def drawn(sampler: Sampler, logits: torch.Tensor) -> str:
    return TOKENIZER.decode(sample_tokens(logits, [sampler]))


@pytest.mark.parametrize("seed", range(10))
def test_json_is_valid_by_its_schema(grammars: Grammars, seed: int) -> None:
    jsonschema.validate(json.loads(text_of(grammars, StructuredOutputs(json=PERSON), seed)), PERSON)


def test_a_text_matches_its_expression_as_a_whole(grammars: Grammars) -> None:
    expression = r"[a-z]{2,5}/\d+ ~?"

    texts = [text_of(grammars, StructuredOutputs(regex=expression), seed) for seed in range(8)]

    assert all(re.fullmatch(expression, text, re.ASCII) for text in texts)


def test_a_text_is_one_of_its_choices(grammars: Grammars) -> None:
    choices = ["yes", "yes, but", 'a "quote"\n', "\\d", "naïve", "🙂 smile", "/"]

    found = {text_of(grammars, StructuredOutputs(choice=choices), seed) for seed in range(60)}

    assert found == set(choices)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" b+ "."\nb: "c" | "dd"', 'root ::= "a" b+ "."\nb ::= "c" | "dd"'],
    ids=["lark", "gbnf"],
)
def test_a_text_is_of_its_grammar(grammars: Grammars, grammar: str) -> None:
    texts = [text_of(grammars, StructuredOutputs(grammar=grammar), seed) for seed in range(5)]

    assert all(re.fullmatch(r"a(c|dd)+\.", text) for text in texts)


def test_a_token_that_ends_the_text_is_drawn_where_the_text_may_end_and_nowhere_else(grammars: Grammars) -> None:
    sampler = sampler_of(grammars, StructuredOutputs(regex="ab~c?"))

    assert [drawn(sampler, favoured("~", "a", "b", "c")) for _ in range(2)] == ["a", "b"]
    assert sampler.grammar.has_failed is False
    # Here the grammar wants the very character that is the model's end token: nothing can be drawn.
    drawn(sampler, favoured("~"))
    assert sampler.grammar.has_failed


def test_where_a_text_may_end_the_likelier_of_end_and_more_is_drawn(grammars: Grammars) -> None:
    sampler = sampler_of(grammars, WORD)

    assert [drawn(sampler, favoured("a", "~")), drawn(sampler, favoured("a", "~"))] == ["a", "a"]
    assert drawn(sampler, favoured("~", "a")) == "~"


def test_without_a_token_that_ends_it_a_text_goes_on_as_long_as_it_may(grammars: Grammars) -> None:
    sampler = sampler_of(grammars, StructuredOutputs(regex="[a-e]{1,3}"), ends=())

    assert [drawn(sampler, favoured("~", "c")) for _ in range(3)] == ["c", "c", "c"]
    assert sampler.grammar.is_complete


def test_a_stop_token_may_be_part_of_the_text(grammars: Grammars) -> None:
    sampler = sampler_of(grammars, StructuredOutputs(regex="a}b"), ends=[STOP, END])

    assert [drawn(sampler, favoured("}", "a")) for _ in range(2)] == ["a", "}"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_give_a_text_of_the_grammar(
    grammars: Grammars, bad: float, temperature: float
) -> None:
    sampler = sampler_of(grammars, StructuredOutputs(choice=["abc"]), temperature=temperature, seed=1)

    assert [drawn(sampler, torch.full((1, VOCAB), bad)) for _ in range(3)] == ["a", "b", "c"]


def test_what_is_banned_is_drawn_where_a_grammar_allows_nothing_else(grammars: Grammars) -> None:
    banned = TokenBans(bad_words=(tuple(TOKENIZER("b")["input_ids"]),))
    sampler = sampler_of(grammars, StructuredOutputs(regex="a[bc]b"), bans=banned)

    assert [drawn(sampler, favoured("b", "c")) for _ in range(3)] == ["a", "c", "b"]


def test_bias_and_penalties_choose_among_what_is_allowed(grammars: Grammars) -> None:
    [e] = TOKENIZER("e")["input_ids"]
    biased = sampler_of(grammars, WORD, logit_bias={e: 50.0})
    penalised = sampler_of(grammars, WORD, frequency_penalty=2.0)

    assert drawn(biased, favoured("a")) == "e"
    assert [drawn(penalised, favoured("a", "c")) for _ in range(2)] == ["a", "c"]


def test_rows_with_and_without_grammars_are_drawn_in_one_step_as_alone(grammars: Grammars) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))

    def samplers() -> list[Sampler]:
        return [
            Sampler(SamplingParams(temperature=1.0, seed=1)),
            sampler_of(grammars, WORD, temperature=1.0, seed=2),
            Sampler(SamplingParams()),
            sampler_of(grammars, StructuredOutputs(choice=["x", "yz"])),
        ]

    alone = [sample_tokens(row[None], [sampler])[0] for row, sampler in zip(logits, samplers(), strict=True)]

    assert sample_tokens(logits, samplers()) == alone


def test_equal_grammars_are_compiled_once_and_followed_apart(grammars: Grammars) -> None:
    first, second = (grammars.compile(StructuredOutputs(json=text)) for text in (PERSON, json.dumps(PERSON)))
    one, other = first.begin([END]), first.begin([END])

    one.on_drawn(TOKENIZER("{")["input_ids"][0])
    [token_id] = sample_tokens(favoured('"', "{"), [Sampler(SamplingParams(), grammar=other)])

    assert first is second
    assert TOKENIZER.decode(token_id) == "{"


def test_a_model_may_have_fewer_tokens_than_its_tokenizer_or_more() -> None:
    for size in (VOCAB - 20, VOCAB + 40):
        grammars = Grammars(TOKENIZER, size, frozenset([END]))
        sampler = sampler_of(grammars, StructuredOutputs(regex="[a-e]{5}"), temperature=1.0, seed=1)
        token_ids = [sample_tokens(torch.zeros(1, size), [sampler])[0] for _ in range(5)]

        assert re.fullmatch("[a-e]{5}", TOKENIZER.decode(token_ids))


def test_blanks_between_parts_of_json_come_to_an_end(grammars: Grammars) -> None:
    sampler = sampler_of(grammars, StructuredOutputs(json_object=True))

    text = "".join(drawn(sampler, favoured(" ", "{", "}", "~")) for _ in range(40))

    assert text == "{" + " " * 32 + "}" + "~" * 6


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    grammars = Grammars(TOKENIZER, VOCAB, frozenset())

    grammars.prepare()
    with pytest.raises(
        InvalidParameter, match=r"^response_format needs llguidance; pip install 'kvtier\[structured\]'$"
    ):
        grammars.compile(StructuredOutputs(json_object=True, parameter_name="response_format"))
