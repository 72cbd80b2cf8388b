"""The server answers requests to the Responses API like chats, and refuses mistakes in OpenAI's form."""

import json
import logging
from typing import Literal

import httpx
import openai
import pytest
from openai.types.responses import Response
from plain_http import NO_TLS
from pydantic import BaseModel
from responses_client import GREEDY, events_of, respond
from scripted_model import Scripted
from serving import MODEL, ServerInThread, serving, tables
from small_models import build

HELLO = "Hello?"
OUTER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


class Sky(BaseModel):
    """What is above."""

    colour: Literal["blue", "grey"]
    is_clear: bool


def chat(server: ServerInThread, messages: list[dict], **asked: object) -> dict:
    """The greedy answer to the same question by way of `/v1/chat/completions`."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **asked}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def whole_blocks(num_tokens: int) -> int:
    """The fewest tokens of a prompt's beginning that are found in the cache."""
    return num_tokens // 16 * 16 - 16


def test_a_text_is_answered_like_a_chat_with_one_message(server: ServerInThread) -> None:
    expected = chat(server, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}])

    done = respond(server, input=HELLO, instructions="Be brief.", metadata={"team": "a"})

    assert done.output_text == expected["choices"][0]["message"]["content"]
    assert (done.object, done.model, done.instructions, done.metadata) == (
        "response",
        MODEL,
        "Be brief.",
        {"team": "a"},
    )
    assert (done.error, done.temperature, done.top_p, done.max_output_tokens) == (None, 0, 1, 8)
    (message,) = done.output
    assert (message.type, message.role, message.content[0].annotations) == ("message", "assistant", [])
    usage = expected["usage"]
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["total_tokens"],
    )
    assert sum(done.kvtier["tokens"].values()) == done.usage.input_tokens
    assert done.usage.input_tokens_details.cached_tokens >= whole_blocks(done.usage.input_tokens)


def test_items_of_every_kind_become_the_messages_of_a_chat(server: ServerInThread) -> None:
    """Neighbours of one role are one message; thoughts and the searches of other servers are left out."""
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Two."}, {"type": "input_text", "text": "Three."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Four.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {"role": "user", "content": "Five."},
    ]
    messages = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "One.\nTwo.\nThree."},
        {"role": "assistant", "content": "Four.\nNo."},
        {"role": "user", "content": "Five."},
    ]

    done = respond(server, input=items, instructions="Be brief.")

    expected = chat(server, messages)
    assert done.output_text == expected["choices"][0]["message"]["content"]
    assert done.usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == done.usage.input_tokens - 1


def test_a_streamed_response_is_the_whole_one_in_pieces(server: ServerInThread) -> None:
    whole = respond(server, input=HELLO, max_output_tokens=20)

    events = events_of(server, input=HELLO, max_output_tokens=20)

    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [*OUTER, "response.incomplete"]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert len(deltas) > 5
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-1].response.output_text
    created, added, part, *_ = events[0], events[2], events[3]
    assert (created.response.status, created.response.output, created.response.usage) == ("in_progress", [], None)
    assert (added.item.status, added.item.content, part.part.text) == ("in_progress", [], "")
    (message,) = events[-1].response.output
    assert {event.item_id for event in deltas} == {added.item.id, message.id}
    assert events[-2].item == message
    assert events[-1].response.usage.output_tokens == 20
    assert events[-1].response.kvtier["tokens"]


