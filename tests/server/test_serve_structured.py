"""Structured outputs over HTTP: OpenAI's response_format, vLLM's parameters, and the clients that use them."""

import json
import re
from typing import Literal

import jsonschema
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr
from serving import MODEL, ServerInThread, events
from small_models import byte_tokenizer

QUESTION = [{"role": "user", "content": "Who is it?"}]
# A model with random weights likes blanks as well as anything.
NO_BLANKS = {str(byte_tokenizer()(blank)["input_ids"][0]): -100.0 for blank in " \n\r\t"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
KINDS = [
    ({"response_format": FORMAT}, ""),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ""),
    ({"structured_outputs": {"json": SCHEMA}}, ""),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ""),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, ""),
    ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
    ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
    ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
]


class Person(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["poet", "engineer"]
    ages: list[int] = Field(max_length=3)


def asked(**others: object) -> dict[str, object]:
    """The body of a chat."""
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 300, "seed": 1, "logit_bias": NO_BLANKS, **others}


def chat(server: ServerInThread, **others: object) -> list[dict]:
    """The choices of an answer."""
    answer = server.post("/v1/chat/completions", json=asked(**others))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize(("parameters", "expression"), KINDS, ids=lambda each: "-".join(each) if each else "json")
def test_an_answer_is_what_was_asked_for(
    server: ServerInThread, parameters: dict[str, object], expression: str
) -> None:
    [choice] = chat(server, **parameters)

    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    if expression:
        assert re.fullmatch(expression, text)
    else:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_choices_of_one_prompt_are_each_valid(server: ServerInThread) -> None:
    choices = chat(server, response_format=FORMAT, n=4)

    people = [json.loads(choice["message"]["content"]) for choice in choices]
    for person in people:
        jsonschema.validate(person, SCHEMA)
    assert len({json.dumps(person) for person in people}) == 4


def test_any_json_object_is_an_object(server: ServerInThread) -> None:
    for seed in range(3):
        closing = {str(byte_tokenizer()("}")["input_ids"][0]): 6.0}  # or it would go on for long
        [choice] = chat(server, response_format={"type": "json_object"}, seed=seed, logit_bias={**NO_BLANKS, **closing})
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_an_object_without_a_schema_is_any_object(server: ServerInThread) -> None:
    for no_schema in ({}, None):
        [choice] = chat(server, response_format={"type": "json_object", "schema": no_schema})
        assert choice["message"]["content"].startswith("{")


def test_any_text_is_as_without_a_format(server: ServerInThread) -> None:
    with_format, without = (
        chat(server, max_tokens=8, **others) for others in ({"response_format": {"type": "text"}}, {})
    )

    assert with_format == without


def test_a_stream_is_valid_as_a_whole(server: ServerInThread) -> None:
    body = asked(response_format=FORMAT, stream=True)

    chunks = list(events(iter(server.post("/v1/chat/completions", json=body).text.splitlines())))

    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_completions_follow_a_schema_too(server: ServerInThread) -> None:
    others = {"temperature": 1, "seed": 2, "logit_bias": NO_BLANKS, "max_tokens": 200, "logprobs": 1}
    answer = server.complete(["Ada is", "Who?"], response_format=FORMAT, **others)

    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_an_answer_that_max_tokens_cut_says_so(server: ServerInThread) -> None:
    [choice] = chat(server, response_format=FORMAT, max_tokens=5)

    assert choice["finish_reason"] == "length"
    assert '{"name":'.startswith(choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": FORMAT, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "(a?){2000}a{2000}"}, "guided_regex"),
        ({"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
    ],
    ids=["schema", "type", "two", "two of one", "none", "unknown", "costly", "crashing", "no JSON", "no choice"],
)
def test_a_mistake_is_a_400_that_names_its_parameter(
    server: ServerInThread, parameters: dict[str, object], param: str, stream: bool
) -> None:
    answer = server.post("/v1/chat/completions", json=asked(stream=stream, **parameters))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "\n" not in answer.json()["error"]["message"]
    assert server.is_at_rest()


def test_openais_client_parses_an_answer_into_a_model(server: ServerInThread) -> None:
    completion = server.openai().chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Person, seed=3, logit_bias=NO_BLANKS, max_tokens=300
    )

    person = completion.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.kind in ("poet", "engineer")


def test_openais_client_parses_a_stream_into_a_model(server: ServerInThread) -> None:
    with server.openai().chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Person, seed=4, logit_bias=NO_BLANKS, max_tokens=300
    ) as stream:
        completion = stream.get_final_completion()

    assert isinstance(completion.choices[0].message.parsed, Person)


def test_langchain_gives_a_model_by_its_json_schema(server: ServerInThread) -> None:
    llm = ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        seed=5,
        max_tokens=300,
        logit_bias={int(token_id): bias for token_id, bias in NO_BLANKS.items()},
    )

    person = llm.with_structured_output(Person, method="json_schema").invoke("Who is it?")

    assert isinstance(person, Person)


LOOK_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)", "maxLength": 3}}}
LENIENT = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOK_AHEAD}}
NAMED = "response_format.properties.a.pattern"


def test_what_is_not_enforced_is_named_in_the_answer(server: ServerInThread) -> None:
    for path, asked_of in (("/v1/chat/completions", asked()), ("/v1/completions", {"model": MODEL, "prompt": "a"})):
        answer = server.post(path, json={**asked_of, "response_format": LENIENT, "max_tokens": 3})

        assert answer.status_code == 200, answer.text
        assert answer.json()["kvtier"]["left_out"] == [NAMED]
        assert answer.headers["x-kvtier-left-out"] == NAMED
    whole = server.post("/v1/chat/completions", json=asked(response_format=FORMAT, max_tokens=3))
    assert "left_out" not in whole.json()["kvtier"]
    assert "x-kvtier-left-out" not in whole.headers


def test_a_stream_names_it_too(server: ServerInThread) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    answer = server.post("/v1/chat/completions", json=asked(response_format=LENIENT, **stream))

    *_, last = events(iter(answer.text.splitlines()))
    assert answer.headers["x-kvtier-left-out"] == NAMED
    assert last["kvtier"]["left_out"] == [NAMED]


def test_names_that_no_header_may_have_are_encoded(server: ServerInThread) -> None:
    schema = {"type": "object", "properties": {"é\r\nx-evil: 1": {"type": "string", "pattern": "(?=b)"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    answer = server.post("/v1/chat/completions", json=asked(response_format=named, max_tokens=1))

    assert answer.headers["x-kvtier-left-out"] == "response_format.properties.%C3%A9%0D%0Ax-evil%3A%201.pattern"
    many = {str(number): {"type": "string", "pattern": "(?=b)"} for number in range(200)}
    named["json_schema"]["schema"] = {"type": "object", "properties": many}
    told = server.post("/v1/chat/completions", json=asked(response_format=named, max_tokens=1))
    assert len(told.headers["x-kvtier-left-out"]) < 1100
    assert told.headers["x-kvtier-left-out"].endswith(", and more")
    assert len(told.json()["kvtier"]["left_out"]) == 100


def test_a_strict_schema_with_it_is_refused_by_name(server: ServerInThread) -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOK_AHEAD, "strict": True}}

    answer = server.post("/v1/chat/completions", json=asked(response_format=strict))

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"response_format cannot enforce {NAMED};")


def test_a_large_integer_is_the_one_that_was_asked_for(server: ServerInThread) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 18446744073709551615}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}

    [choice] = chat(server, response_format=named)

    assert json.loads(choice["message"]["content"]) == {"a": 18446744073709551615}
