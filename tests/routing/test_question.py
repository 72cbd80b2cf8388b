"""What is read out of bodies: prompts, conversations, and what `/tokenize` is to be asked for."""

import json

import pytest

from kvtier.routing.question import (
    CHAT,
    COMPLETIONS,
    MAX_READ_BYTES,
    MAX_VALUES,
    MESSAGES,
    RESPONSES,
    Question,
    read_question,
)


def read(path: str, content: object, session: str | None = None, who: str = "") -> Question | None:
    return read_question(path, json.dumps(content).encode(), session, who)


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("path", "content", "tokenize"),
    [
        (COMPLETIONS, {"model": "m", "prompt": "Hi", "n": 2}, {"model": "m", "prompt": "Hi"}),
        (COMPLETIONS, {"prompt": ["Hi", "Ho"]}, {"prompt": "Hi"}),
        (
            CHAT,
            {"model": "m", "messages": [USER], "tools": [{"x": 1}], "temperature": 0},
            {"model": "m", "messages": [USER], "tools": [{"x": 1}], "add_generation_prompt": True},
        ),
        (CHAT, {"messages": []}, None),
        (MESSAGES, {"model": "m", "messages": [USER]}, {"model": "m", "messages": [USER]}),
        (
            MESSAGES,
            {"system": "Be kind", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
            {
                "messages": [
                    {"role": "system", "content": "Be kind"},
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                ]
            },
        ),
        (MESSAGES, {"messages": [USER], "tools": [{"name": "x"}]}, None),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None),
        (RESPONSES, {"input": "Hi"}, None),
    ],
)
def test_what_tokenize_is_asked_for(path: str, content: object, tokenize: object) -> None:
    question = read(path, content)

    assert question is not None
    assert question.tokenize == tokenize


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7]]])
def test_token_ids_are_taken_as_they_are(prompt: list[object]) -> None:
    question = read(COMPLETIONS, {"prompt": prompt})

    assert question is not None
    assert (question.token_ids, question.tokenize) == ([5, 6], None)


@pytest.mark.parametrize("prompt", [[True], [-1], [1 << 32], [1.5], None, {}, []])
def test_what_are_no_token_ids_is_the_replicas_to_refuse(prompt: object) -> None:
    question = read(COMPLETIONS, {"prompt": prompt})

    assert question is not None
    assert (question.token_ids, question.tokenize) == (None, None)


@pytest.mark.parametrize(("path", "name"), [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")])
def test_the_text_of_a_conversation_is_the_beginning_of_its_next_turns(path: str, name: str) -> None:
    turns = [USER, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Who are you?"}]
    first, second = read(path, {"model": "m", name: turns[:1]}), read(path, {"model": "m", name: turns, "seed": 1})

    assert first is not None
    assert second is not None
    assert second.text.startswith(first.text)
    assert len(second.text) > len(first.text)


def test_a_conversations_name_is_the_headers_or_one_of_the_body_and_each_clients_own() -> None:
    chat = {"messages": [USER]}
    named = [
        read(CHAT, {**chat, "user": "ann"}, "mine"),
        read(CHAT, {**chat, "user": "ann"}),
        read(CHAT, {**chat, "user": "ann", "prompt_cache_key": "key"}),
        read(CHAT, {**chat, "user": "ann"}, who="Bearer other"),
        read(MESSAGES, {**chat, "metadata": {"user_id": "bob"}}),
    ]
    sessions = [None if each is None else each.session for each in named]

    assert None not in sessions
    assert len(set(sessions)) == len(sessions)
    assert read(CHAT, {**chat, "prompt_cache_key": "x"}).session == read(CHAT, chat, "x").session
    assert read(CHAT, chat).session is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b"{}"),
        ("/v1/embeddings", b'{"input": "x"}'),
        (CHAT, b"not json"),
        (CHAT, b"[]"),
        (CHAT, b"[" * 100_000),
        (CHAT, b'{"messages": [{"content": [{"type": "document", "document_id": "a"}]}]}'),
        (COMPLETIONS, b'{"prompt": "x", "kvtier": {"document": "a"}}'),
    ],
)
def test_what_has_no_prompt_to_be_looked_for(path: str, body: bytes) -> None:
    assert read_question(path, body, None, "") is None


@pytest.mark.parametrize(
    "content", [{"messages": 5}, {"messages": [5, None]}, {"messages": [{}], "metadata": 5}, {"user": 7}]
)
def test_nonsense_is_the_replicas_to_refuse(content: object) -> None:
    for path in (COMPLETIONS, CHAT, MESSAGES, RESPONSES):
        assert read(path, content) is not None


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"7," * (MAX_VALUES + 1) + b"7]}",
        b'{"messages":[' + b"{}," * (MAX_VALUES + 1) + b"{}]}",
        b'{"prompt":"' + b"x" * MAX_READ_BYTES + b'"}',
        b"[" * (MAX_READ_BYTES + 1),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
def test_a_body_that_takes_long_to_read_is_compared_as_it_is(path: str, body: bytes) -> None:
    found = read_question(path, body, "a conversation", "")

    assert found is not None
    assert found.text is body
    assert (found.token_ids, found.tokenize) == (None, None)
    assert found.session is not None


def test_a_large_body_that_names_a_document_is_not_looked_for() -> None:
    body = b'{"document_id":"a","prompt":"' + b"x" * MAX_READ_BYTES + b'"}'

    assert read_question(COMPLETIONS, body, None, "") is None


@pytest.mark.parametrize("prompt", [[1, True], [1, 2.5], [1, -1], [1, 1 << 32], [1, "a"], []])
def test_a_list_with_anything_but_tokens_has_none(prompt: list[object]) -> None:
    found = read(COMPLETIONS, {"prompt": prompt})

    assert found is not None
    assert found.token_ids is None
