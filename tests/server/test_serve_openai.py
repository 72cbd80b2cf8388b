"""The server answers the `openai` client, and refuses mistakes in OpenAI's shape."""

import asyncio
import json
import random
import re
from itertools import groupby

import openai
import pytest
import torch
from serving import DEADLINE_S, MODEL, ServerInThread, chat_tokenizer, events, serving, tables
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from transformers import GenerationConfig, PreTrainedModel

from kvtier import LLM, SamplingParams

GREEDY = {"model": MODEL, "temperature": 0}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def text_of(token_ids: list[int]) -> str:
    return byte_tokenizer().decode(token_ids)


def test_a_completion_is_what_plain_transformers_says(server: ServerInThread, model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 70)

    done = server.openai().completions.create(prompt=prompt, max_tokens=12, **GREEDY)

    (choice,) = done.choices
    assert choice.text == text_of(plain_greedy(model, prompt, 12))
    assert (done.object, done.model, choice.index, choice.finish_reason) == ("text_completion", MODEL, 0, "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (70, 12, 82)


def test_a_prompt_may_be_a_text_or_token_ids_and_many_of_either(server: ServerInThread) -> None:
    texts = ["Say hello.", "Say goodbye."]
    ids = [byte_tokenizer()(text)["input_ids"] for text in texts]

    answers = [
        [
            choice.text
            for prompt in prompts
            for choice in server.openai().completions.create(prompt=prompt, max_tokens=5, **GREEDY).choices
        ]
        for prompts in (texts, ids, [texts], [ids])
    ]

    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert len(answers[0]) == 2


def test_a_chat_goes_through_the_template(server: ServerInThread, model: PreTrainedModel) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]},
    ]
    written = "<system>Be brief.\n<user>Say\nhello.\n<assistant>"

    done = server.openai().chat.completions.create(messages=messages, max_completion_tokens=9, **GREEDY)

    (choice,) = done.choices
    assert choice.message.content == text_of(plain_greedy(model, byte_tokenizer()(written)["input_ids"], 9))
    assert (done.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert done.usage.prompt_tokens == len(written)


def test_an_answer_can_be_sent_back_as_it_came(server: ServerInThread) -> None:
    client, question = server.openai(), {"role": "user", "content": "Hello?"}
    answer = client.chat.completions.create(messages=[question], max_tokens=4, **GREEDY).choices[0].message

    again = client.chat.completions.create(messages=[question, answer.model_dump(), question], max_tokens=4, **GREEDY)

    assert again.choices[0].finish_reason == "length"


def test_an_answer_that_is_begun_is_gone_on_with(server: ServerInThread, model: PreTrainedModel) -> None:
    client, written = server.openai(), "<user>Hello?\n<assistant>I say"
    messages = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "I say"}]
    asked = {"max_tokens": 9, "extra_body": {"continue_final_message": True}, **GREEDY}

    done = client.chat.completions.create(messages=messages, **asked)

    assert done.choices[0].message.content == text_of(plain_greedy(model, byte_tokenizer()(written)["input_ids"], 9))
    with pytest.raises(openai.BadRequestError, match="the last message is not the assistant's"):
        client.chat.completions.create(messages=messages[:1], **asked)


def test_a_chat_without_a_limit_may_fill_the_context(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": "x" * 4020}]

    done = server.openai().chat.completions.create(messages=messages, **GREEDY)

    assert done.usage.total_tokens == 4096


def test_a_streamed_chat_is_the_whole_one_in_pieces(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": "Say hello, ship 7."}]
    client = server.openai()
    whole = client.chat.completions.create(messages=messages, max_tokens=20, n=2, **GREEDY)

    chunks = list(client.chat.completions.create(messages=messages, max_tokens=20, n=2, stream=True, **GREEDY))

    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    by_choice = sorted((chunk.choices[0] for chunk in chunks), key=lambda choice: choice.index)
    for index, choices in groupby(by_choice, key=lambda choice: choice.index):
        first, *others = choices
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in others) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in others] == [None] * (len(others) - 1) + ["length"]


