"""Requests in the shapes of Open WebUI, Continue and LibreChat are answered, with the fields that each app reads."""

import json
from collections.abc import Iterator

import pytest
import torch
from scripted_model import Scripted, scripted
from serving import BLOCK_SIZE, MODEL, ServerInThread, events, serving, tables
from tool_templates import QWEN
from tool_texts import SCRIPTS, WEATHER

LIBRE_CHAT = {
    "user": "66c1f0",
    "temperature": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stream_options": {"include_usage": True},
}
LONG = "You answer questions about the weather of harbours, in one sentence, and you never guess. " * 3
HEADERS = {"Authorization": "Bearer sk-of-the-app"}


@pytest.fixture(scope="module")
def script() -> Scripted:
    return scripted(SCRIPTS, QWEN)


@pytest.fixture(scope="module")
def server(script: Scripted) -> Iterator[ServerInThread]:
    torch.set_num_threads(1)
    with serving(script.model, tables(), tokenizer=script.tokenizer) as address:
        yield address


def post(server: ServerInThread, path: str, body: dict, **headers: str) -> dict:
    """Return the whole answer."""
    answer = server.post(path, json={"model": MODEL, **body}, headers=HEADERS | headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: ServerInThread, path: str, body: dict, **headers: str) -> list[dict]:
    """Return the chunks of a streamed answer."""
    answer = server.post(path, json={"model": MODEL, "stream": True, **body}, headers=HEADERS | headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(events(iter(answer.text.splitlines())))


def text_of(pieces: list[dict]) -> str:
    return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])


def cue(script: Scripted, name: str) -> dict:
    """Return a parameter with which the model says that script. Apps send it as an additional parameter."""
    return {"chat_template_kwargs": script.cue(name)["chat_template_kwargs"]}


class TestOpenWebUI:
    """A connection of Open WebUI to a server with OpenAI's API."""

    def test_the_list_of_models_has_ids(self, server: ServerInThread) -> None:
        headers = HEADERS | {"X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-User-Role": "user"}

        listed = server.get("/v1/models", headers=headers).json()

        assert [(model["id"], model["object"]) for model in listed["data"]] == [(MODEL, "model")]

    def test_a_chat_streams_its_text_and_ends_with_the_usage(self, server: ServerInThread, script: Scripted) -> None:
        asked = {
            "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Rain?"}],
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "top_p": 0.9,
            "stop": [],
            **cue(script, "text"),
        }
        internal = {  # fields for Open WebUI's own server; some versions and filters pass them on
            "chat_id": "c3f1",
            "session_id": "s2",
            "features": {"web_search": False, "image_generation": False},
            "variables": {"{{USER_NAME}}": "Ann"},
            "background_tasks": {"title_generation": True, "tags_generation": False},
            "metadata": {"user_id": "ann", "files": None},
        }

        *pieces, last = chunks(server, "/v1/chat/completions", asked)
        again = chunks(server, "/v1/chat/completions", asked | internal)

        assert text_of(pieces) == text_of(again) == SCRIPTS["text"]
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        assert (last["choices"], last["usage"]["total_tokens"] > len(LONG)) == ([], True)
        assert again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > len(LONG)

    def test_a_title_is_written_without_a_stream(self, server: ServerInThread, script: Scripted) -> None:
        task = "### Task:\nGenerate a title of 3-5 words.\n### Output:\nJSON\n<chat_history>Rain?</chat_history>"
        body = {"messages": [{"role": "user", "content": task}], "stream": False, "max_completion_tokens": 1000}
        metadata = {"task": "title_generation", "task_body": {"messages": []}, "chat_id": None}

        done = post(server, "/v1/chat/completions", body | {"metadata": metadata} | cue(script, "json"))

        assert json.loads(done["choices"][0]["message"]["content"]) == {"answer": "dry"}

    def test_the_second_turn_is_a_hit(self, server: ServerInThread, script: Scripted) -> None:
        system = {"role": "system", "content": "A chat of two turns. " + LONG}
        messages = [system, {"role": "user", "content": "Rain?"}]
        first = post(server, "/v1/chat/completions", {"messages": messages, "stream": False} | cue(script, "text"))
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}

        turn = {"messages": [*messages, answer, {"role": "user", "content": "And snow?"}], "stream": False}
        usage = post(server, "/v1/chat/completions", turn | cue(script, "text"))["usage"]

        assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 2 * BLOCK_SIZE

    def test_a_tool_call_streams_with_index_id_and_name(self, server: ServerInThread, script: Scripted) -> None:
        asked = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER], **cue(script, "call")}

        pieces = chunks(server, "/v1/chat/completions", asked)

        calls = [call for piece in pieces for call in piece["choices"][0]["delta"].get("tool_calls", [])]
        first, *others = calls
        assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
        assert first["id"]
        arguments = first["function"]["arguments"] + "".join(call["function"]["arguments"] for call in others)
        assert json.loads(arguments) == {"city": "Paris", "is_warm": True}
        assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"


