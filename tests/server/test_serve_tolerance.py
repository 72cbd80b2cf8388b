"""What strangers' clients send and mean nothing by is let pass; what cannot be done is refused in a sentence."""

import logging
from collections.abc import Iterator

import httpx
import pytest
from plain_http import NO_TLS
from serving import MODEL, ServerInThread, chat_tokenizer, events, serving, tables
from small_models import VOCAB, build, byte_tokenizer

from kvtier.server.generation_request import log_unknown_fields
from kvtier.server.logged_once import MAX_NAMES
from kvtier.web.request_body import MAX_VALUES

QUESTION = {"role": "user", "content": "Hello?"}
GREEDY = {"model": MODEL, "temperature": 0}
WRITTEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TOLD = WRITTEN + "{{ reasoning_effort }}{{ shape.side if shape }}<assistant>"


def chat(server: ServerInThread, *messages: dict, **others: object) -> str:
    answer = server.post("/v1/chat/completions", json={**GREEDY, "messages": messages, "max_tokens": 5, **others})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def error(server: ServerInThread, path: str, body: dict) -> dict:
    answer = server.post(path, json={**GREEDY, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_unknown_fields_of_messages_change_nothing_and_are_told_once(
    server: ServerInThread, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"role": "assistant", "content": "Hello."}
    plain = chat(server, QUESTION, answers, QUESTION)

    with caplog.at_level(logging.INFO, "kvtier.server.generation_request"):
        for _ in range(2):
            told = chat(server, QUESTION, {**answers, "humour": "Dry.", "mood": 1}, QUESTION)

    assert told == plain
    told_by = "kvtier.server.generation_request"  # another test may have had all loggers say more
    assert [record.getMessage() for record in caplog.records if record.name == told_by] == [
        "messages: ignoring the unknown field 'humour'",
        "messages: ignoring the unknown field 'mood'",
    ]


def test_a_client_that_makes_names_up_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier.server.generation_request"):
        for number in range(3 * MAX_NAMES):
            log_unknown_fields([f"{number}-{'x' * 10_000}"])

    assert len(caplog.records) <= MAX_NAMES
    assert all(len(record.getMessage()) < 120 for record in caplog.records)


def test_unknown_fields_of_the_request_stay_errors(server: ServerInThread) -> None:
    said = error(server, "/v1/chat/completions", {"messages": [QUESTION], "mood": 1})
    assert (said["param"], said["code"]) == ("mood", "unknown_parameter")


def test_empty_settings_change_nothing(server: ServerInThread) -> None:
    plain = chat(server, QUESTION)
    for nothing in ({"top_logprobs": 0}, {"stop": ""}, {"stop": []}, {"stop": [""]}):
        assert chat(server, QUESTION, **nothing) == plain, nothing
    assert "logprobs: " not in error(server, "/v1/chat/completions", {"messages": [QUESTION], "top_logprobs": 1})


# Parameters of vLLM's API with the values that they have by default, where those are not null.
UNCHANGED = {
    "allowed_token_ids": [],
    "bad_words": [],
    "best_of": 1,
    "detokenize": True,
    "early_stopping": False,
    "ec_transfer_params": {},
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": {},
    "length_penalty": 1.0,
    "logit_bias": {},
    "logits_processors": [],
    "logprob_token_ids": [],
    "min_p": 0.0,
    "min_tokens": 0,
    "mm_payload": "tensors",
    "n": 1,
    "presence_penalty": 0.0,
    "priority": 0,
    "repetition_penalty": 1.0,
    "request_id": "0123456789abcdef",
    "return_mm_kwargs": False,
    "return_prompt_text": False,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": False,
    "routed_experts_prompt_start": 0,
    "session_id": "s",
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "stream_interval": 1,
    "top_k": 0,
    "top_p": 1.0,
    "truncation_side": "left",
    "use_beam_search": False,
    "vllm_xargs": {},
    "watermarking": False,
}
OF_CHATS = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": [],
    "echo": False,
    "include_reasoning": True,
    "logprobs": False,
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "verbosity": "medium",
}
NULL = {
    "chat_template",
    "cache_salt",
    "max_completion_tokens",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "seed",
    "stream_options",
    "structured_outputs",
    "suffix",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "user",
}
CHANGED = {
    "best_of": 3,
    "chat_template": "{{ messages }}",
    "include_stop_str_in_output": True,
    "length_penalty": 1.2,
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 4},
    "return_token_ids": True,
    "skip_special_tokens": False,
    "thinking_token_budget": 10,
    "truncation_side": "right",
    "use_beam_search": True,
}