def test_a_streamed_completion_is_the_whole_one_in_pieces(server: ServerInThread) -> None:
    client, prompts = server.openai(), [prompt_of(2, 40), prompt_of(3, 20)]
    whole = client.completions.create(prompt=prompts, max_tokens=20, **GREEDY)

    chunks = list(client.completions.create(prompt=prompts, max_tokens=20, stream=True, **GREEDY))

    for choice in whole.choices:
        texts = [item.text for chunk in chunks for item in chunk.choices if item.index == choice.index]
        assert "".join(texts) == choice.text
        assert len(texts) > 5


def test_a_stream_is_made_of_events_and_ends_with_done(server: ServerInThread) -> None:
    body = {**GREEDY, "prompt": "Hello", "max_tokens": 3, "stream": True}

    answer = server.post("/v1/completions", json=body)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(list(events(iter(answer.text.splitlines())))) >= 1


def test_the_last_chunk_has_the_usage_if_it_is_wanted(server: ServerInThread) -> None:
    prompt, client = prompt_of(4, 100), server.openai()
    ask = {"prompt": prompt, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}

    first, second = (list(client.completions.create(**ask))[-1] for _ in range(2))

    assert (first.choices, second.choices) == ([], [])
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (100, 5)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 99
    assert second.kvtier["tokens"] == {"device": 99, "host": 0, "disk": 0, "remote": 0, "recomputed": 1}
    assert second.kvtier["reasons"] == {"last_block": 1}


def varying_bytes(chunk: dict) -> int:
    """The size of what differs between the chunks of one stream: the text, its log probabilities and the padding."""
    (choice,) = chunk["choices"]
    told = [choice.get("text", choice.get("delta", {}).get("content", "")), choice["logprobs"]]
    return len(json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()) + len(chunk["obfuscation"])


@pytest.mark.parametrize("logprobs", [False, True], ids=["text", "with logprobs"])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_obfuscation_pads_every_delta_to_a_multiple_of_32_bytes_if_it_is_asked_for(
    server: ServerInThread, endpoint: str, logprobs: bool
) -> None:
    about = {"prompt": "Say hello.", "logprobs": 2 if logprobs else None}
    if endpoint == "chat/completions":
        about = {"messages": [{"role": "user", "content": "Say hello."}], "logprobs": logprobs}
    ask = {**GREEDY, **about, "max_tokens": 20, "stream": True}
    options = {"include_usage": True, "include_obfuscation": True}

    answer = server.post(f"/v1/{endpoint}", json={**ask, "stream_options": options})
    again = server.post(f"/v1/{endpoint}", json={**ask, "stream_options": {"include_obfuscation": False}})
    plain = server.post(f"/v1/{endpoint}", json=ask)

    *deltas, usage = events(iter(answer.text.splitlines()))
    assert len(deltas) > 3
    assert {varying_bytes(chunk) % 32 for chunk in deltas} == {0}
    assert all(chunk["obfuscation"] for chunk in deltas)
    if not logprobs:
        assert {varying_bytes(chunk) for chunk in deltas} == {32}
        assert len({chunk["obfuscation"] for chunk in deltas}) == len(deltas)
    assert "obfuscation" not in usage
    assert "obfuscation" not in again.text + plain.text


def test_the_openai_client_reads_an_obfuscated_stream(server: ServerInThread) -> None:
    ask = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 20, "stream": True, **GREEDY}
    client = server.openai().chat.completions

    plain, padded = (
        "".join(chunk.choices[0].delta.content or "" for chunk in client.create(**ask, stream_options=options))
        for options in ({}, {"include_obfuscation": True})
    )

    assert padded == plain != ""


def test_tokens_add_up_and_each_recomputed_one_has_a_reason(server: ServerInThread) -> None:
    prompts = [prompt_of(5, 90), [*prompt_of(5, 64), *prompt_of(6, 30)]]

    for prompt in [*prompts, prompts]:
        done = server.complete(prompt, n=2)

        tokens = done["kvtier"]["tokens"]
        assert sum(tokens.values()) == done["usage"]["prompt_tokens"]
        assert sum(done["kvtier"]["reasons"].values()) == tokens["recomputed"]
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(tokens.values()) - tokens["recomputed"]


