"""Tools of the Responses API: functions, custom tools, namespaces, and kinds that the server cannot run."""

import json
import logging

import openai
import pytest
from openai.types.responses import Response
from responses_client import events_of, respond
from scripted_model import Scripted
from serving import MODEL, ServerInThread
from tool_texts import SEARCH, WEATHER

ASKED = [{"role": "user", "content": "Rain?"}]
LONG = {"input": ASKED, "max_output_tokens": 200}
WEATHER_TOOL = {"type": "function", **WEATHER["function"], "strict": False}
SEARCH_TOOL = {"type": "function", **SEARCH["function"], "strict": False}
TOOLS = [WEATHER_TOOL, SEARCH_TOOL]
PATCH = {"type": "custom", "name": "patch", "description": "Changes files.", "format": {"type": "text"}}
CREW = {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [SEARCH_TOOL]}
CHAT_TOOLS = [WEATHER, SEARCH]


def calls_of(done: Response) -> list[tuple[str, object]]:
    return [(item.name, json.loads(item.arguments)) for item in done.output if item.type == "function_call"]


def prompt_tokens(server: ServerInThread, messages: list[dict], tools: list[dict], **asked: object) -> int:
    """The length of a chat's prompt, all of which must be in the cache but for the last token."""
    body = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 1, **asked}
    usage = server.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    return usage["prompt_tokens"]


def test_a_model_may_call_a_function(tool_server: ServerInThread, script: Scripted) -> None:
    done = respond(tool_server, **LONG, tools=TOOLS, extra_body=script.cue("call"))

    message, call = done.output
    assert (done.status, done.output_text, message.type) == ("completed", "I shall look.", "message")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    assert (call.status, call.call_id[:5], call.id[:3]) == ("completed", "call_", "fc_")
    assert (done.tool_choice, [tool.name for tool in done.tools]) == ("auto", ["get_weather", "search"])


def test_each_call_of_a_stream_has_its_events_and_the_last_event_has_all_items(
    tool_server: ServerInThread, script: Scripted
) -> None:
    events = events_of(tool_server, **LONG, tools=TOOLS, extra_body=script.cue("calls"))

    done = events[-1].response
    assert events[-1].type == "response.completed"
    assert calls_of(done) == [("search", {"depth": 2}), ("get_weather", {"city": "Rome"})]
    for place, item in enumerate(done.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == place]
        added, *deltas, arguments, ended = of_item
        assert (added.type, added.item.arguments, added.item.id) == ("response.output_item.added", "", item.id)
        assert {delta.type for delta in deltas} == {"response.function_call_arguments.delta"}
        assert "".join(delta.delta for delta in deltas) == item.arguments == arguments.arguments
        assert (arguments.type, arguments.item_id) == ("response.function_call_arguments.done", item.id)
        assert (ended.type, ended.item) == ("response.output_item.done", item)
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_call_and_its_result_are_the_messages_of_a_chat(
    tool_server: ServerInThread, script: Scripted, is_continued: bool
) -> None:
    called = respond(tool_server, **LONG, tools=TOOLS, extra_body=script.cue("call"))
    call = called.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    asked = (
        {"input": [result], "previous_response_id": called.id}
        if is_continued
        else {"input": [*ASKED, *called.output, result]}
    )

    done = respond(tool_server, **{**LONG, **asked}, tools=TOOLS, extra_body=script.cue("text"))

    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": "I shall look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]
    cue = {"chat_template_kwargs": script.cue("text")["chat_template_kwargs"]}
    assert done.output_text == "It is dry, and it stays so."
    assert done.usage.input_tokens == prompt_tokens(tool_server, messages, CHAT_TOOLS, **cue)
    assert done.usage.input_tokens_details.cached_tokens >= called.usage.input_tokens // 16 * 16 - 16


def test_a_custom_tool_gets_its_input_as_text_and_its_result_is_sent_back(
    tool_server: ServerInThread, script: Scripted
) -> None:
    whole = respond(tool_server, **LONG, tools=[PATCH], extra_body=script.cue("custom"))
    events = events_of(tool_server, **LONG, tools=[PATCH], extra_body=script.cue("custom"))

    for done in (whole, events[-1].response):
        call, _ = done.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", '+ "a"\n- b')
    told = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [event.type.rpartition(".")[2] for event in told] == ["delta", "done"]
    assert told[0].delta == told[1].input == '+ "a"\n- b'
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    again = respond(
        tool_server,
        input=[*ASKED, *whole.output[:1], result],
        tools=[PATCH],
        max_output_tokens=100,
        extra_body=script.cue("text"),
    )
    assert again.output_text == "It is dry, and it stays so."
    assert again.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens // 16 * 16 - 16


