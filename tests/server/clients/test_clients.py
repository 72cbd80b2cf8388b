"""Clients of other makers, unchanged but for base URL and key, ask one `kvtier serve` of a GGUF file."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from langchain_openai import ChatOpenAI
from serving import DEADLINE_S, MODEL, Address, serving_process

pytestmark = pytest.mark.long
KEY = "sk-of-a-client"
HERE = Path(__file__).parent
NODE = Path(sys.prefix) / "node"
LITELLM = Path(sys.prefix) / "litellm" / "bin" / "python"
ANSWER_TOKENS = 12
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "installed").exists(),
    reason="there is no node, or its packages are not installed; make .venv/node/installed",
)
needs_litellm = pytest.mark.skipif(
    not LITELLM.exists(), reason="LiteLLM is not installed; make .venv/litellm/installed"
)


@dataclass(frozen=True)
class Expected:
    """What every client must show of the same chat."""

    prompt: str
    text: str
    completion: str
    prompt_tokens: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server with a key; its tiers are given as options."""
    folder = tmp_path_factory.mktemp("clients")
    write_gguf(folder / "small.gguf")
    keys = folder / "keys.toml"
    keys.write_text(f'[keys]\n"{KEY}" = "clients"\n')
    keys.chmod(0o600)
    tiers = [
        "--block-size",
        "16",
        "--device-memory",
        "4MiB",
        "--host-memory",
        "4MiB",
        "--disk",
        f"{folder}/store:64MiB",
    ]
    with serving_process(folder, folder / "small.gguf", "", "--api-keys", keys, *tiers) as address:
        yield address


def ask(server: Address, path: str, **body: object) -> dict[str, Any]:
    answer = server.post(
        path,
        json={"model": MODEL, "temperature": 0, "max_tokens": ANSWER_TOKENS, **body},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def expected(server: Address, request: pytest.FixtureRequest) -> Expected:
    """Without any client; from then on the prompt, another one for each test, is in the cache."""
    prompt = f"{request.node.name} asks what is on the other side of the hill. " * 3
    chat = ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": prompt}])
    completion = ask(server, "/v1/completions", prompt=prompt)
    assert chat["usage"]["prompt_tokens"] > len(prompt)
    text = chat["choices"][0]["message"]["content"]
    return Expected(prompt, text, completion["choices"][0]["text"], chat["usage"]["prompt_tokens"])


def run(server: Address, expected: Expected, *command: object) -> dict[str, Any]:
    """What the client's script prints."""
    done = subprocess.run(
        [str(part) for part in (*command, f"{server.url}/v1", KEY, MODEL, expected.prompt)],
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_node(server: Address, expected: Expected, script: str) -> dict[str, Any]:
    """The same of a script of Node.js, which finds packages beside itself only."""
    shutil.copy(HERE / script, NODE / script)
    return run(server, expected, "node", NODE / script)


def min_cached(prompt_tokens: int) -> int:
    """Of a prompt that was asked before: all of its whole blocks."""
    return prompt_tokens // 16 * 16 - 16


def agrees(usage: Mapping[str, Any], expected: Expected) -> bool:
    """Whether OpenAI's usage is that of the chat, found in the cache."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        expected.prompt_tokens,
        ANSWER_TOKENS,
        expected.prompt_tokens + ANSWER_TOKENS,
    ) and min_cached(expected.prompt_tokens) <= cached < expected.prompt_tokens


@needs_node
def test_openais_client_of_node(server: Address, expected: Expected) -> None:
    seen = run_node(server, expected, "openai_client.mjs")

    assert (seen["text"], seen["streamed"], seen["completion"]) == (expected.text, expected.text, expected.completion)
    assert seen["finish_reason"] == "length"
    assert agrees(seen["usage"], expected)
    assert agrees(seen["streamed_usage"], expected)
    assert seen["models"] == [MODEL]
    assert seen["refused"] == {"kind": "AuthenticationError", "status": 401, "code": "invalid_api_key"}


@needs_node
def test_openais_client_of_node_with_the_responses_api(server: Address, expected: Expected) -> None:
    seen = run_node(server, expected, "openai_responses.mjs")

    assert (seen["text"], seen["streamed"], seen["collected"], seen["stored"]) == (expected.text,) * 4
    assert seen["status"] == "incomplete"
    assert {"response.created", "response.output_item.done", "response.incomplete"} <= set(seen["kinds"])
    for usage in (seen["usage"], seen["streamed_usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == (expected.prompt_tokens, ANSWER_TOKENS)
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert min_cached(expected.prompt_tokens) <= cached < expected.prompt_tokens
    continued = seen["continued_usage"]
    assert continued["input_tokens"] > expected.prompt_tokens
    assert continued["input_tokens_details"]["cached_tokens"] >= min_cached(expected.prompt_tokens)
    assert seen["refused"] == {"kind": "NotFoundError", "status": 404, "code": "response_not_found"}


@needs_node
def test_vercels_ai_sdk(server: Address, expected: Expected) -> None:
    seen = run_node(server, expected, "ai_sdk.mjs")

    assert (seen["text"], seen["streamed"]) == (expected.text, expected.text)
    assert (seen["finish_reason"], seen["streamed_finish_reason"]) == ("length", "length")
    for usage in (seen["usage"], seen["streamed_usage"]):
        assert (usage["inputTokens"], usage["outputTokens"]) == (expected.prompt_tokens, ANSWER_TOKENS)
        cached = usage["inputTokenDetails"]["cacheReadTokens"]
        assert min_cached(expected.prompt_tokens) <= cached < expected.prompt_tokens
    assert seen["refused"] == {"kind": "AI_APICallError", "status": 401}


@needs_litellm
def test_litellm(server: Address, expected: Expected) -> None:
    seen = run(server, expected, LITELLM, HERE / "litellm_client.py")

    assert (seen["text"], seen["streamed"], seen["completion"]) == (expected.text, expected.text, expected.completion)
    assert seen["finish_reason"] == "length"
    assert agrees(seen["usage"], expected)
    assert agrees(seen["streamed_usage"], expected)
    assert seen["refused"] == {"kind": "AuthenticationError", "status": 401}


def test_langchain(server: Address, expected: Expected) -> None:
    model = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        model=MODEL,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream_usage=True,
    )

    whole = model.invoke(expected.prompt)
    pieces = list(model.stream(expected.prompt))
    (streamed,) = [piece.usage_metadata for piece in pieces if piece.usage_metadata]

    assert whole.content == "".join(str(piece.content) for piece in pieces) == expected.text
    assert whole.response_metadata["finish_reason"] == "length"
    for usage in (whole.usage_metadata, streamed):
        assert (usage["input_tokens"], usage["output_tokens"]) == (expected.prompt_tokens, ANSWER_TOKENS)
        assert usage["input_token_details"]["cache_read"] >= min_cached(expected.prompt_tokens)