def test_a_stop_string_ends_the_text_before_itself(server: ServerInThread) -> None:
    client = server.openai()
    text = client.completions.create(prompt="Say hello.", max_tokens=30, **GREEDY).choices[0].text

    (choice,) = client.completions.create(prompt="Say hello.", max_tokens=30, stop=text[8:10], **GREEDY).choices

    assert choice.text == text[: text.index(text[8:10])]
    assert choice.finish_reason == "stop"


def test_the_same_seed_gives_the_same_and_each_of_n_choices_has_its_own(server: ServerInThread) -> None:
    client, ask = server.openai(), {"model": MODEL, "prompt": prompt_of(7, 50), "max_tokens": 12, "temperature": 1.5}
    first, again = (client.completions.create(seed=40, n=3, **ask) for _ in range(2))
    alone = [client.completions.create(seed=seed, **ask).choices[0].text for seed in (40, 41, 42)]

    texts = [choice.text for choice in first.choices]

    assert texts == [choice.text for choice in again.choices] == alone
    assert len(set(texts)) == 3


@pytest.mark.parametrize("cut", [{"extra_body": {"top_k": 1}}, {"top_p": 1e-6}])
def test_cutting_all_but_the_likeliest_is_greedy(server: ServerInThread, cut: dict[str, object]) -> None:
    client, ask = server.openai(), {"model": MODEL, "prompt": prompt_of(8, 50), "max_tokens": 12}

    drawn = client.completions.create(temperature=2, **ask, **cut)

    assert drawn.choices[0].text == client.completions.create(temperature=0, **ask).choices[0].text


def test_the_other_choices_find_the_blocks_of_the_first(server: ServerInThread) -> None:
    before = server.service.llm.statistics().tokens

    server.complete(prompt_of(9, 160), n=4)

    now = server.service.llm.statistics().tokens
    assert now.num_tokens - before.num_tokens == 4 * 160
    assert now.device - before.device >= 3 * (160 // 16 * 16 - 16)
    assert now.recomputed - before.recomputed <= 160 + 3 * 16


def test_logprobs_are_the_models_own(server: ServerInThread, model: PreTrainedModel) -> None:
    prompt = prompt_of(10, 40)
    generated = plain_greedy(model, prompt, 6)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)

    client = server.openai()
    told = client.completions.create(prompt=prompt, max_tokens=6, logprobs=3, **GREEDY).choices[0].logprobs
    warm = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, logprobs=0, temperature=1.7, seed=1)

    best = expected.gather(1, torch.tensor(generated)[:, None])[:, 0]
    assert told.token_logprobs == pytest.approx(best.tolist(), abs=1e-3)
    for token, text in zip(told.tokens, map(text_of, ([token_id] for token_id in generated)), strict=True):
        assert re.fullmatch(r"bytes:\\x[89a-f][0-9a-f]", token) if text == "\ufffd" else token == text
    assert told.text_offset == list(range(6))
    for row, top in zip(expected, told.top_logprobs, strict=True):
        assert sorted(top.values(), reverse=True)[0] == pytest.approx(float(row.max()), abs=1e-3)
    (drawn,) = warm.choices[0].logprobs.token_logprobs  # before temperature
    assert min(abs(expected[0] - drawn)) < 1e-3


