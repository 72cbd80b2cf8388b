"""The server answers the `openai` client with calls of tools, and lets the model decide, or does not."""

import json
import re
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from scripted_model import Scripted, scripted
from serving import BLOCK_SIZE, MODEL, ServerInThread, serving, tables
from small_models import byte_tokenizer
from tool_templates import MISTRAL, QWEN
from tool_texts import SCRIPTS, SEARCH, TOOLS, WEATHER

ASKED = [{"role": "user", "content": "Rain?"}]
GREEDY = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 200}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "search"}}


class GetWeather(BaseModel):
    """Says the weather of a city."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


def ask(server: ServerInThread, **asked: object) -> ChatCompletion:
    return server.openai().chat.completions.create(**{**GREEDY, "tools": TOOLS, **asked})


def said(done: ChatCompletion, choice: int = 0) -> list[tuple[str, object]]:
    """The calls of an answer."""
    calls = done.choices[choice].message.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def chunks(server: ServerInThread, **asked: object) -> list[ChatCompletionChunk]:
    return list(server.openai().chat.completions.create(**{**GREEDY, "tools": TOOLS, "stream": True, **asked}))


def joined(pieces: list[ChatCompletionChunk]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Text, calls and the reason to end that a stream tells, as OpenAI's clients join it."""
    text, calls, ids = "", [], set()
    for piece in pieces:
        delta = piece.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                ids.add(call.id)
                calls.append((call.function.name, ""))
            else:
                assert call.function.name is None
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + call.function.arguments
    assert len(ids) == len(calls)
    return text, calls, pieces[-1].choices[0].finish_reason


def test_a_model_may_call_a_tool(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, **script.saying("call"))

    (choice,) = done.choices
    assert said(done) == [("get_weather", {"city": "Paris", "is_warm": True})]
    assert (choice.message.content, choice.finish_reason) == ("I shall look.", "tool_calls")
    assert done.usage.prompt_tokens == sum(done.kvtier["tokens"].values())
    assert done.usage.completion_tokens > len(SCRIPTS["call"]) // 5  # marks and all


def test_a_model_may_answer_instead(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, **script.saying("text"))

    (choice,) = done.choices
    assert (choice.message.content, choice.message.tool_calls) == (SCRIPTS["text"], None)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("name", ["broken", "half", "json"])
def test_what_is_no_call_stays_text(tool_server: ServerInThread, script: Scripted, name: str) -> None:
    done = ask(tool_server, **script.saying(name))
    text, calls, reason = joined(chunks(tool_server, **script.saying(name)))

    assert (done.choices[0].message.content, done.choices[0].message.tool_calls) == (SCRIPTS[name], None)
    assert (text, calls, reason) == (SCRIPTS[name], [], "stop")


@pytest.mark.parametrize("name", ["text", "call", "calls"])
def test_a_stream_is_the_whole_answer_in_pieces(tool_server: ServerInThread, script: Scripted, name: str) -> None:
    whole = ask(tool_server, **script.saying(name)).choices[0]

    text, calls, reason = joined(chunks(tool_server, **script.saying(name)))

    assert text == (whole.message.content or "")
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert reason == whole.finish_reason == ("stop" if name == "text" else "tool_calls")
    assert len({call.id for call in whole.message.tool_calls or []}) == len(calls)


def test_a_strict_tool_is_called_by_its_schema_and_told_while_it_is_written(
    tool_server: ServerInThread, script: Scripted
) -> None:
    """The script leads to a call, and would write one that is none."""
    asked = {"tools": [STRICT], "parallel_tool_calls": False, **script.saying("broken")}

    whole = ask(tool_server, **asked).choices[0]
    told = chunks(tool_server, **asked)

    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert joined(told) == ("", [("get_weather", call.function.arguments)], "tool_calls")
    pieces = [each.function.arguments for piece in told for each in piece.choices[0].delta.tool_calls or []]
    assert len([piece for piece in pieces if piece]) > 2


def test_a_strict_tool_is_no_reason_to_call_it(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, tools=[STRICT], **script.saying("text"))

    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (SCRIPTS["text"], "stop")


