"""check_model and check_files: mistakes that files show are told before seconds of imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import build

from kvtier.cli.early_checks import check_files, check_model, check_weights
from kvtier.engine.config import as_config

DEADLINE_S = 180.0  # for what takes a second: reached only when a test fails


def check(model: str) -> None:
    check_model(model, print)
    check_weights(model)


def folder_with(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_command_refuses_a_folder_without_a_model_before_it_has_torch(tmp_path: Path, command: str) -> None:
    folder = folder_with(tmp_path / "model", config="{")
    script = """
import json, sys
from kvtier.cli.main import main
status = main(sys.argv[1:])
print(json.dumps([status, sorted({"torch", "transformers"} & set(sys.modules))]))
"""
    arguments = [command, "--model", str(folder), *(["--port", "0"] if command == "serve" else [])]

    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    what = f"model {folder}: cannot be loaded (its config.json is not valid JSON)"
    assert done.stderr == f"kvtier: {what}; give a folder, a GGUF file or a name on the hub\n"
    assert json.loads(done.stdout) == [2, []]


@pytest.mark.parametrize("command", [["serve"], ["serve", "--check-config"], ["demo"]], ids=" ".join)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("bad id", "a name on the hub has the form OWNER/MODEL"),
        ("./nowhere", "there is no such folder"),
        ("nowhere.gguf", "there is no such file"),
        ("nobody/no-such-model", "HF_HUB_OFFLINE is set; download it with 'hf download nobody/no-such-model'"),
    ],
)
def test_a_wrong_name_is_noticed_before_torch_and_needs_no_more_than_a_line(
    command: list[str], model: str, why: str
) -> None:
    script = """
import json, sys
from kvtier.cli.main import main
status = main(sys.argv[1:])
print(json.dumps([status, sorted({"torch", "transformers"} & set(sys.modules))]))
"""

    done = subprocess.run(
        [sys.executable, "-c", script, *command, "--model", model],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )

    *before, last = done.stderr.splitlines()
    assert all("looking for the model" in line for line in before)
    assert last.startswith(f"kvtier: model {model}: ")
    assert why in last
    assert json.loads(done.stdout) == [2, []]


@pytest.mark.parametrize("command", [["serve", "--check-config"], ["demo"]], ids=" ".join)
def test_the_first_stage_is_shown_on_stderr_before_torch_is_imported(tmp_path: Path, command: list[str]) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    script = """
import sys
from kvtier.cli.main import main

class TooSoon(BaseException):
    pass

class Finder:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers"):
            raise TooSoon
sys.meta_path.insert(0, Finder())
try:
    main(sys.argv[1:])
except TooSoon:
    print("torch would be imported now")
"""

    done = subprocess.run(
        [sys.executable, "-c", script, *command, "--model", str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )

    assert done.stdout == "torch would be imported now\n"
    assert done.stderr == "kvtier: loading torch and transformers\n"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "the folder has no config.json"),
        ({"config": "[1]"}, "its config.json has no model_type"),
        ({"config": '{"model_type": 3}'}, "its config.json has no model_type"),
        ({"config": '{"model_type": "llama"}'}, r"the folder has no weights, \*.safetensors or \*.bin"),
    ],
)
def test_a_folder_that_no_model_can_be_loaded_from_is_told_apart(
    tmp_path: Path, files: dict[str, str], why: str
) -> None:
    folder = folder_with(tmp_path / "model", **files)

    with pytest.raises(ValueError, match=why) as error:
        check(str(folder))

    assert str(error.value).startswith(f"model {folder}: cannot be loaded (")


@pytest.mark.parametrize("name", ["/nowhere/model", "./no such folder", "~/no such folder", "a/b/c"])
def test_a_path_of_nothing_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        check(name)


def test_what_may_be_loaded_is_let_through(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    adapter = folder_with(tmp_path / "adapter", adapter_config="{}")

    for name in (str(tmp_path / "model"), str(adapter)):
        check(name)


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"lora": {"a": {"path": "/nowhere"}}}, "lora a: there is no folder /nowhere; give the one"),
        ({"lora": {"a": {"path": "/"}}}, "lora a: / is no adapter"),
        ({"disk": {"path": "/tmp/x", "encryption_key_file": "/nowhere/key"}}, "/nowhere/key"),
        ({"request_log": {"path": "/nowhere/log"}}, "request log: there is no folder /nowhere; make it"),
        ({"documents": {"path": "/dev/null/documents"}}, "/dev/null is not a folder; give .documents. another path"),
    ],
)
def test_files_that_a_configuration_names_and_that_cannot_be_used_are_told(tables: dict, what: str) -> None:
    with pytest.raises((ValueError, OSError), match=what):
        check_files(as_config(tables))