def test_an_answer_that_is_cut_off_is_incomplete_and_another_one_completed(
    tool_server: ServerInThread, script: Scripted
) -> None:
    cut_off = respond(tool_server, input=HELLO, extra_body=script.cue("text"), max_output_tokens=2)
    ended = respond(tool_server, input=HELLO, extra_body=script.cue("text"), max_output_tokens=100)
    streamed = events_of(tool_server, input=HELLO, extra_body=script.cue("text"), max_output_tokens=100)

    assert (cut_off.status, cut_off.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut_off.output[0].status == "incomplete"
    for done in (ended, streamed[-1].response):
        assert (done.status, done.incomplete_details, done.output[0].status) == ("completed", None, "completed")
        assert done.output_text == "It is dry, and it stays so."
    assert streamed[-1].type == "response.completed"


def test_a_response_continues_the_one_it_names_and_finds_its_prompt_and_answer_cached(server: ServerInThread) -> None:
    """The schema makes an answer of which each byte can be written again."""
    answer = {"type": "json_schema", "name": "a", "schema": {"const": "the first of several answers, which is long"}}
    first = respond(server, input="What is it? " * 9, text={"format": answer}, max_output_tokens=100)
    messages = [
        {"role": "user", "content": "What is it? " * 9},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]

    second = respond(server, input="And then?", previous_response_id=first.id)
    third = respond(server, input="So?", previous_response_id=second.id)

    assert second.previous_response_id == first.id
    assert second.output_text == chat(server, messages)["choices"][0]["message"]["content"]
    for before, after in ((first, second), (second, third)):
        before_tokens = before.usage.input_tokens + (before.usage.output_tokens if before is first else 0)
        assert after.usage.input_tokens_details.cached_tokens >= whole_blocks(before_tokens)
        assert after.usage.input_tokens > before_tokens


def test_instructions_are_those_of_the_request_alone(server: ServerInThread) -> None:
    first = respond(server, input=HELLO, instructions="Be brief.")
    messages = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "So?"},
    ]

    second = respond(server, input="So?", instructions="Be long.", previous_response_id=first.id)

    assert second.usage.input_tokens == chat(server, messages)["usage"]["prompt_tokens"]


def test_a_stored_response_can_be_read_and_deleted(server: ServerInThread) -> None:
    client = server.openai()
    done = respond(server, input=HELLO)
    (*_, end) = events_of(server, input=HELLO)

    assert client.responses.retrieve(done.id) == done
    assert client.responses.retrieve(end.response.id) == end.response
    client.responses.delete(done.id)

    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="may have been evicted") as refused:
            ask(done.id)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as refused:
        respond(server, input="So?", previous_response_id=done.id)
    assert refused.value.param == "previous_response_id"
    streamed = server.get(f"/v1/responses/{end.response.id}", params={"stream": "true"})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


def test_a_response_that_is_not_to_be_stored_is_not(server: ServerInThread) -> None:
    done = respond(server, input=HELLO, store=False)

    assert done.store is False
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(done.id)


def test_a_tenant_finds_only_its_own_responses() -> None:
    keys = {"sk-ann-1111": "ann", "sk-bob-2222": "bob"}
    with serving(build("llama"), tables(), keys) as server:
        of_ann = respond(server, "sk-ann-1111", input=HELLO)
        bob = server.openai("sk-bob-2222").responses
        for ask in (bob.retrieve, bob.delete):
            with pytest.raises(openai.NotFoundError):
                ask(of_ann.id)
        with pytest.raises(openai.NotFoundError):
            respond(server, "sk-bob-2222", input="So?", previous_response_id=of_ann.id)
        found = server.openai("sk-ann-1111").responses.retrieve(of_ann.id)
        with pytest.raises(openai.AuthenticationError):
            respond(server, input=HELLO)

    assert found.id == of_ann.id


def test_a_conversation_goes_on_although_its_first_response_was_evicted() -> None:
    with serving(build("llama"), tables(max_stored_responses=1)) as server:
        first = respond(server, input=HELLO)
        second = respond(server, input="And?", previous_response_id=first.id)
        third = respond(server, input="So?", previous_response_id=second.id)
        for gone in (first, second):
            with pytest.raises(openai.NotFoundError):
                server.openai().responses.retrieve(gone.id)

    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens


def test_an_answer_follows_a_schema(server: ServerInThread) -> None:
    parsed = server.openai().responses.parse(
        model=MODEL, input=HELLO, text_format=Sky, max_output_tokens=600, temperature=1, extra_body={"seed": 1}
    )
    of_json = respond(server, input=HELLO, text={"format": {"type": "json_object"}}, max_output_tokens=400)

    assert isinstance(parsed.output_parsed, Sky)
    assert of_json.status == "incomplete" or isinstance(json.loads(of_json.output_text), dict)
    assert of_json.output_text.startswith("{")


def test_a_stored_document_is_a_file(server: ServerInThread) -> None:
    url = f"{server.url}/v1/kvtier/documents/tides"
    assert httpx.put(url, json={"text": "Ebb."}, verify=NO_TLS).status_code == 201
    content = [{"type": "input_file", "file_id": "tides"}, {"type": "input_text", "text": "When?"}]

    done = respond(server, input=[{"role": "user", "content": content}])

    expected = chat(server, [{"role": "user", "content": "Ebb.\nWhen?"}])
    assert done.output_text == expected["choices"][0]["message"]["content"]
    assert httpx.delete(url, verify=NO_TLS).status_code == 200  # other tests share the server


