"""What users, models and tools have said reaches the prompt with templates of all shapes, or the request is refused."""

from collections.abc import Sequence

import pytest
from chat_templates import (
    ALL,
    DEEPSEEK,
    EITHER,
    GEMMA,
    GLM,
    GPT_OSS,
    GUARD,
    LLAMA,
    MIXED,
    NO_SYSTEM,
    QWEN,
    SILENT,
    VISION,
    templated,
)

from kvtier.engine.text.chat_prefix import chat_prefix
from kvtier.engine.text.min_tokens import MinTokens, PromptLimit
from kvtier.engine.text.template_traits import TemplateTraits
from kvtier.server.anthropic.messages_request import Conversation
from kvtier.server.chat_request import ChatRequest
from kvtier.web.api_error import ApiError
from kvtier.web.request_body import fit

USER = {"role": "user", "content": "Is it wet?"}
WEATHER = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
QWEN_TOOLS = "{{ (tools | tojson) if tools }}" + QWEN


def written(template: str, *messages: dict, **others: object) -> str:
    """The prompt of a chat, as text."""
    return text_of(template, fit({"model": "m", "messages": messages, **others}, ChatRequest))


def text_of(template: str, asked: ChatRequest) -> str:
    tokenizer = templated(template)
    (prompt,) = asked.prompts(tokenizer, PromptLimit(MinTokens(tokenizer), 256, 10_000))
    return str(tokenizer.decode(prompt.token_ids))


def calling(arguments: str | None, **others: object) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **others}


@pytest.mark.parametrize(
    "content", ["Is it wet?", [{"type": "text", "text": "Is it"}, {"type": "text", "text": "wet?"}]]
)
@pytest.mark.parametrize("name", ALL)
def test_all_that_is_said_reaches_the_prompt(name: str, content: str | list[dict]) -> None:
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": "Where?"}, USER]

    prompt = written(ALL[name], *said)

    first = "Is it wet?" if isinstance(content, str) else "Is it\nwet?"
    assert [prompt.count(text) for text in ("Is it", first, "Where?")] == [2, 2 if first == "Is it wet?" else 1, 1]


@pytest.mark.parametrize("name", ALL)
def test_a_system_message_after_a_question_reaches_the_prompt(name: str) -> None:
    later = {"role": "system", "content": "The tide is low."}
    answer = {"role": "assistant", "content": "Where?"}

    prompt = written(ALL[name], USER, later, answer, USER)

    assert [prompt.count(text) for text in ("Is it wet?", "The tide is low.", "Where?")] == [2, 1, 1]
    assert prompt.index("Is it wet?") < prompt.index("The tide is low.") < prompt.index("Where?")


def test_a_template_that_takes_no_later_system_message_gets_its_text_from_the_user() -> None:
    later = {"role": "system", "content": "The tide is low."}
    answer = {"role": "assistant", "content": "Where?"}

    assert written(GEMMA, USER, later) == written(GEMMA, {"role": "user", "content": "Is it wet?\nThe tide is low."})
    after_answer = {"role": "user", "content": "The tide is low.\nIs it wet?"}
    assert written(GEMMA, USER, answer, later, USER) == written(GEMMA, USER, answer, after_answer)


def test_a_content_is_a_list_of_parts_only_where_the_template_wants_one() -> None:
    assert written(GUARD, USER) == "\n\nUser: Is it wet?\n\nIs the last message safe?"
    assert written(VISION, USER) == "USER: Is it wet? ASSISTANT:"
    assert written(EITHER, USER) == "<user>Is it wet?<assistant>"
    assert written(MIXED, {"role": "system", "content": "Hm."}, USER) == "[system]Hm.</s>[user]Is it wet?"


@pytest.mark.parametrize("template", [GUARD, VISION])
def test_a_document_begins_the_prompt_of_a_template_that_wants_parts(template: str) -> None:
    tokenizer = templated(template)
    limit = PromptLimit(MinTokens(tokenizer), 256, 10_000)

    prefix = tokenizer.decode(chat_prefix(tokenizer, None, "A report.", limit))

    question = {"role": "user", "content": [{"type": "text", "text": "A report."}, {"type": "text", "text": "Who?"}]}
    assert written(template, question).startswith(prefix)
    assert "A report.\n" in prefix


def test_a_breakpoint_is_found_in_a_template_that_wants_parts() -> None:
    part = {"type": "text", "text": "A report.", "cache_control": {"type": "ephemeral"}}
    asked = fit(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [part]},
            ],
        },
        ChatRequest,
    )
    tokenizer = templated(VISION)

    (prompt,) = asked.prompts(tokenizer, PromptLimit(MinTokens(tokenizer), 256, 10_000))

    assert [each.num_tokens for each in prompt.breakpoints] == [len("USER: A report.")]


