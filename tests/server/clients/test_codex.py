"""OpenAI's Codex CLI, unchanged but for its configuration, works in a folder with the tools that it offers the model.

Its prompt of some 37,000 tokens (of one byte each) is computed once. The prompts after it are hits.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scripted_model import scripted
from serving import MODEL, ServerInThread, serving
from tool_templates import QWEN

NODE = Path(sys.prefix) / "node"
CODEX = NODE / "node_modules" / ".bin" / "codex"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("node") is None or not (NODE / "installed").exists() or not CODEX.exists(),
        reason="there is no node, or its packages are not installed; make .venv/node/installed",
    ),
]
KEY = "sk-of-codex"
FAR_S = 1500  # for what takes seconds: reached only when a test fails
MIN_HIT = 0.95
CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo by a tool > made.txt"}}\n</tool_call>'
ANSWER = "The file is there now."
# The model calls the tool when it is asked, and answers once it has the result.
CUE = "{% set cue = '<cue answer>' if messages[-1].role == 'tool' else '<cue call>' %}"


@dataclass(frozen=True)
class Prompt:
    """A prompt that the server has got, and how many of its tokens were computed."""

    num_tokens: int
    num_computed: int

    @property
    def hit(self) -> float:
        """The part of it that was in the cache."""
        return 1 - self.num_computed / self.num_tokens


@dataclass(frozen=True)
class Codex:
    """Codex with a folder to work in and a home of its own, which leads it to the server and nowhere else."""

    home: Path
    folder: Path

    def run(self, *arguments: str) -> list[dict]:
        """The events that `codex exec` tells."""
        nowhere = "http://127.0.0.1:9"  # all but the server is asked of a proxy that is not there
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "CODEX_HOME": str(self.home),
            "KVTIER_API_KEY": KEY,
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1",
        }
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        done = subprocess.run(
            [CODEX, "exec", *arguments, *options],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FAR_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    """A server with keys, whose model has a long context and one small layer."""
    torch.set_num_threads(1)
    script = scripted(
        {"call": CALL, "answer": ANSWER}, QWEN + CUE, num_hidden_layers=1, max_position_embeddings=1 << 17
    )
    config = {
        "device": {"capacity": "64MiB", "block_size": 16},
        "host": {"capacity": "64MiB"},
        "scheduler": {"load": "always"},
    }
    with serving(script.model, config, {KEY: "codex"}, tokenizer=script.tokenizer) as address:
        yield address


@pytest.fixture
def codex(server: ServerInThread, tmp_path: Path) -> Codex:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    (home / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "kvtier"
model_context_window = 131072
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.kvtier]
name = "kvtier"
base_url = "{server.url}/v1"
wire_api = "responses"
env_key = "KVTIER_API_KEY"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {FAR_S * 1000}
""")
    return Codex(home, folder)


@pytest.fixture
def prompts(caplog: pytest.LogCaptureFixture) -> Iterator[list[Prompt]]:
    """The prompts so far, as the server has logged them."""
    got: list[Prompt] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = getattr(record, "fields", {})
            if fields.get("path") == "/v1/responses":
                assert fields["status"] == 200, fields
                got.append(Prompt(fields["prompt_tokens"], fields["recomputed"]))

    log, reader = logging.getLogger("kvtier.server.access"), Reader()
    log.addHandler(reader)
    with caplog.at_level(logging.INFO, log.name):
        yield got
    log.removeHandler(reader)


def items_of(events: list[dict], kind: str) -> list[dict]:
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def test_codex_runs_the_command_of_a_tool_call_and_sends_its_result(codex: Codex, prompts: list[Prompt]) -> None:
    events = codex.run("Make a file.")

    (command,) = items_of(events, "command_execution")
    (message,) = items_of(events, "agent_message")
    assert (command["exit_code"], command["status"], message["text"]) == (0, "completed", ANSWER)
    assert (codex.folder / "made.txt").read_text() == "by a tool\n"
    first, second = prompts
    assert second.num_tokens > first.num_tokens > 30_000
    assert second.hit >= MIN_HIT
    usage = events[-1]["usage"]
    assert (events[-1]["type"], usage["input_tokens"]) == ("turn.completed", first.num_tokens + second.num_tokens)
    assert usage["cached_input_tokens"] == usage["input_tokens"] - first.num_computed - second.num_computed


def test_a_resumed_session_is_a_hit(codex: Codex, prompts: list[Prompt]) -> None:
    codex.run("Make a file.")
    _, last = prompts

    events = codex.run("resume", "--last", "Make another file.")

    assert items_of(events, "agent_message")[0]["text"] == ANSWER
    resumed, after = prompts[2:]
    assert after.num_tokens > resumed.num_tokens > last.num_tokens
    assert min(resumed.hit, after.hit) >= MIN_HIT


def test_a_new_session_in_the_same_folder_is_a_hit(codex: Codex, prompts: list[Prompt]) -> None:
    """Its prompt differs from the first one's in the question alone."""
    codex.run("Make a file.")

    codex.run("Write a third file, please.")

    assert min(prompt.hit for prompt in prompts[2:]) >= MIN_HIT
    assert prompts[2].num_computed < 100


def test_an_answer_follows_the_schema_that_codex_is_given(codex: Codex) -> None:
    schema = codex.home / "schema.json"
    schema.write_text(json.dumps({"const": "in this form"}))

    events = codex.run("--output-schema", str(schema), "Say it.")

    assert items_of(events, "agent_message")[-1]["text"] == '"in this form"'