# What OpenAI's clients and coding agents send besides the conversation.
CODING = {
    "reasoning": {"effort": None, "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "service_tier": "auto",
    "client_metadata": {"turn_id": "1"},
    "truncation": "auto",
    "safety_identifier": "u",
    "user": "u",
    "text": {"verbosity": "low", "format": None},
    "max_tool_calls": 3,
    "background": False,
    "top_logprobs": 0,
    "conversation": None,
    "metadata": None,
}


def test_what_only_asks_for_more_is_let_pass_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "input": HELLO, "temperature": 0, "max_output_tokens": 8}
    with serving(build("llama"), tables()) as server, caplog.at_level(logging.INFO, "kvtier.server.responses"):
        plain = server.post("/v1/responses", json=body).json()
        answers = [server.post("/v1/responses", json={**body, **CODING}) for _ in range(2)]

    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"][0]["content"] == plain["output"][0]["content"]
    assert [record.getMessage() for record in caplog.records if "responses:" in record.getMessage()] == [
        "responses: ignoring the parameters client_metadata, include, max_tool_calls, prompt_cache_key, "
        "prompt_cache_retention, safety_identifier, service_tier, truncation, user"
    ]


@pytest.mark.parametrize(
    ("changed", "param", "told"),
    [
        ({"input": []}, "input", "it has no message; send one message or more"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "it has no message"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "Invalid value 'item_reference'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "Invalid enum value 'tool'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "messages",
            "the model reads only text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
            "input[0].content[0]",
            "images are not stored here; send the image in image_url, as a data URL",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "data:"}]}]},
            "input[0].content[0]",
            "store the file's text as a document",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be a whole number, 1 or more"),
        ({"temperature": 3}, "temperature", "must be a number, 2 or less"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]", "must have at most 512 characters"),
        ({"background": True}, "background", "background is not supported; leave it out"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"unheard_of": 1}, "unheard_of", "unknown parameter"),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "its tools: none"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "Invalid value 'file_search'"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools", "two tools have the name a"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "matching regex"),
        ({"tools": [{"type": "function", "name": "a"}]}, "tools", "the model's chat template does not support tools"),
        ({"max_output_tokens": 5000}, None, "maximum context length is 4096"),
    ],
)
def test_a_mistake_is_named_in_openais_form(
    server: ServerInThread, changed: dict, param: str | None, told: str
) -> None:
    answer = server.post("/v1/responses", json={"model": MODEL, "input": HELLO, **changed})

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert told in error["message"]
    assert param is None or error["param"] == param


def test_a_stream_that_breaks_off_ends_with_a_failed_response() -> None:
    with serving(build("llama"), tables(drain_s=0)) as server:
        stream = server.openai().responses.create(**{**GREEDY, "max_output_tokens": 3000}, input=HELLO, stream=True)
        first = next(iter(stream))
        server.stop()
        *_, last = stream

    assert first.type == "response.created"
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert "retry" in last.response.error.message


def test_the_sizes_of_padded_events_do_not_tell_the_lengths_of_their_texts(server: ServerInThread) -> None:
    events = events_of(server, input=HELLO, max_output_tokens=20, stream_options={"include_obfuscation": True})
    plain = events_of(server, input=HELLO)

    padded = [event for event in events if event.type.endswith(".delta")]
    sizes = {len(json.dumps(event.delta)) + len(event.obfuscation) for event in padded if event.delta.isascii()}
    assert len(padded) > 5
    assert all(event.obfuscation for event in padded)
    assert sizes == {32}
    assert not any(hasattr(event, "obfuscation") for event in plain)


def test_a_response_can_be_sent_back_as_it_came(server: ServerInThread) -> None:
    done: Response = respond(server, input=HELLO)

    again = respond(
        server, input=[{"role": "user", "content": HELLO}, *done.output, {"role": "user", "content": "So?"}]
    )
    continued = respond(server, input="So?", previous_response_id=done.id)

    assert again.output_text == continued.output_text
    assert again.usage.input_tokens == continued.usage.input_tokens