def test_vllms_parameters_with_values_that_change_nothing_are_let_pass(server: ServerInThread) -> None:
    nulls = dict.fromkeys(NULL)
    assert chat(server, QUESTION, **UNCHANGED, **OF_CHATS, **nulls) == chat(server, QUESTION)
    plain = server.complete("Hello", max_tokens=5)
    unchanged = {**UNCHANGED, "ignore_eos": True, "add_special_tokens": True, "echo": False, **nulls}
    assert server.complete("Hello", max_tokens=5, **unchanged)["choices"] == plain["choices"]


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_those_that_would_change_the_answer_are_refused_by_name(server: ServerInThread, path: str, name: str) -> None:
    asked = {"messages": [QUESTION]} if "chat" in path else {"prompt": "Hello"}

    said = error(server, path, {**asked, name: CHANGED[name]})

    assert said["message"].startswith(name)
    assert "\n" not in said["message"]


def test_ignored_parameters_are_told_once(server: ServerInThread, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier.server.generation_request"):
        for _ in range(2):
            chat(server, QUESTION, safety_identifier="me", prompt_cache_options={"mode": "implicit"})

    told = [record.getMessage() for record in caplog.records if record.name == "kvtier.server.generation_request"]
    assert told == [
        "request: ignoring the parameter 'prompt_cache_options', which has no effect here",
        "request: ignoring the parameter 'safety_identifier', which has no effect here",
    ]


def test_each_chunk_may_have_the_usage_so_far(server: ServerInThread) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**GREEDY, "messages": [QUESTION], "max_tokens": 5, "stream": True, "stream_options": options}

    *chunks, last = events(iter(server.post("/v1/chat/completions", json=body).text.splitlines()))

    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 5


def test_a_prompt_may_end_with_its_last_message(server: ServerInThread) -> None:
    assert prompt_of(server, add_generation_prompt=False) == "<user>Hello?\n<assistant>"  # of this template, always
    begun = [QUESTION, {"role": "assistant", "content": "I"}]
    continued = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(server, **continued) == "<user>Hello?\n<assistant>I"
    assert chat(server, *begun, add_generation_prompt=False, continue_final_message=True)


