"""500 answers of SmolLM2-135M, a trained model, by four schemas: every one parses and validates."""

import json
from collections.abc import Iterator

import jsonschema
import pytest

from kvtier import LLM, FinishReason, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.slow

NUM_ANSWERS = 500
SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"enum": ["é", 'a"b', "\\"]}]},
    },
    {
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        },
        "required": ["date", "code"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "word": {
                "type": "object",
                "properties": {"word": {"type": "string", "maxLength": 8}, "is_noun": {"type": "boolean"}},
                "required": ["word"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/word"}, "second": {"$ref": "#/$defs/word"}},
        "required": ["second"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"device": {"capacity": "512MiB", "block_size": 16}, "host": {"capacity": 0}}
    try:
        llm = LLM("smollm2", config)
    except ValueError as error:  # neither this wheel nor what reads it is needed for anything else
        pytest.skip(str(error))
    with llm:
        yield llm


def test_every_answer_of_a_trained_model_is_valid(llm: LLM) -> None:
    for seed in range(NUM_ANSWERS // 20):
        schema = SCHEMAS[seed % len(SCHEMAS)]
        prompts = [f"Question {seed}.{number}: describe a person, a day or a word as JSON.\n" for number in range(20)]
        params = SamplingParams(
            max_tokens=200, temperature=1.0, seed=seed, structured_outputs=StructuredOutputs(json=schema)
        )

        for completion in llm.generate(prompts, params, progress=False):
            assert completion.finish_reason == FinishReason.STOP
            jsonschema.validate(
                json.loads(completion.text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
