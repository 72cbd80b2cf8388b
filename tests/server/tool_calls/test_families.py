"""A model's family is found from its template, and its template is told of tools as it wants it."""

import json

import pytest
from small_models import byte_tokenizer
from tokenizers import AddedToken
from tool_templates import FAMILIES, HERMES, LLAMA, MISTRAL, PHI, PLAIN, QWEN, tool_tokenizer

from kvtier.engine.text.min_tokens import MinTokens, PromptLimit
from kvtier.server.chat_request import ChatRequest
from kvtier.server.tool_calls.families import syntax_of
from kvtier.server.tool_calls.tool_use import ToolFormat
from kvtier.web.api_error import ApiError
from kvtier.web.request_body import fit

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = {"role": "user", "content": "Rain?"}


def call(call_id: str = "call_1", arguments: str = '{"city": "Paris"}') -> dict:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def prompt_of(template: str, messages: list[dict], **others: object) -> str:
    tokenizer = tool_tokenizer(template)
    asked = fit({"model": "small", "messages": messages, "tools": [WEATHER], **others}, ChatRequest)
    (prompt,) = asked.prompts(tokenizer, PromptLimit(MinTokens(tokenizer), 256, 10_000))
    return str(tokenizer.decode(prompt.token_ids))


@pytest.mark.parametrize(("family", "template"), [(name, each) for name, those in FAMILIES.items() for each in those])
def test_the_template_says_which_family_it_is(family: str, template: str) -> None:
    assert syntax_of(tool_tokenizer(template), None).name == family


def test_a_token_of_the_vocabulary_says_it_too_and_an_operator_has_the_last_word() -> None:
    tokenizer = tool_tokenizer(PLAIN)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)], special_tokens=True)

    assert syntax_of(tokenizer, None).name == "hermes"
    assert syntax_of(tokenizer, "mistral").name == "mistral"
    assert ToolFormat.of(tokenizer, None).special == {"<tool_call>": 256}


def test_a_tokenizer_without_a_template_has_a_family_too() -> None:
    assert syntax_of(byte_tokenizer(), None).name == "json"


def test_past_calls_and_their_answers_are_written_as_the_template_wants_them() -> None:
    history = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call()]}]
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "Dry."}

    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt_of(
        QWEN, [*history, answer]
    )
    assert '{ "arguments": {"city": "Paris"}, "name": "get_weather"}' in prompt_of(HERMES, [*history, answer])
    assert '<|tool|>{"name": "get_weather", "content": "Dry."}' in prompt_of(HERMES, [*history, answer])
    assert '{"name": "get_weather", "parameters": {"city": "Paris"}}' in prompt_of(LLAMA, [*history, answer])
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt_of(PHI, [*history, answer])


def test_long_ids_of_calls_are_short_where_they_have_to_be() -> None:
    answer = {"role": "tool", "tool_call_id": "call_0123456789", "content": "Dry."}
    written = prompt_of(MISTRAL, [ASKED, {"role": "assistant", "tool_calls": [call("call_0123456789")]}, answer])

    (call_id,) = (each["id"] for each in json.loads(written.partition("[TOOL_CALLS] ")[2].partition("[TOOL")[0]))
    assert (len(call_id), call_id.isalnum()) == (9, True)
    assert f"[TOOL_RESULTS]Dry.[{call_id}]" in written


@pytest.mark.parametrize("arguments", ["{city: Paris}", "[1]", "", "null"])
def test_arguments_that_are_no_object_are_written_somehow(arguments: str) -> None:
    """A client may send back what a model has written."""
    written = prompt_of(QWEN, [ASKED, {"role": "assistant", "tool_calls": [call(arguments=arguments)]}, ASKED])
    assert "get_weather" in written


def test_what_a_template_refuses_is_a_mistake_in_the_request() -> None:
    two = {"role": "assistant", "tool_calls": [call(), call("call_2")]}
    with pytest.raises(ApiError, match="only one call at once"):
        prompt_of(LLAMA, [ASKED, two])


def test_a_template_that_writes_no_tools_is_told_to_the_client() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError, match="the model's chat template does not support tools") as caught:
        prompt_of(template, [ASKED])
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_equal_tools_are_equal_text_whatever_order_their_keys_come_in() -> None:
    tool = {"function": dict(reversed(WEATHER["function"].items())), "type": "function"}
    assert prompt_of(QWEN, [ASKED], tools=[tool]) == prompt_of(QWEN, [ASKED])
    assert prompt_of(QWEN, [ASKED], tool_choice="none") == prompt_of(QWEN, [ASKED])
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    assert prompt_of(QWEN, [ASKED], tools=[strict]) == prompt_of(QWEN, [ASKED])


def test_a_tool_may_have_no_more_than_a_name() -> None:
    assert "get_weather: " in prompt_of(
        HERMES, [ASKED], tools=[{"type": "function", "function": {"name": "get_weather"}}]
    )
