"""The server answers the `anthropic` client, and refuses mistakes in Anthropic's shape."""

import json
import logging

import anthropic
import httpx2
import pytest
from anthropic_client import GREEDY, ask, client_of
from plain_http import NO_TLS
from serving import MODEL, ServerInThread, serving, tables
from small_models import build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

HELLO = [{"role": "user", "content": "Hello?"}]


def continued(model: PreTrainedModel, written: str, num_tokens: int) -> str:
    """What plain transformers says after the text."""
    tokenizer = byte_tokenizer()
    return tokenizer.decode(plain_greedy(model, tokenizer(written)["input_ids"], num_tokens))


def test_an_answer_is_what_plain_transformers_says_after_the_template(
    server: ServerInThread, model: PreTrainedModel
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]},
        {"role": "assistant", "content": "Why?"},
        {"role": "user", "content": "So."},
    ]
    written = "<system>Be brief.\n<user>Say\nhello.\n<assistant>Why?\n<user>So.\n<assistant>"

    done = ask(server, system="Be brief.", messages=messages)

    (block,) = done.content
    assert (block.type, block.text) == ("text", continued(model, written, 8))
    assert (done.type, done.role, done.model, done.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
    assert (done.stop_sequence, done.usage.output_tokens) == (None, 8)
    assert done.id.startswith("msg_")


def test_an_answer_can_be_sent_back_as_it_came(server: ServerInThread) -> None:
    answer = ask(server, messages=HELLO)

    again = ask(server, messages=[*HELLO, {"role": "assistant", "content": answer.content}, *HELLO])

    assert again.stop_reason == "max_tokens"


def test_a_streamed_answer_is_the_whole_one_in_pieces(server: ServerInThread) -> None:
    whole = ask(server, messages=HELLO, max_tokens=20)

    with client_of(server).messages.stream(model=MODEL, max_tokens=20, messages=HELLO, **GREEDY) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()

    assert len(texts) > 5
    assert "".join(texts) == streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 20)


def test_the_events_of_a_stream_come_in_anthropics_order_and_end_with_where_tokens_came_from(
    server: ServerInThread,
) -> None:
    events = list(client_of(server).messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=True, **GREEDY))

    begin, opened, *deltas, closed, delta, end = events
    kinds = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert [event.type for event in (begin, opened, closed, delta, end)] == kinds
    assert {event.type for event in deltas} == {"content_block_delta"}
    assert (begin.message.stop_reason, begin.message.content, begin.message.usage.output_tokens) == (None, [], 0)
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("max_tokens", 9)
    prompt = begin.message.usage
    assert prompt.input_tokens + prompt.cache_read_input_tokens == len("<user>Hello?\n<assistant>")
    assert sum(delta.kvtier["tokens"].values()) == len("<user>Hello?\n<assistant>")


def test_a_stop_sequence_ends_the_answer_and_is_named(server: ServerInThread) -> None:
    whole = ask(server, messages=HELLO, max_tokens=20).content[0].text
    stop = whole[7:9]
    before = whole[: whole.index(stop)]

    done = ask(server, messages=HELLO, max_tokens=20, stop_sequences=["\x00not there", stop])
    with client_of(server).messages.stream(
        model=MODEL, max_tokens=20, messages=HELLO, stop_sequences=[stop], **GREEDY
    ) as stream:
        streamed = stream.get_final_message()

    for message in (done, streamed):
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (before, "stop_sequence", stop)


def test_the_models_end_token_ends_the_turn() -> None:
    model, tokenizer = build("llama"), byte_tokenizer()
    generated = plain_greedy(model, tokenizer("<user>Hello?\n<assistant>")["input_ids"], 20)
    model.generation_config.eos_token_id = generated[7]
    with serving(model, tables()) as server:
        done = ask(server, messages=HELLO, max_tokens=20)

    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert done.content[0].text == tokenizer.decode(generated[: generated.index(generated[7])])


def test_documents_stand_before_the_question_with_their_titles(server: ServerInThread, model: PreTrainedModel) -> None:
    content = [
        {"type": "document", "title": "Tides", "source": {"type": "text", "media_type": "text/plain", "data": "Ebb."}},
        {
            "type": "document",
            "context": "By Ann",
            "source": {"type": "content", "content": [{"type": "text", "text": "Flood."}]},
            "citations": {"enabled": False},
        },
        {"type": "text", "text": "When?"},
    ]
    written = "<user>Tides\nEbb.\nBy Ann\nFlood.\nWhen?\n<assistant>"

    done = ask(server, messages=[{"role": "user", "content": content}])

    assert done.content[0].text == continued(model, written, 8)


def test_a_stored_document_is_a_file(server: ServerInThread, model: PreTrainedModel) -> None:
    url, source = f"{server.url}/v1/kvtier/documents/tides", {"type": "file", "file_id": "tides"}
    assert httpx2.put(url, json={"text": "Ebb."}, verify=NO_TLS).status_code == 201

    done = ask(server, messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])

    assert done.content[0].text == continued(model, "<user>Ebb.\n<assistant>", 8)
    assert httpx2.delete(url, verify=NO_TLS).status_code == 200  # other tests share the server


