"""Scores over HTTP: `echo`, `max_tokens` 0 and `prompt_logprobs`, as OpenAI's legacy API and vLLM have them."""

import httpx
import pytest
from plain_http import NO_TLS
from serving import MODEL, ServerInThread

PROMPT = "Who was it that came by?"  # a token for each byte
GREEDY = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "Who?"}]


def refused(server: ServerInThread, path: str = "/v1/completions", **body: object) -> dict:
    answer = server.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def choice_of(server: ServerInThread, prompt: object = PROMPT, **others: object) -> dict:
    return server.complete(prompt, **others)["choices"][0]


def test_an_echo_is_the_prompt_before_the_answer(server: ServerInThread) -> None:
    plain = choice_of(server, max_tokens=5)
    echoed = choice_of(server, max_tokens=5, echo=True)

    assert echoed["text"] == PROMPT + plain["text"]
    assert echoed["logprobs"] is None
    ids = server.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]
    of_ids = choice_of(server, ids, max_tokens=5, echo=True)
    assert of_ids["text"] == echoed["text"]


def test_an_echo_of_a_cached_prompt_without_logprobs_is_read_from_the_cache(server: ServerInThread) -> None:
    server.complete(PROMPT * 4, max_tokens=1)

    echoed = server.complete(PROMPT * 4, max_tokens=1, echo=True)

    assert echoed["kvtier"]["tokens"]["recomputed"] == 1


def test_logprobs_of_an_echo_are_the_prompts_and_then_the_answers(server: ServerInThread) -> None:
    own = choice_of(server, max_tokens=5, logprobs=2)["logprobs"]

    done = server.openai().completions.create(prompt=PROMPT, max_tokens=5, logprobs=2, echo=True, **GREEDY).choices[0]

    told = done.logprobs
    assert "".join(told.tokens[: len(PROMPT)]) == PROMPT == done.text[: len(PROMPT)]
    assert told.text_offset == list(range(len(told.tokens)))
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    for token, logprob, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob <= 0
        assert 1 <= len(top) <= 3  # tokens of one text have one place
    assert told.token_logprobs[len(PROMPT) :] == pytest.approx(own["token_logprobs"], abs=1e-4)
    assert told.tokens[len(PROMPT) :] == own["tokens"]