class TestContinue:
    """The extension Continue for code editors, with its provider for servers with OpenAI's API."""

    STOPS = (
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
        *("<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```", "\r\n\r\n"),
        *(f"\n{word}" for word in ("function", "class", "module", "export", "import", "interface", "type", "enum")),
    )

    def test_a_chat_with_its_parameters(self, server: ServerInThread, script: Scripted) -> None:
        asked = {
            "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Rain?"}],
            "max_tokens": 1024,
            "temperature": 0.5,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stop": list(self.STOPS),
            **cue(script, "text"),
        }

        pieces = chunks(server, "/v1/chat/completions", asked, **{"api-key": "sk-of-the-app"})

        assert text_of(pieces) == SCRIPTS["text"]

    def test_a_completion_in_the_middle_of_a_file(self, server: ServerInThread) -> None:
        asked = {
            "prompt": "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n\nprint(add(1, 2))<|fim_middle|>",
            "max_tokens": 12,
            "temperature": 0.01,
            "stop": list(self.STOPS),
        }

        pieces = chunks(server, "/v1/completions", asked)

        assert all(isinstance(piece["choices"][0]["text"], str) for piece in pieces)
        assert pieces[-1]["choices"][0]["finish_reason"] in ("length", "stop")

    def test_a_suffix_is_refused_in_a_line(self, server: ServerInThread) -> None:
        body = {"model": MODEL, "prompt": "def add(a, b):", "suffix": "\nprint(add(1, 2))", "stream": True}

        answer = server.post("/v1/completions", json=body)

        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "suffix is not supported; leave it out"

    def test_an_agent_sends_the_result_of_its_tool(self, server: ServerInThread, script: Scripted) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
        messages = [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": " ", "tool_calls": [call]},
            {"role": "tool", "content": "Dry.", "tool_call_id": "call_1"},
        ]
        asked = {"messages": messages, "tools": [WEATHER], "parallel_tool_calls": False, **cue(script, "text")}

        assert text_of(chunks(server, "/v1/chat/completions", asked)) == SCRIPTS["text"]


class TestLibreChat:
    """A custom endpoint of LibreChat, which sends its requests with LangChain's client for Node.js."""

    def test_the_list_of_models_has_ids(self, server: ServerInThread) -> None:
        listed = server.get("/v1/models", headers=HEADERS).json()

        assert [model["id"] for model in listed["data"]] == [MODEL]

    def test_a_chat_of_parts_streams_and_the_next_turn_is_a_hit(self, server: ServerInThread, script: Scripted) -> None:
        question = {"role": "user", "content": [{"type": "text", "text": "An endpoint of its own. " + LONG}]}
        asked = {**LIBRE_CHAT, **cue(script, "text")}

        *pieces, last = chunks(server, "/v1/chat/completions", asked | {"messages": [question]})
        answer = {"role": "assistant", "content": [{"type": "text", "text": text_of(pieces)}]}
        turn = {"messages": [question, answer, {"role": "user", "content": "And snow?"}]}
        *_, again = chunks(server, "/v1/chat/completions", asked | turn)

        assert text_of(pieces) == SCRIPTS["text"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > last["usage"]["prompt_tokens"] - 2 * BLOCK_SIZE

    def test_a_title_is_the_argument_of_a_tool(self, server: ServerInThread) -> None:
        schema = {"type": "object", "properties": {"title": {"enum": ["Rain", "Snow"]}}, "required": ["title"]}
        body = {
            "messages": [{"role": "user", "content": "Write a title of 5 words for this conversation: Rain?"}],
            "tools": [{"type": "function", "function": {"name": "write_title", "parameters": schema}}],
            "tool_choice": {"type": "function", "function": {"name": "write_title"}},
            "user": "66c1f0",
            "stream": False,
        }

        done = post(server, "/v1/chat/completions", body)

        (call,) = done["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["title"] in ("Rain", "Snow")