def test_a_tool_of_a_namespace_is_called_by_both_names(tool_server: ServerInThread, script: Scripted) -> None:
    done = respond(tool_server, **LONG, tools=[CREW, SEARCH_TOOL], extra_body=script.cue("nested"))

    call, *_ = done.output
    assert (call.type, call.namespace, call.name) == ("function_call", "crew", "search")
    assert json.loads(call.arguments) == {"depth": 3}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Found."}
    again = respond(
        tool_server,
        input=[*ASKED, *done.output, result],
        tools=[CREW, SEARCH_TOOL],
        max_output_tokens=100,
        extra_body=script.cue("text"),
    )
    assert again.output_text == "It is dry, and it stays so."


def test_tools_that_an_item_adds_are_tools_of_the_request(tool_server: ServerInThread, script: Scripted) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [CREW]}

    done = respond(tool_server, input=[added, *ASKED], max_output_tokens=200, extra_body=script.cue("nested"))

    assert calls_of(done) == [("search", {"depth": 3})]


def test_tools_that_the_server_would_have_to_run_are_left_out_and_logged_once(
    tool_server: ServerInThread, script: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    others = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "mcp", "server_label": "a"}]
    plain = respond(tool_server, **LONG, tools=TOOLS, extra_body=script.cue("call"))

    with caplog.at_level(logging.INFO, "kvtier.server.responses"):
        for _ in range(2):
            done = respond(tool_server, **LONG, tools=[*TOOLS, *others], extra_body=script.cue("call"))

    assert calls_of(done) == calls_of(plain)
    assert [tool.type for tool in done.tools] == ["function", "function"]
    assert done.usage.input_tokens == plain.usage.input_tokens
    assert [record.getMessage() for record in caplog.records if "responses:" in record.getMessage()] == [
        "responses: leaving out tools of the kinds local_shell, mcp, web_search"
    ]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "search"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "search"}]},
    ],
)
def test_a_call_can_be_required(tool_server: ServerInThread, script: Scripted, choice: object) -> None:
    done = respond(tool_server, **LONG, tools=TOOLS, tool_choice=choice, extra_body=script.cue("calls"))

    names = {name for name, _ in calls_of(done)}
    assert names
    assert names <= ({"search", "get_weather"} if choice == "required" else {"search"})


@pytest.mark.parametrize(
    "choice",
    ["none", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "search"}]}],
)
def test_a_tool_that_may_not_be_called_stays_in_the_prompt(
    tool_server: ServerInThread, script: Scripted, choice: object
) -> None:
    free = respond(tool_server, **LONG, tools=TOOLS, extra_body=script.cue("call"))

    done = respond(tool_server, **LONG, tools=TOOLS, tool_choice=choice, extra_body=script.cue("call"))

    assert calls_of(done) == []
    assert "get_weather" in done.output_text
    assert done.usage.input_tokens == free.usage.input_tokens
    assert done.usage.input_tokens_details.cached_tokens == free.usage.input_tokens - 1


def test_one_call_at_most_is_told_when_calls_may_not_be_parallel(tool_server: ServerInThread, script: Scripted) -> None:
    done = respond(tool_server, **LONG, tools=TOOLS, parallel_tool_calls=False, extra_body=script.cue("calls"))

    assert len(calls_of(done)) == 1


def test_a_call_that_is_cut_off_is_incomplete(tool_server: ServerInThread) -> None:
    done = respond(tool_server, input=ASKED, tools=TOOLS, tool_choice="required", max_output_tokens=12)

    assert done.status == "incomplete"
    assert [item.status for item in done.output] == ["incomplete"]


def test_a_choice_of_a_tool_that_is_not_there_is_refused(tool_server: ServerInThread) -> None:
    with pytest.raises(openai.BadRequestError, match="its tools: get_weather, search"):
        respond(tool_server, **LONG, tools=TOOLS, tool_choice={"type": "function", "name": "crew__search"})