def test_without_parallel_calls_there_is_one(tool_server: ServerInThread, script: Scripted) -> None:
    two = ask(tool_server, **script.saying("calls"))
    one = ask(tool_server, parallel_tool_calls=False, **script.saying("calls"))

    assert said(two) == [("search", {"depth": 2}), ("get_weather", {"city": "Rome"})]
    assert said(one) == said(two)[:1]


def test_a_request_may_forbid_calls(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, tool_choice="none", **script.saying("call"))

    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (SCRIPTS["call"], "stop")


def test_a_model_that_has_to_call_does_with_arguments_by_the_schema(tool_server: ServerInThread) -> None:
    """It would write noise."""
    for asked in ({}, {"temperature": 1, "seed": 3}, {"temperature": 2, "seed": 4}):
        done = ask(tool_server, tool_choice="required", parallel_tool_calls=False, **asked)

        ((name, arguments),) = said(done)
        assert done.choices[0].message.content is None
        assert done.choices[0].finish_reason == "tool_calls"
        if name == "search":
            assert arguments["depth"] in (1, 2, 3)
        else:
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments.keys() <= {"city", "is_warm"}


def test_a_model_that_has_to_call_may_call_several_times(tool_server: ServerInThread) -> None:
    """It writes a mark wherever it may, and would never end."""
    mark = str(byte_tokenizer()("<")["input_ids"][0])

    (choice,) = ask(tool_server, tool_choice="required", logit_bias={mark: 9}, max_tokens=100).choices

    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls) > 2
    for call in calls[:2]:
        arguments = json.loads(call.function.arguments)
        assert arguments.get("depth") in (1, 2, 3) or arguments["city"] in ("Paris", "Rome")


def test_a_tool_may_be_named_which_is_then_called_once(tool_server: ServerInThread) -> None:
    done = ask(tool_server, tool_choice=NAMED)
    text, calls, reason = joined(chunks(tool_server, tool_choice=NAMED))

    ((name, arguments),) = said(done)
    assert (name, set(arguments)) == ("search", {"depth"})
    assert (text, [(name, json.loads(given)) for name, given in calls], reason) == ("", said(done), "tool_calls")


def test_each_choice_has_calls_of_its_own(tool_server: ServerInThread) -> None:
    done = ask(tool_server, tool_choice=NAMED, n=3, temperature=1.5, seed=1)

    assert [said(done, choice)[0][0] for choice in range(3)] == ["search"] * 3
    assert len({choice.message.tool_calls[0].id for choice in done.choices}) == 3


def test_an_answer_that_is_cut_off_tells_what_there_is_of_a_call(tool_server: ServerInThread) -> None:
    asked = {"tool_choice": NAMED, "max_tokens": 24}

    whole = ask(tool_server, **asked).choices[0]
    text, calls, reason = joined(chunks(tool_server, **asked))

    (call,) = whole.message.tool_calls
    assert whole.finish_reason == reason == "length"
    assert (text, calls) == ("", [("search", call.function.arguments)])
    assert call.function.arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_a_call_that_the_model_was_free_to_write_and_is_cut_off_is_text(
    tool_server: ServerInThread, script: Scripted
) -> None:
    done = ask(tool_server, max_tokens=8, **script.saying("calls")).choices[0]

    assert (done.message.tool_calls, done.finish_reason) == (None, "length")
    assert SCRIPTS["calls"].startswith(done.message.content)


def test_an_answer_may_be_json_by_a_schema_or_a_call(tool_server: ServerInThread, script: Scripted) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["dry", "wet"]}}, "required": ["answer"]}
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": False}},
        "parallel_tool_calls": False,
    }

    assert json.loads(ask(tool_server, **asked, **script.saying("json")).choices[0].message.content)["answer"] == "dry"
    assert len(said(ask(tool_server, **asked, **script.saying("calls")))) == 1
    assert said(ask(tool_server, tool_choice=NAMED, **asked))[0][0] == "search"
    with pytest.raises(openai.BadRequestError, match="cannot be combined with optional tool calls"):
        ask(tool_server, extra_body={"structured_outputs": {"regex": "a+"}})