def test_bytes_of_tokens_that_are_parts_of_a_character_make_it_up(server: ServerInThread) -> None:
    """The tokenizer has a token for each byte, and the bias lets the model say nothing but those of one letter."""
    halves = [195, 169]  # é
    bias = {str(token_id): 100.0 for token_id in byte_tokenizer()("é")["input_ids"]}
    ask = {"max_tokens": 8, "temperature": 1, "seed": 3, "logit_bias": bias}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, **ask}

    chat = server.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    text = server.post(
        "/v1/completions", json={"model": MODEL, "prompt": "é", "echo": True, "logprobs": 2, **ask}
    ).json()

    assert {each["token"] for each in chat} == {"\ufffd"}
    assert [sorted(each["bytes"]) for each in chat] == [each["bytes"] for each in chat]
    assert {value for each in chat for value in each["bytes"]} == set(halves)
    told = text["choices"][0]["logprobs"]
    assert told["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert set(told["tokens"]) == {"bytes:\\xc3", "bytes:\\xa9"}
    assert all(len(top) >= 2 for top in told["top_logprobs"][1:])


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_may_have_the_usage_so_far(server: ServerInThread, endpoint: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in endpoint else {"prompt": "Say hi."}
    body = {"model": MODEL, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True, **asked}
    options = {"include_usage": True, "continuous_usage_stats": True}

    def chunks(**options: bool) -> list[dict]:
        told = server.post(endpoint, json={**body, "stream_options": options}).text
        return list(events(iter(told.splitlines())))

    *told, last = chunks(**options)
    usages = [chunk["usage"] for chunk in told]
    generated = [usage["completion_tokens"] for usage in usages]
    assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert (generated, generated[-1]) == (sorted(generated), 5)
    assert set(generated) & {1, 2, 3, 4}, "it does not grow while the answer comes"
    assert "chat" not in endpoint or generated[0] == 0
    assert all("usage" not in chunk for chunk in chunks(continuous_usage_stats=True))


def test_a_chats_logprobs_name_the_likeliest_tokens_with_their_bytes(server: ServerInThread) -> None:
    client, messages = server.openai(), [{"role": "user", "content": "Hello?"}]
    ask = {"messages": messages, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **GREEDY}

    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **ask)]
    without = client.chat.completions.create(messages=messages, max_tokens=6, **GREEDY)

    streamed = [item for choice in chunks if choice.logprobs for item in choice.logprobs.content]
    assert [item.logprob for item in whole] == pytest.approx([item.logprob for item in streamed], abs=1e-3)
    assert [len(item.top_logprobs) for item in whole] == [2] * 6
    assert all(item.top_logprobs[0].logprob == item.logprob for item in whole)  # greedy
    assert all(len(item.bytes) == 1 for item in whole)  # of this tokenizer's tokens
    assert all(item.token in ("\ufffd", bytes(item.bytes).decode(errors="replace")) for item in whole)
    assert without.choices[0].logprobs is None


