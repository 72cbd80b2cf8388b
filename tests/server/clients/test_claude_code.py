"""The real Claude Code works without a terminal on a server of a model whose answers are written in advance.

Claude Code sends its own system prompt and tools, here about 40,000 tokens. The model calls a tool in the first turn,
and says that it is done once the conversation has the tool's result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scripted_model import scripted
from serving import DEADLINE_S, MODEL, ServerInThread, serving
from small_models import byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CLAUDE = Path(sys.prefix) / "node" / "node_modules" / ".bin" / "claude"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not CLAUDE.exists(), reason="the npm package of Claude Code is not installed; make .venv/node/installed"
    ),
]
ENGLISH = Path(__file__).parents[3] / "DESIGN.md"
VOCAB = 900
TOKEN_BYTES = 256  # KV of a token in one layer
MAX_TOKENS = 65_536  # less than the prompt and the 32,000 tokens that Claude Code asks for at first
SCRIPTS = {
    "call": 'I make the file.\n<tool_call>\n{"name": "Bash", "arguments": '
    '{"command": "echo Written by a tool. > made.txt", "description": "Make the file"}}\n</tool_call>',
    "done": "The file is there.",
}
# As Qwen's, which begins with the system prompt and writes the tools after it. The last message chooses the script.
TEMPLATE = """\
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls %}{% set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- set cue = '<cue done>' if messages[-1].role == 'tool' else '<cue call>' %}"""


@dataclass(frozen=True)
class Turn:
    """The tokens of a prompt."""

    num_tokens: int
    num_cached: int


@dataclass(frozen=True)
class Session:
    """What Claude Code printed in one run, as JSON lines."""

    lines: list[dict]

    @property
    def result(self) -> dict:
        """The last line."""
        return self.lines[-1]

    @property
    def turns(self) -> list[Turn]:
        """The turns of the session, by the usage that the model's answers tell."""
        usages = {line["message"]["id"]: line["message"]["usage"] for line in self.lines if line["type"] == "assistant"}
        return [
            Turn(
                usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"],
                usage["cache_read_input_tokens"],
            )
            for usage in usages.values()
        ]


def english_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with words of English, so that a prompt has fewer tokens than bytes."""
    bytes_only = byte_tokenizer().backend_tokenizer
    tokenizer = Tokenizer.from_str(bytes_only.to_str())
    alphabet = sorted(bytes_only.get_vocab())
    trainer = BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(ENGLISH.read_text(encoding="utf-8").splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    torch.set_num_threads(1)
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 2 * MAX_TOKENS}
    script = scripted(SCRIPTS, TEMPLATE, tokenizer=english_tokenizer(), **sizes)
    capacity = MAX_TOKENS * TOKEN_BYTES
    config = {
        "device": {"capacity": capacity, "block_size": 16},
        "host": {"capacity": 2 * capacity},
        "scheduler": {"load": "always", "prefill_chunk": 1024, "token_budget": 1024},
    }
    with serving(script.model, config, tokenizer=script.tokenizer) as address:
        yield address


def run(server: ServerInThread, home: Path, project: Path, prompt: str, *options: str) -> Session:
    """Run Claude Code in the folder *project* with that *prompt*, as a script would."""
    command = [
        str(CLAUDE),
        "-p",
        prompt,
        "--output-format",
        "stream-json",
        "--verbose",
        "--allowedTools",
        "Bash",
        *options,
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return Session([json.loads(line) for line in done.stdout.splitlines()])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder in which Claude Code was never used."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def project_in(folder: Path, name: str) -> Path:
    project = folder / name
    project.mkdir()
    return project


def test_a_session_runs_a_tool_and_finds_its_prompt_in_the_cache(
    server: ServerInThread, home: Path, tmp_path: Path
) -> None:
    """Claude Code asks for 32,000 tokens at first, and for fewer after the error that names the context length."""
    project = project_in(tmp_path, "project")

    first = run(server, home, project, "Make a file.")
    made = (project / "made.txt").read_text()
    second = run(server, home, project, "Make the same file, please, once more.")

    assert made == "Written by a tool.\n"
    for session in (first, second):
        assert (session.result["subtype"], session.result["is_error"]) == ("success", False)
        assert (session.result["num_turns"], session.result["result"]) == (2, SCRIPTS["done"])
        one, two = session.turns
        assert 20_000 < one.num_tokens < two.num_tokens
        assert two.num_cached > 0.99 * one.num_tokens
    new = second.turns[0]  # its header differs, because it is computed from the first message
    assert new.num_cached > 0.9 * new.num_tokens


def test_sessions_of_two_folders_share_the_tools_if_nothing_of_the_folder_is_in_the_system_prompt(
    server: ServerInThread, home: Path, tmp_path: Path
) -> None:
    option = "--exclude-dynamic-system-prompt-sections"

    run(server, home, project_in(tmp_path, "one"), "Make a file.", option)
    other = run(server, home, project_in(tmp_path, "two"), "Make another file.", option)

    assert other.turns[0].num_cached > 0.85 * other.turns[0].num_tokens