def test_messages_of_one_role_in_a_row_are_one_and_thoughts_are_left_out(
    server: ServerInThread, model: PreTrainedModel
) -> None:
    messages = [
        {"role": "user", "content": "One."},
        {"role": "user", "content": "Two."},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Yes."}],
        },
        {"role": "user", "content": "So."},
    ]

    done = ask(server, messages=messages)

    assert done.content[0].text == continued(model, "<user>One.\nTwo.\n<assistant>Yes.\n<user>So.\n<assistant>", 8)


def test_an_answer_that_is_begun_is_gone_on_with(server: ServerInThread, model: PreTrainedModel) -> None:
    done = ask(server, messages=[*HELLO, {"role": "assistant", "content": "I say"}])

    assert done.content[0].text == continued(model, "<user>Hello?\n<assistant>I say", 8)


def test_with_no_tokens_to_answer_the_prompt_is_computed_and_nothing_is_said(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": "Warm this up. " * 9}]

    warmed = ask(server, messages=messages, max_tokens=0)
    with client_of(server).messages.stream(model=MODEL, max_tokens=0, messages=HELLO) as stream:
        streamed = stream.get_final_message()
    after = ask(server, messages=messages)

    for message in (warmed, streamed):
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert warmed.usage.cache_read_input_tokens < 16
    assert after.usage.input_tokens == 1


def test_tokens_are_counted_as_the_answer_counts_them(server: ServerInThread) -> None:
    asked = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "How many are there?"}],
    }
    counted = client_of(server).messages.count_tokens(model=MODEL, **asked)

    usage = ask(server, **asked).usage

    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == len("<system>Be brief.\n<user>How many are there?\n<assistant>")


def test_a_text_too_long_to_be_answered_is_not_counted_either(server: ServerInThread) -> None:
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 4096"):
        client_of(server).messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x" * 10_000}])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type: is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]},
            "the model reads only text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "a"}}]}
                ]
            },
            "Invalid value 'file'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "send the text as a source of type text",
        ),
        ({"tools": [{"name": "a", "input_schema": {}}]}, "the model's chat template does not support tools"),
        ({"tools": [{"name": "a"}]}, "input_schema: is missing"),
        (
            {"tools": [{"name": "web_search", "type": "web_search_20250305", "max_uses": 8}]},
            "tools[0]: type: web_search_20250305 is a tool of Anthropic's own servers",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'required', but the request has no tools"),
        ({"temperature": 1.5}, "temperature"),
        ({"unheard_of": 1}, "unheard_of: unknown parameter"),
        ({"max_tokens": 5000}, "maximum context length is 4096"),
        ({"max_tokens": 4090}, "input length and `max_tokens` exceed context limit: 24 + 4090 > 4096"),
        (
            {"messages": [{"role": "user", "content": "x" * 4085}]},
            "prompt is too long: 4103 tokens > 4096 maximum. This model's maximum context length is 4096 tokens.",
        ),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt is too long: "),
    ],
)
def test_a_mistake_is_named_in_anthropics_shape(server: ServerInThread, changed: dict, told: str) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": HELLO, **changed}

    answer = server.post("/v1/messages", json=body)

    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert told in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]


# What Claude Code sends beside the conversation, with the nulls that clients in Go and Java write.
CODING = {
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high", "format": None, "task_budget": None},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
    "metadata": {"user_id": "u"},
    "stop_sequences": None,
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
}
NULLS = [
    {"role": "user", "content": [{"type": "text", "text": "Hello?", "citations": None, "cache_control": None}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": None}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": None, "is_error": None}],
    },
]


def test_what_coding_agents_send_is_let_pass(server: ServerInThread) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": HELLO, "temperature": 0, "system": "Be brief."}
    plain = server.post("/v1/messages", json=body).json()

    thoughts = [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]
    for more in (CODING, *({"thinking": thought} for thought in thoughts)):
        answer = server.post("/v1/messages", json={**body, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"] == plain["content"]
    counted = server.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HELLO, **CODING})
    assert counted.json()["input_tokens"] == len("<system>Be brief.\n<user>Hello?\n<assistant>")


