"""The demo, run as users run it: each step's tokens come from the tier that it names, and each answer is right."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import build, byte_tokenizer

from kvtier import LLM
from kvtier.cli.demo.demo import BLOCK_SIZE, QUESTIONS, DemoSettings, Questioner, Stage, Step, run_demo

NUM_TOKENS = 3000  # with half of that a chunk is more than the clean-ahead window of so small a pool
NAMES = ["cold", "device", "host", "disk", "restart", "corrupt"]
PROCESS_TIMEOUT_S = 300.0  # for what takes seconds: reached only when a test fails
PROSE = """
The clerk counted {number} barrels that day, and wrote it down. It rained on the quay until noon; nobody came.
The pilot said that the tide was late, and the cook said nothing at all.
"""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On busy cores the threads of small operations wait for each other, here and in the demo's other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def notes() -> list[str]:
    return []


@pytest.fixture(scope="module")
def steps(notes: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """One run of the demo on a short document; two of its steps run in processes of their own."""
    store = tmp_path_factory.mktemp("demo")
    return {step.name: step for step in run_demo(DemoSettings(None, None, NUM_TOKENS, str(store)), notes.append)}


@pytest.mark.long
def test_the_demo_has_six_steps_in_order_and_says_what_goes_on(steps: dict[str, Step], notes: list[str]) -> None:
    assert list(steps) == NAMES
    assert {name: step.questions for name, step in steps.items()} == QUESTIONS
    assert notes
    assert all(note and "\n" not in note for note in notes)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_of_a_step_is_right_and_the_one_before(steps: dict[str, Step], name: str) -> None:
    step = steps[name]

    assert step.answers_correct == step.questions == len(step.answers)
    assert step.answers_equal
    assert step.ttft_s > 0


@pytest.mark.long
def test_every_step_accounts_for_the_whole_prompt(steps: dict[str, Step]) -> None:
    lengths = {
        step.tokens.device + step.tokens.host + step.tokens.disk + step.tokens.recomputed for step in steps.values()
    }

    assert len(lengths) == 1  # a name is one token, whichever is asked for
    assert lengths.pop() > NUM_TOKENS


@pytest.mark.long
def test_the_cold_step_computes_everything(steps: dict[str, Step]) -> None:
    tokens = steps["cold"].tokens

    assert tokens.recomputed > 0 == tokens.device + tokens.host + tokens.disk


@pytest.mark.long
def test_the_device_step_loads_the_document_from_the_device_only(steps: dict[str, Step]) -> None:
    tokens = steps["device"].tokens

    assert tokens.device > 0 == tokens.host + tokens.disk
    assert tokens.recomputed < 2 * BLOCK_SIZE


@pytest.mark.long
def test_the_host_step_loads_the_document_from_host_memory(steps: dict[str, Step]) -> None:
    tokens = steps["host"].tokens

    assert tokens.host > 0 == tokens.device
    assert tokens.recomputed < 2 * BLOCK_SIZE


@pytest.mark.long
@pytest.mark.parametrize("name", ["disk", "restart"])
def test_the_disk_and_restart_steps_load_the_document_from_disk_only(steps: dict[str, Step], name: str) -> None:
    tokens = steps[name].tokens

    assert tokens.disk > 0 == tokens.device + tokens.host
    assert tokens.recomputed < 2 * BLOCK_SIZE


@pytest.mark.long
def test_the_corrupt_step_finds_the_damaged_block_and_recomputes_from_there(steps: dict[str, Step]) -> None:
    tokens = steps["corrupt"].tokens

    assert {name: step.corrupt_blocks for name, step in steps.items()} == {**dict.fromkeys(NAMES, 0), "corrupt": 1}
    assert tokens.recomputed > steps["restart"].tokens.recomputed + BLOCK_SIZE
    assert tokens.disk > 0


@pytest.mark.long
def test_facts_are_woven_into_a_text_of_ones_own_and_found_again(tmp_path: Path) -> None:
    document = tmp_path / "own.txt"
    document.write_text("".join(PROSE.format(number=number) for number in range(2, 22)))

    stage = Stage.of(DemoSettings(None, str(document), 1500, str(tmp_path / "store")))
    with LLM(stage.model, stage.config, stage.tokenizer) as llm:
        asker = Questioner(stage, llm, {})
        steps = [asker.step("cold"), asker.step("device")]

    assert "The pilot said that the tide was late" in stage.document.text
    assert [step.answers_correct for step in steps] == [1, 5]
    assert steps[1].tokens.device > 0


@pytest.mark.long
def test_json_of_a_model_and_a_document_of_ones_own_is_one_object_on_stdout(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    document = tmp_path / "own.txt"
    document.write_text("".join(PROSE.format(number=number) for number in range(2, 7)))
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "demo",
        "--json",
        "--tokens",
        "1000",
        "--device",
        "cpu",
    ]
    options = ["--model", str(tmp_path / "model"), "--document", str(document)]

    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # nothing before it, nothing behind it
    assert list(found) == ["steps"]
    assert [step["name"] for step in found["steps"]] == NAMES
    for step in found["steps"]:
        assert step["answers_equal"] is True
        assert step["answers_correct"] < step["questions"] == QUESTIONS[step["name"]]  # the model's weights are random
        assert step["ttft_s"] > 0
        assert list(step["tokens"]) == ["device", "host", "disk", "recomputed"]
        assert sum(step["tokens"].values()) > 1000
    stages = done.stderr.splitlines()
    assert stages[0] == "kvtier: loading torch and transformers"
    assert all(line.startswith("kvtier: ") for line in stages)
    assert "kvtier: asking more questions about it" in stages