def test_a_template_that_loses_what_the_user_says_is_refused() -> None:
    with pytest.raises(ApiError, match="drops the user's text") as caught:
        written(SILENT, USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_roles_that_a_template_leaves_out_are_known() -> None:
    def lost(template: str) -> Sequence[str]:
        return sorted(TemplateTraits.of(templated(template), has_tools=False).lost_roles)

    assert lost(SILENT) == ["assistant", "system", "user"]
    assert lost(NO_SYSTEM) == ["system"]
    assert [lost(template) for template in (LLAMA, QWEN, GUARD, VISION, MIXED, GEMMA)] == [[]] * 6


def test_what_a_strict_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(ApiError, match="System role not supported"):
        written(GEMMA, {"role": "system", "content": "Hm."}, USER)
    for template in (GEMMA, GUARD):
        with pytest.raises(ApiError, match="roles must alternate"):
            written(template, USER, USER)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": 1}', "<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ('"{\\"a\\": 1}"', "<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("", ""),
        ("null", ""),
        (None, ""),
        ('{"a": ', '<arg_key>arguments</arg_key><arg_value>{"a": </arg_value>'),
        ('["a"]', '<arg_key>arguments</arg_key><arg_value>["a"]</arg_value>'),
        ('"a"', '<arg_key>arguments</arg_key><arg_value>"a"</arg_value>'),
        ("7", "<arg_key>arguments</arg_key><arg_value>7</arg_value>"),
    ],
)
def test_a_conversation_goes_on_whatever_arguments_a_model_wrote(arguments: str | None, told: str) -> None:
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "No."}

    prompt = written(GLM, USER, calling(arguments), answer, tools=[WEATHER])

    assert f"<tool_call>rain{told}</tool_call><|tool|>\nNo." in prompt
    assert "<|Call|>rain\n```json\n" in written(DEEPSEEK, USER, calling(arguments), answer)
    assert '{"name": "rain", "arguments": {' in written(QWEN, USER, calling(arguments), answer)


def test_a_template_that_joins_arguments_to_a_text_is_given_the_text() -> None:
    assert '```json\n{"a":1}\n```' in written(DEEPSEEK, USER, calling('{"a":1}'))
    assert "```json\n{}\n```" in written(DEEPSEEK, USER, calling(""))


@pytest.mark.parametrize("text", ["", "\n", " ", None])
@pytest.mark.parametrize("template", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_blank_answer_is_gone_on_with_behind_its_header(template: str, text: str | None) -> None:
    """The templates drop the blanks of a text, not those of their own."""
    prompt = written(template, USER, {"role": "assistant", "content": text}, continue_final_message=True)

    assert prompt == written(template, USER)


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_blanks_that_a_template_keeps_are_gone_on_with(text: str) -> None:
    last = {"role": "assistant", "content": text}

    assert written(VISION, USER, last, continue_final_message=True).endswith(" ASSISTANT: " + text)
    thought = "<think>\n\n</think>\n\n" + text.lstrip("\n")
    assert written(QWEN, USER, last, continue_final_message=True) == written(QWEN, USER) + thought


def test_an_answer_is_gone_on_with_where_its_text_ends() -> None:
    def begun(template: str, text: str) -> str:
        prompt = written(template, USER, {"role": "assistant", "content": text}, continue_final_message=True)
        return prompt.rpartition("Is it wet?")[2]

    assert begun(LLAMA, "Yes, ") == "<|eot|><|start|>assistant<|end|>\n\nYes,"  # it trims
    assert begun(EITHER, "Yes, ") == "<assistant>Yes, "
    assert begun(VISION, "Yes, ") == " ASSISTANT: Yes, "


def test_thoughts_go_to_the_templates_that_take_them() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = calling("{}", **{name: "Hm, rain."})
        result = {"role": "tool", "tool_call_id": "call_1", "content": "No."}
        assert "<think>\nHm, rain.\n</think>" in written(QWEN, USER, answer, result)
        assert "<think>Hm, rain.</think>" in written(GLM, USER, answer, result)
        assert "analysis<|message|>Hm, rain.<|end|>" in written(GPT_OSS, USER, answer)
        assert written(LLAMA, USER, answer, USER) == written(LLAMA, USER, calling("{}"), USER)
    assert "Hm" not in written(QWEN, USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm"}, USER)
    odd = {"role": "assistant", "content": "Yes.", "reasoning_content": ["Hm"], "reasoning": {"a": 1}}
    assert "Hm" not in written(QWEN, USER, odd)


def test_thoughts_that_a_template_refuses_beside_a_text_are_left_out() -> None:
    prompt = written(GPT_OSS, USER, {**calling("{}"), "content": "I look.", "reasoning": "Hm, rain."})

    assert "analysis<|message|>I look.<|end|>" in prompt


def test_thoughts_of_anthropics_blocks_go_to_the_template_too() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm, rain.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "toolu_1", "name": "rain", "input": {}},
    ]
    result = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "No."}]
    messages = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    asked = fit({"model": "m", "messages": messages}, Conversation).chat()

    assert "<think>\nHm, rain.\n</think>" in text_of(QWEN, asked)
    assert "Hm" not in text_of(LLAMA, asked)


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "refusal": "I cannot."},
        {"content": "", "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ],
)
@pytest.mark.parametrize("template", [LLAMA, VISION])
def test_a_refusal_is_what_the_model_has_said(template: str, answer: dict) -> None:
    plain = {"role": "assistant", "content": "I cannot."}

    assert written(template, USER, {"role": "assistant", **answer}, USER) == written(template, USER, plain, USER)
    both = {"role": "assistant", "content": "Well.", "refusal": "I cannot."}
    assert "Well.\nI cannot." in written(template, USER, both, USER)


def test_a_prompt_may_end_with_the_last_message() -> None:
    assert written(EITHER, USER, add_generation_prompt=False) == "<user>Is it wet?"
    begun = {"role": "assistant", "content": "Yes"}
    whole = written(EITHER, USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert whole == "<user>Is it wet?<assistant>Yes"
