"""The server answers the `anthropic` client with calls of tools."""

import logging

import anthropic
import pytest
from anthropic.types import Message
from anthropic_client import client_of
from scripted_model import Scripted
from serving import BLOCK_SIZE, MODEL, ServerInThread
from tool_texts import SCRIPTS, SEARCH, WEATHER

ASKED = [{"role": "user", "content": "Rain?"}]
TOOLS = [
    {
        "name": each["function"]["name"],
        "description": each["function"].get("description", ""),
        "input_schema": each["function"]["parameters"],
    }
    for each in (WEATHER, SEARCH)
]
PARIS = {"city": "Paris", "is_warm": True}


def asking(script: Scripted, name: str | None = None, **asked: object) -> dict[str, object]:
    """A request that is answered with that script, or else with noise."""
    steered = {"temperature": 0} if name is None else script.cue(name)
    return {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": TOOLS, "extra_body": steered, **asked}


def ask(server: ServerInThread, script: Scripted, name: str | None = None, **asked: object) -> Message:
    return client_of(server).messages.create(**asking(script, name, **asked))


def test_a_model_may_use_a_tool(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, script, "call")

    text, use = done.content
    assert (text.type, text.text) == ("text", "I shall look.")
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", PARIS)
    assert use.id.startswith("toolu_")
    assert (done.stop_reason, done.stop_sequence) == ("tool_use", None)
    assert done.usage.output_tokens > len(SCRIPTS["call"]) // 5


def test_a_model_may_use_several_and_say_nothing(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, script, "calls")

    assert [(use.type, use.name, use.input) for use in done.content] == [
        ("tool_use", "search", {"depth": 2}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    assert len({use.id for use in done.content}) == 2
    one = ask(tool_server, script, "calls", tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [use.name for use in one.content] == ["search"]


@pytest.mark.parametrize("name", ["text", "broken", "half"])
def test_what_is_no_call_is_text(tool_server: ServerInThread, script: Scripted, name: str) -> None:
    done = ask(tool_server, script, name)

    assert [(block.type, block.text) for block in done.content] == [("text", SCRIPTS[name])]
    assert done.stop_reason == "end_turn"


@pytest.mark.parametrize("name", ["text", "call", "calls"])
def test_a_stream_is_the_whole_answer_in_pieces(tool_server: ServerInThread, script: Scripted, name: str) -> None:
    whole = ask(tool_server, script, name)

    with client_of(tool_server).messages.stream(**asking(script, name)) as stream:
        streamed = stream.get_final_message()

    def said(message: Message) -> list[object]:
        return [(each.name, each.input) if each.type == "tool_use" else each.text for each in message.content]

    assert said(streamed) == said(whole)
    assert streamed.stop_reason == whole.stop_reason


def test_blocks_begin_and_end_one_after_another(tool_server: ServerInThread, script: Scripted) -> None:
    strict = [{**TOOLS[0], "strict": True}]
    asked = asking(script, "call", tools=strict, tool_choice={"type": "auto", "disable_parallel_tool_use": True})

    events = list(client_of(tool_server).messages.create(stream=True, **asked))

    blocks = [event for event in events if event.type.startswith("content_block")]
    kinds = [(event.type.removeprefix("content_block_"), event.index) for event in blocks]
    assert list(dict.fromkeys(kinds)) == [
        ("start", 0),
        ("delta", 0),
        ("stop", 0),
        ("start", 1),
        ("delta", 1),
        ("stop", 1),
    ]
    (opened,) = [event.content_block for event in blocks if event.type == "content_block_start" and event.index == 1]
    assert (opened.type, opened.name, opened.input) == ("tool_use", "get_weather", {})
    pieces = [event.delta for event in blocks if event.type == "content_block_delta" and event.index == 1]
    assert {piece.type for piece in pieces} == {"input_json_delta"}
    assert len(pieces) > 2  # while they are written


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"get_weather", "search"}), ({"type": "tool", "name": "search"}, {"search"})],
)
def test_a_model_that_has_to_use_a_tool_does(
    tool_server: ServerInThread, script: Scripted, choice: dict, names: set[str]
) -> None:
    done = ask(tool_server, script, tool_choice={"disable_parallel_tool_use": True, **choice})

    (use,) = done.content
    assert use.name in names
    assert use.input.get("depth") in (1, 2, 3) or use.input["city"] in ("Paris", "Rome")
    assert done.stop_reason == "tool_use"


def test_no_tool_is_used_if_none_may_be(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, script, "call", tool_choice={"type": "none"})

    assert [block.type for block in done.content] == ["text"]
    assert done.stop_reason == "end_turn"