def test_nulls_count_as_absent_at_any_depth(server: ServerInThread) -> None:
    part = {"type": "text", "text": "Hello?", "cache_control": None}
    nulls = {
        "stream_options": None,
        "kvtier": {"pin": None, "ttl_s": None, "skip_reading_prefix_cache": None},
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"mood": None},
    }
    message = {"role": "user", "content": [part], "name": None, "tool_calls": None, "refusal": None}

    assert chat(server, message, **nulls) == chat(server, QUESTION)
    stream = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    body = {**GREEDY, "messages": [QUESTION], "max_tokens": 1, **stream}
    assert server.post("/v1/chat/completions", json=body).status_code == 200
    said = error(server, "/v1/chat/completions", {"messages": [{"role": None, "content": "a"}]})
    assert said["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("body", "half"),
    [
        (b'{"prompt":"\\ud83d"}', "\\ud83d"),
        (b'{"prompt":"a\\\\\\ud83d x"}', "\\ud83d"),
        (b'{"prompt":"\\ude00"}', "\\ude00"),
        (b'{"prompt":"\\ud83d\\ude00\\ude00"}', "\\ude00"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_half_a_character_is_named(server: ServerInThread, path: str, body: bytes, half: str) -> None:
    answer = server.post(path, content=body)

    assert answer.status_code == 400
    assert f"the body has {half}, half of a surrogate pair" in answer.json()["error"]["message"]


def test_what_only_looks_like_half_a_character_is_let_pass(server: ServerInThread) -> None:
    whole = server.post("/tokenize", content=b'{"prompt":"\\ud83d\\ude00 \\\\ud83d"}')
    cut = server.post("/tokenize", content=b'{"prompt":"\\\\ud83d')

    assert whole.json()["count"] == len("\N{GRINNING FACE} \\ud83d".encode())
    assert "truncated" in cut.json()["error"]["message"]


def test_what_holds_the_length_of_a_prompt_is_named() -> None:
    with serving(build("llama"), tables(num_slots=20, max_prompt_tokens=250)) as small:
        said = error(small, "/v1/completions", {"prompt": [7] * 250, "max_tokens": 200})["message"]
        long = error(small, "/v1/completions", {"prompt": "x" * 2000, "max_tokens": 300})["message"]
        longest = error(small, "/v1/completions", {"prompt": "x" * 255, "max_tokens": 1})["message"]

    expected = (
        "This server's maximum context length is 320 tokens, because device.capacity has room for no more "
        "(the model takes 4096); to raise it, restart the server with a larger device.capacity"
    )
    assert said.startswith(f"{expected}. However, you requested 450 (250 in")
    assert long.startswith(f"{expected}. With 300 in the completion, the prompt may have 20, but it has ")
    assert longest == "the prompt has 255 tokens or more, and server.max_prompt_tokens is 250; shorten it"


def test_a_model_that_reads_only_text_refuses_an_image_in_a_sentence(server: ServerInThread) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    said = error(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert said["message"] == "the model reads only text; leave the images out, or serve a model that sees images"
    assert said["param"] == "messages"


@pytest.fixture(scope="module")
def telling() -> Iterator[ServerInThread]:
    """Its template writes what it is told."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TOLD
    with serving(build("llama"), tables(), tokenizer=tokenizer) as address:
        yield address


def prompt_of(server: ServerInThread, **others: object) -> str:
    body = {"messages": [QUESTION], **others}
    tokens = server.post("/tokenize", json=body).json()["tokens"]
    return server.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_the_template_is_told_nested_values_and_the_effort(telling: ServerInThread) -> None:
    nested = {"shape": {"side": 12, "of": ["a", {"b": None}]}}
    assert prompt_of(telling, chat_template_kwargs=nested) == "<user>Hello?\n12<assistant>"

    def num_tokens(**others: object) -> int:
        body = {**GREEDY, "messages": [QUESTION], "max_tokens": 1, **others}
        return telling.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    without = num_tokens()
    assert num_tokens(reasoning_effort="high") == without + len("high")
    assert num_tokens(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}) == without + len("low")


def test_an_effort_means_nothing_to_a_completion(server: ServerInThread) -> None:
    plain = server.complete("Hello", max_tokens=5, temperature=0)
    asked = server.complete("Hello", max_tokens=5, temperature=0, reasoning_effort="low")
    assert asked["choices"] == plain["choices"]


def test_only_the_last_tokens_of_a_prompt_are_taken(server: ServerInThread) -> None:
    rest = [number * 7 % VOCAB for number in range(200)]
    alone = server.complete(rest, max_tokens=6, temperature=0)

    cut = server.complete([*range(200), *rest], max_tokens=6, temperature=0, truncate_prompt_tokens=200)

    assert cut["choices"][0]["text"] == alone["choices"][0]["text"]
    assert cut["usage"]["prompt_tokens"] == 200


def test_a_prompt_can_be_cut_to_what_the_model_takes(server: ServerInThread) -> None:
    longest = server.get("/v1/models").json()["data"][0]["max_model_len"]

    done = server.complete("x" * (longest + 500), max_tokens=6, truncate_prompt_tokens=-1)

    assert done["usage"]["prompt_tokens"] == longest - 6
    far_too_long = {"prompt": "x" * (20 * longest), "truncate_prompt_tokens": 10}
    assert "maximum context length" in error(server, "/v1/completions", far_too_long)["message"]
    body = {"prompt": "a", "truncate_prompt_tokens": 5, "kvtier": {"document": "d"}}
    assert "truncate_prompt_tokens" in error(server, "/v1/completions", body)["message"]


def test_tokens_are_vllms_shape(server: ServerInThread) -> None:
    longest = server.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = byte_tokenizer()("Hi €")["input_ids"]

    answer = server.post("/tokenize", json={"model": MODEL, "prompt": "Hi €", "return_token_strs": True}).json()

    assert (answer["count"], answer["max_model_len"], answer["tokens"]) == (len(ids), longest, ids)
    assert len(answer["token_strs"]) == len(ids)
    assert server.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hi €"}
    assert prompt_of(server) == "<user>Hello?\n<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a" * 100_000}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/detokenize", {"tokens": [VOCAB]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ],
)
def test_a_mistake_about_tokens_is_told(server: ServerInThread, path: str, body: dict, status: int) -> None:
    answer = server.post(path, json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})


@pytest.mark.parametrize("path", ["/v1/kvtier/explain", "/tokenize", "/v1/messages/count_tokens", "/v1/messages"])
def test_what_a_chat_refuses_is_refused_where_a_chat_is_made_of_another_body(server: ServerInThread, path: str) -> None:
    kept = [{"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"}]
    parts = [{"type": "text", "text": "Hello?", "cache_control": each} for each in kept]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}

    answer = server.post(path, json=body | ({"max_tokens": 1} if path == "/v1/messages" else {}))

    assert answer.status_code == 400, answer.text
    assert "a ttl of 1h comes after one of 5m" in answer.json()["error"]["message"]


def test_a_text_that_is_no_unicode_has_no_tokens(server: ServerInThread) -> None:
    assert server.post("/tokenize", content=b'{"prompt": "\\ud800"}').status_code == 400


def test_an_unknown_route_names_the_known_ones(server: ServerInThread) -> None:
    said = server.get("/v1/chat/completion").json()["error"]["message"]
    assert said.startswith("no such route: GET /v1/chat/completion; did you mean /v1/chat/completions? The routes are")
    assert "/tokenize" in said
    assert "/v1/models" in server.get("/nothing").json()["error"]["message"]


def test_pages_of_named_origins_alone_may_ask() -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    config = tables(cors_origins=["https://chat.example"])
    with serving(build("llama"), config, {"sk-ann-1111": "ann"}) as address:
        url = f"{address.url}/v1/chat/completions"
        before = httpx.options(url, headers=asked, verify=NO_TLS)
        other = httpx.options(url, headers=asked | {"origin": "https://evil.example"}, verify=NO_TLS)
        done = address.get(
            "/v1/models", headers={"origin": "https://chat.example", "authorization": "Bearer sk-ann-1111"}
        )
        refused = address.get("/v1/models", headers={"origin": "https://chat.example"})

    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "access-control-allow-origin" not in other.headers
    assert done.headers["access-control-allow-origin"] == "https://chat.example"
    assert refused.status_code == 401


def test_no_page_may_ask_unless_it_is_named(server: ServerInThread) -> None:
    answer = server.get("/v1/models", headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/kvtier/explain"])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(server: ServerInThread, path: str) -> None:
    body = b'{"prompt":[' + b"7," * (MAX_VALUES + 1) + b"7]}"

    answer = server.post(path, content=body)

    assert answer.status_code == 413
    assert f"{MAX_VALUES:,} values" in answer.json()["error"]["message"]