def test_what_a_prompt_scores_does_not_depend_on_where_it_ends(server: ServerInThread) -> None:
    letters = server.post("/tokenize", json={"prompt": "etaoin"}).json()["tokens"]
    bias = {str(token_id): 100 for token_id in letters}  # of a token that is a part of a character no text can be sent
    answered = choice_of(server, max_tokens=8, logprobs=0, logit_bias=bias)
    whole = choice_of(server, PROMPT + answered["text"], max_tokens=0, logprobs=0, echo=True)

    scores = whole["logprobs"]["token_logprobs"]
    assert scores[len(PROMPT) :] == pytest.approx(answered["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_no_token_is_answered_where_none_is_asked_for(server: ServerInThread, logprobs: int | None) -> None:
    done = server.complete(PROMPT, max_tokens=0, echo=True, logprobs=logprobs)

    (choice,) = done["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert done["usage"]["completion_tokens"] == 0
    assert done["usage"]["total_tokens"] == done["usage"]["prompt_tokens"] == len(PROMPT)
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT)


def test_a_cached_prompt_that_is_scored_counts_as_scored_and_the_tokens_balance(server: ServerInThread) -> None:
    prompt = "It is a prompt that was here before. " * 3
    server.complete(prompt, max_tokens=1)

    done = server.complete(prompt, max_tokens=1, echo=True, logprobs=0)

    told = done["kvtier"]
    assert sum(told["tokens"].values()) == done["usage"]["prompt_tokens"] == len(prompt)
    assert told["reasons"] == {"scored": len(prompt) - 1, "last_block": 1}
    assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_each_prompt_and_each_choice_has_its_echo_and_a_prompt_is_scored_once(server: ServerInThread) -> None:
    prompts = ["The first of two.", "And this is the second, which is longer."]

    done = server.complete(prompts, max_tokens=2, n=2, echo=True, logprobs=1, prompt_logprobs=0)

    alone = [choice_of(server, prompt, max_tokens=0, echo=True, logprobs=1) for prompt in prompts]
    for choice, of_prompt in zip(done["choices"], [alone[0], alone[0], alone[1], alone[1]], strict=True):
        num_tokens = len(of_prompt["text"])
        assert choice["text"].startswith(of_prompt["text"])
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[1:num_tokens] == pytest.approx(of_prompt["logprobs"]["token_logprobs"][1:], abs=1e-4)
        assert len(scores) == num_tokens + 2
        assert len(choice["prompt_logprobs"]) == num_tokens
    assert sum(done["kvtier"]["tokens"].values()) == sum(map(len, prompts))


def test_prompt_logprobs_have_vllms_shape(server: ServerInThread) -> None:
    choice = choice_of(server, max_tokens=1, prompt_logprobs=2)
    echoed = choice_of(server, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    ids = server.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]

    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    assert [next(iter(told)) for told in others] == [str(token_id) for token_id in ids[1:]]
    for told, letter, logprob in zip(others, PROMPT[1:], echoed["token_logprobs"][1:], strict=True):
        own, *likeliest = told.values()
        assert own["decoded_token"] == letter
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert {each["rank"] for each in told.values()} >= {1, 2}
        assert len(told) == (2 if own["rank"] <= 2 else 3)
        assert all(each["logprob"] >= own["logprob"] or each["rank"] > own["rank"] for each in likeliest)


def test_a_chat_has_them_beside_its_choices(server: ServerInThread) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    num_tokens = server.post("/tokenize", json={"messages": MESSAGES}).json()["count"]

    plain, scored = (
        server.post("/v1/chat/completions", json=body | more).json() for more in ({}, {"prompt_logprobs": 1, "n": 2})
    )

    assert "prompt_logprobs" not in plain
    assert len(scored["prompt_logprobs"]) == num_tokens
    assert scored["prompt_logprobs"][0] is None
    assert all("rank" in each for told in scored["prompt_logprobs"][1:] for each in told.values())


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_the_first_chunk_of_a_stream_has_the_echo(server: ServerInThread, max_tokens: int) -> None:
    whole = choice_of(server, max_tokens=max_tokens, echo=True, logprobs=1)

    with server.streaming(PROMPT, max_tokens=max_tokens, echo=True, logprobs=1) as stream:
        chunks = [event["choices"][0] for event in stream]

    assert chunks[0]["text"].startswith(PROMPT)
    assert chunks[0]["logprobs"]["token_logprobs"][0] is None
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        joined = [value for chunk in chunks for value in chunk["logprobs"][name]]
        assert joined[:1] == values[:1]
        assert joined[1:] == [
            pytest.approx(value, abs=1e-4) if not isinstance(value, str) else value for value in values[1:]
        ]
    assert chunks[-1]["finish_reason"] == "length"


def test_every_choice_of_a_stream_has_its_echo(server: ServerInThread) -> None:
    with server.streaming([PROMPT, "Another"], max_tokens=2, n=2, echo=True) as stream:
        texts = {}
        for event in stream:
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]

    beginnings = [PROMPT, PROMPT, "Another", "Another"]
    assert [texts[i].startswith(beginning) for i, beginning in enumerate(beginnings)] == [True] * 4
    assert [texts[i].count(beginning) for i, beginning in enumerate(beginnings)] == [1] * 4


def test_of_a_prompt_that_is_cut_the_echo_is_what_was_taken(server: ServerInThread) -> None:
    choice = choice_of(server, max_tokens=0, echo=True, logprobs=0, truncate_prompt_tokens=7)

    assert choice["text"] == PROMPT[-7:]
    assert len(choice["logprobs"]["tokens"]) == 7


def test_a_documents_tokens_are_part_of_the_prompt_and_so_of_the_echo(server: ServerInThread) -> None:
    document = {"text": "A short document. ", "as": "text"}
    put = httpx.put(f"{server.url}/v1/kvtier/documents/echoed", json=document, verify=NO_TLS)
    assert put.status_code == 201

    choice = choice_of(server, "Who?", max_tokens=0, echo=True, kvtier={"document": "echoed"})

    assert choice["text"] == "A short document. Who?"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "set echo to true"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "0 or more"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "0 or more"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "20 or less"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ("/v1/chat/completions", {"messages": MESSAGES, "echo": True}, "echo", "not supported"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "1 or more"),
    ],
)
def test_what_is_refused_is_refused_with_a_sentence(
    server: ServerInThread, path: str, body: dict[str, object], param: str, words: str
) -> None:
    error = refused(server, path, **body)

    assert error["param"] == param
    assert words in error["message"]


def test_an_echo_that_is_not_wanted_is_let_pass(server: ServerInThread) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "echo": False}

    assert server.post("/v1/chat/completions", json=body).status_code == 200


def test_who_asks_for_too_many_tokens_is_told_that_they_are_too_many(server: ServerInThread) -> None:
    message = refused(server, prompt="Who?", max_tokens=10**9)["message"]

    assert "1000000000 in the completion" in message