def test_log_probabilities_are_told_of_every_token(tool_server: ServerInThread, script: Scripted) -> None:
    asked = {"logprobs": True, **script.saying("call")}

    done = ask(tool_server, **asked)
    told = chunks(tool_server, **asked)

    whole = [each.token for each in done.choices[0].logprobs.content]
    parts = [each.token for piece in told if piece.choices[0].logprobs for each in piece.choices[0].logprobs.content]
    assert parts == whole
    assert len(whole) == done.usage.completion_tokens


def test_the_same_tools_are_found_in_the_cache(tool_server: ServerInThread, script: Scripted) -> None:
    asked = {"extra_body": {"cache_salt": "of this test"}, **script.saying("text")}
    first = ask(tool_server, **asked)
    shuffled = [{**tool, "function": dict(reversed(tool["function"].items()))} for tool in TOOLS]

    others = [{"role": "user", "content": "Something else, and longer than that?"}]
    again = ask(tool_server, messages=others, tools=shuffled, tool_choice="required", **asked)

    tokens = tool_server.post("/tokenize", json={"messages": others, "tools": TOOLS}).json()["tokens"]
    num_found = again.usage.prompt_tokens_details.cached_tokens
    found = tool_server.post("/detokenize", json={"tokens": tokens[:num_found]}).json()["prompt"]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert found.endswith("</tool_call><|im_end|>\n<|im_start|>user\n")  # what stands behind the tools
    assert len(tokens) == again.usage.prompt_tokens
    assert sum(again.kvtier["tokens"].values()) == again.usage.prompt_tokens


def test_a_prompt_with_tools_is_explained(tool_server: ServerInThread, script: Scripted) -> None:
    done = ask(tool_server, extra_body={"cache_salt": "explained"}, **script.saying("text"))

    def computed(**asked: object) -> int:
        body = {"messages": ASKED, "cache_salt": "explained", **asked}
        answer = tool_server.post("/v1/kvtier/explain", json=body)
        assert answer.status_code == 200, answer.text
        return sum(row["end"] - row["start"] for row in answer.json()["data"][0]["rows"] if row["hit"] is None)

    assert computed(tools=TOOLS) < 2 * BLOCK_SIZE < done.usage.prompt_tokens
    assert computed(tools=TOOLS[:1]) > 2 * BLOCK_SIZE


def test_a_conversation_goes_on_with_what_the_tool_has_said(tool_server: ServerInThread, script: Scripted) -> None:
    answer = ask(tool_server, **script.saying("call")).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "Dry."}

    done = ask(tool_server, messages=[*ASKED, answer, result], **script.saying("text"))

    assert done.choices[0].message.content == SCRIPTS["text"]
    body = {"messages": [*ASKED, answer.model_dump(), result], "tools": TOOLS}
    tokens = tool_server.post("/tokenize", json=body).json()["tokens"]
    written = tool_server.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '"arguments": {"city": "Paris", "is_warm": true}' in written
    assert "<tool_response>\nDry.\n</tool_response>" in written
    assert len(tokens) == done.usage.prompt_tokens