def test_what_is_ignored_is_told_in_one_line_for_all_requests(
    server: ServerInThread, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": MODEL, "max_tokens": 1, "messages": HELLO, "inference_geo": "us", "user_profile_id": "u"}

    with caplog.at_level(logging.INFO, "kvtier.server.generation_request"):
        for _ in range(2):
            assert server.post("/v1/messages?beta=true", json=body).status_code == 200

    told = [record.getMessage() for record in caplog.records if record.name == "kvtier.server.generation_request"]
    assert told == [
        f"request: ignoring the parameter '{name}', which has no effect here"
        for name in ("inference_geo", "user_profile_id")
    ]


def test_a_header_that_differs_between_sessions_is_not_in_the_prompt(server: ServerInThread) -> None:
    headers = [f"x-anthropic-billing-header: cc_version=2.1.197.{session}; cc_entrypoint=cli;" for session in "ab"]
    text = "You know harbours. " * 10
    alone = [{"type": "text", "text": header} for header in headers]
    systems = [[each, {"type": "text", "text": text}] for each in alone]

    plain = ask(server, system=text, messages=HELLO)
    first, second = (ask(server, system=system, messages=HELLO) for system in systems)
    as_text = ask(server, system=f"{headers[0]}\n{text}", messages=HELLO)
    nothing_else = ask(server, system=alone[:1], messages=HELLO)

    for done in (first, second, as_text):
        assert done.content == plain.content
        assert done.usage.cache_read_input_tokens > len(text)
    assert nothing_else.content == ask(server, messages=HELLO).content
    spoken = [{"role": "user", "content": headers[0]}]  # only the system prompt has such a header
    assert client_of(server).messages.count_tokens(model=MODEL, messages=spoken).input_tokens > len(headers[0])


def test_nulls_of_clients_count_as_absent_at_any_depth(server: ServerInThread) -> None:
    answer = server.post("/v1/messages", json={"model": MODEL, "max_tokens": 1, "messages": NULLS})

    assert answer.status_code == 200, answer.text


def test_an_answer_follows_the_schema_that_anthropics_parameter_has(server: ServerInThread) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "schema": schema}

    for asked in ({"output_config": {"format": named}}, {"output_format": named}):
        body = {"model": MODEL, "max_tokens": 300, "messages": HELLO, "temperature": 1, "seed": 1, **asked}
        answer = server.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "end_turn"
        assert json.loads(answer["content"][0]["text"])["a"] in ("x", "y")


def test_a_body_that_is_too_large_has_anthropics_type() -> None:
    with serving(build("llama"), tables(max_body=2000)) as server:
        large = [{"role": "user", "content": "x" * 2000}]
        with pytest.raises(anthropic.RequestTooLargeError) as caught:
            ask(server, messages=large)
        at_openais = server.post("/v1/chat/completions", json={"model": MODEL, "messages": large})

    assert caught.value.body["error"]["type"] == "request_too_large"
    assert at_openais.status_code == 413
    assert (at_openais.json()["error"]["type"], at_openais.json()["error"]["code"]) == (
        "invalid_request_error",
        "body_too_large",
    )


def test_the_client_raises_the_errors_that_it_knows(server: ServerInThread) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown_model:
        client_of(server).messages.create(model="claude", max_tokens=1, messages=HELLO)
    file = {"type": "document", "source": {"type": "file", "file_id": "gone"}}
    with pytest.raises(anthropic.NotFoundError) as unknown_document:
        ask(server, messages=[{"role": "user", "content": [file]}])

    for raised in (unknown_model, unknown_document):
        assert raised.value.body["error"]["type"] == "not_found_error"
        assert raised.value.request_id
    method = server.get("/v1/messages")
    assert (method.status_code, method.json()["error"]["type"]) == (405, "invalid_request_error")


def test_without_a_chat_template_the_error_says_so() -> None:
    refused = pytest.raises(anthropic.BadRequestError, match="no chat template")
    with serving(build("llama"), tables(), tokenizer=byte_tokenizer()) as server, refused:
        ask(server, messages=HELLO)


def test_a_full_queue_is_a_rate_limit() -> None:
    config = tables(max_queued=0)
    config["scheduler"] = {**config["scheduler"], "max_running": 1}
    with serving(build("llama"), config) as server, server.streaming("a" * 50, max_tokens=3000) as running:
        next(running)
        with pytest.raises(anthropic.RateLimitError) as full:
            ask(server, messages=HELLO)

    assert full.value.body["error"]["type"] == "rate_limit_error"
    assert int(full.value.response.headers["retry-after"]) > 0


def test_keys_come_in_either_header_and_a_wrong_one_is_refused() -> None:
    with serving(build("llama"), tables(), {"sk-ann-1111": "ann"}) as server:
        by_key = client_of(server, "sk-ann-1111").messages.create(model=MODEL, max_tokens=1, messages=HELLO, **GREEDY)
        http = httpx2.Client(verify=NO_TLS)
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="sk-ann-1111", max_retries=0, http_client=http)
        by_token = bearer.messages.create(model=MODEL, max_tokens=1, messages=HELLO, **GREEDY)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client_of(server, "sk-bob").messages.create(model=MODEL, max_tokens=1, messages=HELLO)
        models = server.get("/v1/models", headers={"x-api-key": "sk-ann-1111"})

    assert by_key.content == by_token.content
    assert by_token.usage.cache_read_input_tokens > 0  # the same tenant
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert models.status_code == 200
