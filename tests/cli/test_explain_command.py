"""`kvtier explain`: a table, or JSON, of what a real server or sidecar answers."""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import BLOCK_SIZE, MODEL, TEMPLATE, ServerInThread, chat_tokenizer, come_true, serving, tables
from sidecars import TOKEN, running_sidecar, small_config
from small_models import build

from kvtier.cli.explain import FIELDS
from kvtier.cli.main import main
from kvtier.server.explain_routes import ExplainRequest

NUM_TOKENS = 4 * BLOCK_SIZE + 3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables()) as address:
        yield address


def ask(server: ServerInThread, request_id: str, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text
    come_true(lambda: server.get(f"/v1/kvtier/explain/{request_id}").status_code == 200)


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(NUM_TOKENS)]


def test_a_request_is_explained_in_a_table(server: ServerInThread, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, "first", prompt_of(1))
    ask(server, "second", [*prompt_of(1)[:40], *prompt_of(2)])

    assert main(["explain", "second", "--url", server.url]) == 0

    told = capsys.readouterr().out
    assert "request second" in told
    assert "device" in told
    assert "never seen" in told
    assert "shares the first 40 tokens" in told


def test_what_a_reset_took_is_said_to_be_cleared(server: ServerInThread, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, "before", prompt_of(8))
    come_true(lambda: server.ask(lambda core: core.reset()))
    ask(server, "after", prompt_of(8))

    assert main(["explain", "after", "--url", server.url]) == 0

    assert f"cleared by a reset or an operator, {time.strftime('%Y-')}" in capsys.readouterr().out


def test_json_is_what_the_server_answers(server: ServerInThread, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, "third", prompt_of(3))

    assert main(["explain", "third", "--url", server.url, "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)["data"]
    assert found == server.get("/v1/kvtier/explain/third").json()["data"][0]


def test_a_prompt_in_a_file_is_explained_with_the_text_that_differs(
    server: ServerInThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server, "fourth", prompt_of(4))
    file = tmp_path / "prompt.json"
    other = prompt_of(4)
    other[20] += 1
    file.write_text(json.dumps({"prompt": other}))

    assert main(["explain", "--prompt", str(file), "--url", server.url]) == 0

    told = capsys.readouterr().out
    assert "a lookup of this prompt" in told
    assert "shares the first 20 tokens, then differs: only this prompt has" in told


def test_a_text_is_a_prompt_too(
    server: ServerInThread, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("{ is no JSON, and this text is new")

    assert main(["explain", "--prompt", str(file), "--url", server.url]) == 0
    with file.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["explain", "--prompt", "-", "--url", server.url]) == 0

    assert capsys.readouterr().out.count("never seen") == 2


@pytest.fixture(scope="module")
def chat_server() -> Iterator[ServerInThread]:
    tokenizer = chat_tokenizer()
    told = "{{ effort }}{{ reasoning_effort }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    asked = TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
    tokenizer.chat_template = told + asked
    with serving(build("llama"), tables(), tokenizer=tokenizer) as address:
        yield address


LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"tools": [LOOK_UP]},
        {"chat_template_kwargs": {"effort": "all"}},
        {"reasoning_effort": "high"},
        {"add_generation_prompt": False},
        {"messages": [{"role": "assistant", "content": "An answer that is " * 8}], "continue_final_message": True},
    ],
    ids=lambda others: "-".join(others) or "plain",
)
def test_a_chat_in_a_file_is_the_prompt_that_the_server_made_of_it(
    chat_server: ServerInThread, others: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Where is Paris? " * 8}],
        "max_tokens": 1,
        **others,
    }
    asked = chat_server.post("/v1/chat/completions", json=chat)
    assert asked.status_code == 200, asked.text
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(chat))

    assert main(["explain", "--prompt", str(file), "--url", chat_server.url, "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)["data"]
    assert found["prompt_tokens"] == asked.json()["usage"]["prompt_tokens"]
    assert {row["missed"] for row in found["rows"]} <= {None, "last_block"}


def test_every_field_of_the_question_is_taken_from_the_file() -> None:
    assert set(FIELDS) == set(ExplainRequest.__struct_fields__) - {"request_id"}  # an argument of its own


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["unknown"], "no request of that id is remembered"),
        ([], "give the id of a request, or --prompt FILE"),
        (["a", "--model", "m"], "give --prompt FILE as well"),
        (["a?b"], "no request of that id is remembered"),
        (["../../metrics"], "no request of that id is remembered"),
        (["a" * 100_000], "the id has 100,000 characters; give an id with at most 4,096"),
        (["a\nb"], "has a character that request ids cannot have"),
        (["x", "--url", "http://user:secret@127.0.0.1:8000"], "--url contains a user name or password"),
    ],
)
def test_a_mistake_is_one_line(
    server: ServerInThread, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--url", server.url, *arguments]) == 2

    error = capsys.readouterr().err
    assert expected in error
    assert "secret" not in error
    assert len(error.splitlines()) == 1


def test_a_sidecar_says_in_one_line_what_it_cannot_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with running_sidecar(small_config(http={"port": 0, "token": TOKEN})) as sidecar:
        status = main(["explain", "x", "--url", sidecar.url, "--token-file", str(tmp_path / "token")])

    error = capsys.readouterr().err
    assert status == 2
    assert "no lookup of that id is remembered" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty; give a prompt"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deep"),
        ('{"prompt": "half: \\ud800"}', "half of a surrogate pair ('\\ud800'), which is not a character"),
        ('{"prompt": []}', "prompt: must not be empty"),
        ('{"prompt": [1, -2]}', "prompt[1]: must be a whole number, 0 or more"),
        ('{"messages": "hello"}', "messages: must be a list, not a text"),
    ],
    ids=["empty", "deep", "half a pair", "no tokens", "a negative token", "no messages"],
)
def test_a_file_that_is_no_prompt_is_one_line(
    server: ServerInThread, content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt"
    file.write_text(content)

    assert main(["explain", "--prompt", str(file), "--url", server.url]) == 2

    (told,) = capsys.readouterr().err.splitlines()
    assert expected in told


@pytest.mark.parametrize("option", ["--prompt", "--token-file"])
@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"\xff\xfe", "not UTF-8 text"), (b"", "is empty")]
)
def test_a_file_that_cannot_be_read_is_named_with_its_option(
    option: str, content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)

    assert main(["explain", *(["any"] if option == "--token-file" else []), option, str(file)]) != 0

    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"kvtier: {option} {file}: ")
    assert why in told
