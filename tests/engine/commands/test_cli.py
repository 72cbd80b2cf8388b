"""The command line: help that helps, and mistakes that cost one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtier.engine.commands.cli import main

PROCESS_TIMEOUT_S = 60.0  # for what takes seconds: reached only when a test fails


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--help"], "kvtier demo --json"),
        (["--help"], "kvtier check ~/.cache/kvtier"),
        (["--help"], "kvtier serve --model"),
        (["serve", "--help"], "kvtier serve --model Qwen/Qwen3-0.6B --config laptop"),
        (["demo", "--help"], "kvtier demo --json"),
        (["check", "--help"], "kvtier check ~/.cache/kvtier --fix"),
        (["stats", "--help"], "kvtier stats ~/.cache/kvtier --json"),
        (["store", "--help"], "kvtier store ls ~/.cache/kvtier"),
        (["store", "ls", "--help"], "kvtier store ls ~/.cache/kvtier"),
        (["store", "rm", "--help"], "kvtier store rm ~/.cache/kvtier --all-but"),
    ],
)
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], arguments: list[str], example: str) -> None:
    status, out, err = run(capsys, *arguments)

    assert (status, err) == (0, "")
    assert "examples:" in out
    assert example in out


def test_help_needs_neither_torch_nor_transformers() -> None:
    script = """
import sys
from kvtier.engine.commands.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--version")

    assert (status, err) == (0, "")
    assert out.startswith("kvtier ")
    assert len(out.splitlines()) == 1


def test_the_command_starts_from_a_shell_and_ends_with_2_on_a_mistake() -> None:
    command = [sys.executable, "-m", "kvtier.engine.commands.cli", "demo", "--tokens", "many"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert "--tokens" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--nonsense"], "--nonsense"),
        (["demo", "--tokens", "many"], "--tokens"),
        (["demo", "--device", "tpu"], "--device"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
        (["check"], "STORE"),
        (["stats", "/no/such/store"], "/no/such/store"),
        (["store"], "COMMAND"),
        (["store", "rm", "/no/such/store"], "--namespace"),
        (["demo", "--tokens", "999"], "1000 or more"),
        (["demo", "--tokens", "-5"], "1000 or more"),
        (["demo", "--model", "/no/such/model"], "/no/such/model"),
        (["demo", "--model", "nobody/no-such-model"], "nobody/no-such-model"),
        (["demo", "--document", "/no/such/file.txt"], "/no/such/file.txt"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    status, out, err = run(capsys, *arguments)

    assert (status, out) == (2, "")
    assert named in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("text", [b"", b"Hello.", b"The clerk wrote it down. " * 8, b"\xff\xfe\x00"])
def test_a_document_that_is_too_short_or_no_text_is_one_line_that_names_the_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes
) -> None:
    document = tmp_path / "own.txt"
    document.write_bytes(text)

    status, out, err = run(capsys, "demo", "--document", document)

    assert (status, out) == (2, "")
    assert "document" in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "demo", "--device", "cuda")

    assert (status, out) == (2, "")
    assert "cuda" in err.lower()
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["by default", "unless it is set", "or said in another way"],
)
def test_torchs_threads_spin_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], expected: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    main(["stats", str(tmp_path / "none")])

    assert os.environ.get("GOMP_SPINCOUNT") == expected