def allowed(mode: str, *names: str) -> dict[str, object]:
    """A `tool_choice` that allows only the named tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called(tool_server: ServerInThread, script: Scripted) -> None:
    both = ask(tool_server, tool_choice=allowed("auto", "search", "get_weather"), **script.saying("calls"))
    one = ask(tool_server, tool_choice=allowed("auto", "search"), **script.saying("calls"))

    assert said(both) == [("search", {"depth": 2}), ("get_weather", {"city": "Rome"})]
    assert said(one) == said(both)[:1]
    assert "get_weather" in one.choices[0].message.content  # a call that is not allowed stays text


def test_an_allowed_tool_can_be_required_and_the_prompt_stays_the_same(tool_server: ServerInThread) -> None:
    plain = ask(tool_server)

    done = ask(tool_server, tool_choice=allowed("required", "search"), parallel_tool_calls=False)

    ((name, arguments),) = said(done)
    assert (name, arguments["depth"] in (1, 2, 3)) == ("search", True)
    assert done.usage.prompt_tokens == plain.usage.prompt_tokens
    cached = done.usage.prompt_tokens_details.cached_tokens
    assert cached >= plain.usage.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_clients_helpers_take_models_for_tools(tool_server: ServerInThread, script: Scripted, choice: str) -> None:
    asked = {**GREEDY, "tools": [openai.pydantic_function_tool(GetWeather, name="get_weather")], "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, **script.saying("call" if choice == "auto" else "text")}
    client = tool_server.openai()

    parsed = client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()

    for done in (parsed, streamed):
        (call,) = done.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather)
    assert events.count("tool_calls.function.arguments.done") == 1
    assert events.count("tool_calls.function.arguments.delta") > 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "the request has no tool named rm; its tools: get_weather",
        ),
        ({"tool_choice": allowed("auto", "search", "rm")}, "no tool named rm; its tools: get_weather, search"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("none", "search")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice is 'required', but the request has no tools"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the name get_weather"),
        ({"tools": [{"type": "web_search"}]}, "type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "is not the schema of an object",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/nowhere"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "tool_calls[0].function"),
    ],
)
def test_a_mistake_about_tools_is_told(tool_server: ServerInThread, change: dict[str, object], told: str) -> None:
    body = {**GREEDY, "tools": TOOLS, **change}

    answer = tool_server.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


def test_marks_that_are_special_tokens_are_read_and_written() -> None:
    call = '[TOOL_CALLS] [{"name": "search", "arguments": {"depth": 3}}]'
    script = scripted({"call": call}, MISTRAL, ["[TOOL_CALLS]"])
    with serving(script.model, tables(), tokenizer=script.tokenizer) as address:
        free = ask(address, **script.saying("call"))
        forced = [ask(address, tool_choice=NAMED), ask(address, tool_choice="required", parallel_tool_calls=False)]
        plain = ask(address, tool_choice="none", **script.saying("call"))

    assert said(free) == [("search", {"depth": 3})]
    assert [len(said(done)) for done in forced] == [1, 1]
    assert plain.choices[0].message.content == call.removeprefix("[TOOL_CALLS]")


def test_an_operator_may_say_how_the_model_writes_calls() -> None:
    llama = scripted({"call": '{"name": "search", "parameters": {"depth": 3}}'}, QWEN)
    config = tables(tool_call_parser="llama3_json")
    with serving(llama.model, config, tokenizer=llama.tokenizer) as address:
        assert said(ask(address, **llama.saying("call"))) == [("search", {"depth": 3})]


def test_a_chat_whose_template_knows_no_tools_is_refused(server: ServerInThread) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template does not support tools") as caught:
        ask(server, tools=[SEARCH])
    assert caught.value.body["param"] == "tools"


@pytest.mark.parametrize("max_tokens", [1, 3, 12, 19])
def test_a_required_call_that_is_cut_off_shows_no_markup(tool_server: ServerInThread, max_tokens: int) -> None:
    asked = {"tool_choice": "required", "max_tokens": max_tokens}

    whole = ask(tool_server, **asked).choices[0]
    text, calls, reason = joined(chunks(tool_server, **asked))

    assert ((whole.message.content or ""), whole.finish_reason) == ("", "length")
    assert (text, reason) == ("", "length")
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]


def test_a_tool_without_parameters_is_called_with_an_empty_object(tool_server: ServerInThread) -> None:
    for parameters in ({}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}):
        tool = {"type": "function", "function": {"name": "now", **parameters}}
        done = ask(tool_server, tools=[tool], tool_choice="required", parallel_tool_calls=False)

        (call,) = done.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_what_a_tools_schema_cannot_enforce_is_named(tool_server: ServerInThread) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)"}}, "required": None}
    function = {"name": "f", "parameters": parameters}
    asked = {"tool_choice": "required", "max_tokens": 3}

    done = ask(tool_server, tools=[{"type": "function", "function": function}], **asked)

    named = "tools.f.parameters.properties.a.pattern"
    assert done.kvtier["left_out"] == [named]
    with pytest.raises(openai.BadRequestError, match=re.escape(f"tools cannot enforce {named};")):
        ask(tool_server, tools=[{"type": "function", "function": {**function, "strict": True}}], **asked)