def test_a_conversation_goes_on_with_results(tool_server: ServerInThread, script: Scripted) -> None:
    answer = ask(tool_server, script, "calls")
    results = [
        {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "Nothing."},
        {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": [{"type": "text", "text": "Dry."}]},
        {"type": "text", "text": "So?"},
    ]
    messages = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]

    done = ask(tool_server, script, "text", messages=messages)

    tokens = client_of(tool_server).messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS).input_tokens
    assert done.content[0].text == SCRIPTS["text"]
    assert tokens + 1 == done.usage.input_tokens + done.usage.cache_read_input_tokens  # the cue is a token
    chat = {
        "messages": [
            *ASKED,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": use.id, "function": {"name": use.name, "arguments": use.input}} for use in answer.content
                ],
            },
            {"role": "tool", "tool_call_id": answer.content[0].id, "content": "Nothing."},
            {"role": "tool", "tool_call_id": answer.content[1].id, "content": "Dry."},
            {"role": "user", "content": "So?"},
        ],
        "tools": [WEATHER, SEARCH],
    }
    assert tool_server.post("/tokenize", json=chat).json()["count"] == tokens


def test_fields_of_tools_that_only_ask_for_more_are_ignored_and_told_once(
    tool_server: ServerInThread, script: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"defer_loading": True, "input_examples": [{"city": "Paris"}], "allowed_callers": ["direct"]}
    new = {"note_of_a_newer_client": 1}
    plain = ask(tool_server, script, "call")

    with caplog.at_level(logging.INFO, "kvtier.server.generation_request"):
        for _ in range(2):
            done = ask(tool_server, script, "call", tools=[{**tool, **more, **new} for tool in TOOLS])

    assert done.usage.cache_read_input_tokens > 0
    assert [block.type for block in done.content] == [block.type for block in plain.content] == ["text", "tool_use"]
    told = [record.getMessage() for record in caplog.records if record.name == "kvtier.server.generation_request"]
    assert told.count("tools: ignoring the unknown field 'note_of_a_newer_client'") == 1


def test_a_reference_to_a_tool_is_the_text_of_its_name(tool_server: ServerInThread) -> None:
    def num_tokens(content: object) -> int:
        messages = [
            *ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}]},
        ]
        body = {"model": MODEL, "messages": messages, "tools": TOOLS}
        return int(tool_server.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    found = [{"type": "tool_reference", "tool_name": tool["name"]} for tool in TOOLS]

    assert num_tokens(found) == num_tokens("get_weather\nsearch")


def test_tools_with_a_breakpoint_are_kept_and_found(tool_server: ServerInThread, script: Scripted) -> None:
    kept = [TOOLS[0], {**TOOLS[1], "cache_control": {"type": "ephemeral"}}]
    body = {"temperature": 0, "cache_salt": "kept tools", "kvtier": {"skip_reading_prefix_cache": False}}

    first = ask(tool_server, script, tools=kept, extra_body=body, max_tokens=1)
    again = ask(
        tool_server, script, tools=kept, extra_body=body, max_tokens=1, messages=[{"role": "user", "content": "?"}]
    )

    created, read = first.usage.cache_creation_input_tokens, again.usage.cache_read_input_tokens
    assert created > 10 * BLOCK_SIZE
    assert read >= created
    assert again.usage.cache_creation_input_tokens == 0


def test_a_breakpoint_may_stand_at_a_call_or_at_its_result(tool_server: ServerInThread, script: Scripted) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"depth": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Nothing, " * 20}

    def created(salt: str, use: dict, result: dict) -> int:
        messages = [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body = {"temperature": 0, "cache_salt": salt}
        done = ask(tool_server, script, messages=messages, extra_body=body, max_tokens=1)
        return done.usage.cache_creation_input_tokens

    at_call, at_result = (
        created("at call", {**use, **control}, result),
        created("at result", use, {**result, **control}),
    )
    assert at_call > 10 * BLOCK_SIZE
    assert at_result >= at_call + 100 // 4  # tokens of the result; the tokenizer has some words of the scripts


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tools": [{**TOOLS[0], "input_schema": {"type": "array"}}]}, "is not the schema of an object"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools have the name get_weather"),
        ({"tool_choice": {"type": "tool", "name": "rm"}}, "the request has no tool named rm"),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "the last message calls tools",
        ),
    ],
)
def test_a_mistake_about_tools_is_told(
    tool_server: ServerInThread, script: Scripted, change: dict[str, object], told: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=told):
        ask(tool_server, script, **change)
