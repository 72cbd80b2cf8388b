"""OpenAI's Agents SDK, unchanged, runs a tool through the Responses API, and continues a conversation that is a hit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_model import scripted
from serving import MODEL, serving
from tool_templates import QWEN

AGENTS = Path(sys.prefix) / "agents" / "bin" / "python"
CLIENT = Path(__file__).parent / "agents_client.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not AGENTS.exists(), reason="the Agents SDK is not installed; make .venv/agents/installed"),
]
KEY = "sk-of-an-agent"
FAR_S = 600  # for what takes seconds: reached only when a test fails
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "It rains in Paris."
# The model calls the tool when it is asked, and answers once it has the result.
CUE = "{% set cue = '<cue answer>' if messages[-1].role == 'tool' else '<cue call>' %}"


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """What the agent has seen of a server whose model calls the tool."""
    torch.set_num_threads(1)
    script = scripted({"call": CALL, "answer": ANSWER}, QWEN + CUE, num_hidden_layers=1, max_position_embeddings=8192)
    config = {"device": {"capacity": "16MiB", "block_size": 16}, "scheduler": {"load": "always"}}
    with serving(script.model, config, {KEY: "agents"}, tokenizer=script.tokenizer) as server:
        nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [AGENTS, CLIENT, f"{server.url}/v1", KEY, MODEL],
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **nowhere},
            capture_output=True,
            text=True,
            timeout=FAR_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)


def test_each_run_calls_the_tool_and_answers_with_its_result(seen: dict[str, Any]) -> None:
    assert seen["called"] == ["Paris"] * 5
    assert {seen[run]["text"] for run in ("whole", "again", "streamed", "kept")} == {ANSWER}
    assert {seen[run]["num_responses"] for run in ("whole", "again", "streamed", "kept")} == {2}


def test_a_continued_conversation_is_a_prefix_hit(seen: dict[str, Any]) -> None:
    """Whether the server keeps the conversation, or the client does and sends it whole."""
    for run in ("again", "kept"):
        computed = seen[run]["input_tokens"] - seen[run]["cached_tokens"]
        assert seen[run]["input_tokens"] > seen["whole"]["input_tokens"]
        assert computed < 0.2 * seen[run]["input_tokens"]


def test_a_streamed_run_has_the_events_of_a_call_and_of_text(seen: dict[str, Any]) -> None:
    kinds = seen["kinds"]

    assert kinds.count("response.completed") == kinds.count("response.created") == 2
    assert {"response.function_call_arguments.done", "response.output_text.delta"} <= set(kinds)