def test_salts_keep_apart_and_reading_the_cache_can_be_skipped(server: ServerInThread) -> None:
    prompt = prompt_of(11, 100)

    hits = [
        server.complete(prompt, **others)["kvtier"]["tokens"]["device"]
        for others in (
            {"cache_salt": "ann"},
            {"cache_salt": "ann"},
            {"cache_salt": "bob"},
            {},
            {"kvtier": {"skip_reading_prefix_cache": True}},
            {"kvtier": {}},
        )
    ]

    assert hits == [0, 99, 0, 0, 0, 99]


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "gpt-5"}, 404, "model", "model_not_found"),
        ({"prompt": "x" * 5000}, 400, "prompt", "context_length_exceeded"),
        ({"max_tokens": 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": []}, 400, "prompt", "invalid_value"),
        ({"prompt": ""}, 400, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, 400, "prompt", "invalid_value"),
        ({"prompt": [VOCAB]}, 400, "prompt", "invalid_value"),
        ({"prompt": [-1]}, 400, "prompt", "invalid_value"),
        ({"prompt": {"text": "a"}}, 400, "prompt", "invalid_value"),
        ({"prompt": None}, 400, "prompt", "missing_required_parameter"),
        ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
        ({"temperature": 3}, 400, "temperature", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, 400, "max_tokens", "invalid_value"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": 1.5}, 400, "n", "invalid_value"),
        ({"logprobs": 100}, 400, "logprobs", "invalid_value"),
        ({"cache_salt": ""}, 400, "cache_salt", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ({"best_of": 3}, 400, "best_of", "invalid_value"),
        ({"temprature": 0}, 400, "temprature", "unknown_parameter"),
        ({"kvtier": {"pins": True}}, 400, "kvtier.pins", "unknown_parameter"),
        ({"echo": "yes"}, 400, "echo", "invalid_value"),
        ({"logit_bias": {"a": 5}}, 400, "logit_bias", "invalid_value"),
        ({"logit_bias": {"3": "much"}}, 400, "logit_bias[...]", "invalid_value"),
        ({"logit_bias": {"-3": 5}}, 400, "logit_bias", "invalid_value"),
        ({"logit_bias": {"999999": 5}}, 400, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "invalid_value"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
        ({"min_p": 1.5}, 400, "min_p", "invalid_value"),
        ({"min_tokens": -1}, 400, "min_tokens", "invalid_value"),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "invalid_value"),
        ({"bad_words": [""]}, 400, "bad_words[0]", "invalid_value"),
        ({"bad_words": [" "]}, 400, "bad_words", "invalid_value"),
        ({"bad_words": ["a"] * 129}, 400, "bad_words", "invalid_value"),
        ({"suffix": "end"}, 400, "suffix", "unsupported_parameter"),
    ],
)
def test_a_mistake_is_an_error_in_openais_shape(
    server: ServerInThread, change: dict[str, object], status: int, param: str, code: str
) -> None:
    answer = server.post("/v1/completions", json={**GREEDY, "prompt": "Hello", **change})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_raises_its_own_errors(server: ServerInThread, stream: bool) -> None:
    client = server.openai()

    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096") as too_long:
        client.completions.create(prompt="x" * 5000, stream=stream, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="the tokenizer has 0 to 255"):
        client.completions.create(prompt=[999], stream=stream, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hello", stream=stream)

    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tune", "text": ""}]}]}, None),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ],
)
def test_a_mistake_in_a_chat_names_its_field(server: ServerInThread, change: dict[str, object], param: str) -> None:
    body = {**GREEDY, "messages": [{"role": "user", "content": "Hello"}], **change}

    answer = server.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_of_sampling_do_what_they_do_in_the_library(
    server: ServerInThread, model: PreTrainedModel, route: str
) -> None:
    is_chat = "chat" in route
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Hello"}
    few = dict.fromkeys(byte_tokenizer()("abcdef")["input_ids"], 60.0)  # so that penalties change the answer soon
    changes: list[dict[str, object]] = [
        {"logit_bias": few},
        {"logit_bias": few, "presence_penalty": 2},
        {"logit_bias": few, "frequency_penalty": 1.5},
        {"logit_bias": few, "repetition_penalty": 1.2},
        {"logit_bias": few, "bad_words": ["c"]},
        {"logit_bias": few, "stop_token_ids": list(few), "min_tokens": 3},
        {"temperature": 2, "seed": 1},
        {"temperature": 2, "seed": 1, "min_p": 0.4},
    ]

    answers = []
    with LLM(model, {"device": {"capacity": "1MiB"}, "host": {"capacity": 0}}, byte_tokenizer()) as llm:
        for change in changes:
            body = {**GREEDY, **asked, "max_tokens": 12, **change}
            choice = server.post(route, content=json.dumps(body)).json()["choices"][0]
            answers.append(choice["message"]["content"] if is_chat else choice["text"])
            prompt = "<user>Hello\n<assistant>" if is_chat else "Hello"
            params = SamplingParams(**{"max_tokens": 12, **change})
            assert answers[-1] == llm.generate(prompt, params)[0].text, change

    assert len(set(answers)) == len(changes), answers


def test_what_changes_nothing_is_let_pass(server: ServerInThread) -> None:
    harmless = {
        "user": "ann",
        "metadata": {"a": "b"},
        "presence_penalty": 0,
        "logit_bias": {},
        "echo": False,
        "best_of": 1,
        "suffix": None,
        "stop": None,
        "service_tier": "auto",
    }

    assert server.complete("Hello", **harmless)["choices"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(server: ServerInThread, body: bytes) -> None:
    answer = server.post("/v1/completions", content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("field", ["prompt", "cache_salt"])
def test_a_text_that_is_no_unicode_is_a_400(server: ServerInThread, field: str) -> None:
    answer = server.post(
        "/v1/completions", content=b'{"model": "small", "prompt": "a", "%s": "\\ud800"}' % field.encode()
    )

    assert answer.status_code == 400


def test_other_routes_and_methods_are_errors_of_the_same_shape(server: ServerInThread) -> None:
    assert server.get("/v2/nothing").status_code == 404
    assert server.get("/v2/nothing").json()["error"]["type"] == "invalid_request_error"
    assert server.get("/v1/completions").status_code == 405


def test_the_model_is_listed(server: ServerInThread) -> None:
    client = server.openai()

    (listed,) = client.models.list().data

    assert (listed.id, listed.owned_by, listed.max_model_len) == (MODEL, "kvtier", 4096)
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_request_has_an_id_its_own_or_a_new_one(server: ServerInThread) -> None:
    assert server.get("/health", headers={"x-request-id": "req-7"}).headers["x-request-id"] == "req-7"
    assert len(server.get("/nothing", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_health_version_and_metrics_are_there(server: ServerInThread) -> None:
    server.complete("Hello", max_tokens=3)

    metrics = server.get("/metrics").text

    assert server.get("/health").json() == {"status": "alive"}
    assert server.get("/version").json()["version"]
    assert "kvtier_prompt_tokens_total" in metrics
    assert 'kvtier_http_requests_total{route="/v1/completions",status="200"}' in metrics
    assert "kvtier_http_ttft_seconds_bucket" in metrics
    assert "kvtier_http_token_gap_seconds_count" in metrics


@pytest.mark.long
def test_sixty_four_streams_at_once_get_the_tokens_of_being_alone(
    server: ServerInThread, model: PreTrainedModel
) -> None:
    prompts = [prompt_of(100 + seed, 10 + 3 * seed) for seed in range(64)]
    with LLM(build("llama"), tables(100), byte_tokenizer()) as llm:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        expected = [llm.generate(prompt, sampling)[0].text for prompt in prompts]

    async def read(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        stream = await client.completions.create(prompt=prompt, max_tokens=24, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reads = asyncio.gather(*(read(client, prompt) for prompt in prompts))
            return await asyncio.wait_for(reads, 2 * DEADLINE_S)

    assert asyncio.run(read_all()) == expected


def test_a_tokenizer_without_a_template_takes_no_chats() -> None:
    with (
        serving(build("llama"), tables(20), tokenizer=byte_tokenizer()) as server,
        pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"),
    ):
        server.openai().chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **GREEDY)


def test_what_the_template_refuses_is_a_400_with_its_reason() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with (
        serving(build("llama"), tables(20), tokenizer=tokenizer) as server,
        pytest.raises(openai.BadRequestError, match="roles must alternate"),
    ):
        server.openai().chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **GREEDY)


@pytest.mark.long
def test_variables_of_the_template_are_the_clients_and_nothing_else_is() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if thinking %}<think budget={{ budget / 2 }}>{% endif %}"
    said = [{"role": "user", "content": "Hello"}]
    with serving(build("llama"), tables(20), tokenizer=tokenizer) as server:

        def num_prompt_tokens(variables: dict[str, object]) -> int:
            body = {"chat_template_kwargs": variables}
            return server.openai().chat.completions.create(messages=said, extra_body=body, **GREEDY).usage.prompt_tokens

        assert num_prompt_tokens({}) == len("Hello")
        assert num_prompt_tokens({"thinking": True, "budget": 8}) == len("Hello<think budget=4.0>")
        for name in ("tokenize", "messages", "chat_template", "add_generation_prompt", "padding"):
            with pytest.raises(openai.BadRequestError, match=f"variable {name} is reserved"):
                num_prompt_tokens({name: True})
        with pytest.raises(openai.BadRequestError, match="the model's chat template rejects these messages"):
            num_prompt_tokens({"thinking": True, "budget": "eight"})


def test_a_models_generation_config_holds_where_a_request_does_not_say() -> None:
    model = build("llama")
    model.generation_config = GenerationConfig(temperature=0.01, top_k=1, max_new_tokens=6)
    prompt = prompt_of(8, 20)

    with serving(model, tables()) as server:
        unsaid = server.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 9}).json()
        said = server.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 2, "top_k": 0}
        ).json()

    assert unsaid["choices"][0]["text"] == text_of(plain_greedy(model, prompt, 6))
    assert said["choices"][0]["text"] != text_of(plain_greedy(model, prompt, 5))
    assert said["usage"]["completion_tokens"] == 5
