"""The wheel in a virtual environment of its own, far from the repository: the command works, and is the wheel's."""

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from package_builds import ROOT, build, copy_of_tree

pytestmark = pytest.mark.long

# Runs before the command, in the new environment, so that nothing of the tree can be imported by accident.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with kvtier's wheel; other packages are those of this environment.

    They are found through a line with a path, which Python appends: behind the wheel, and without the .pth files there,
    of which one leads to the tree.
    """
    folder = tmp_path_factory.mktemp("smoke")
    wheel = build("wheel", copy_of_tree(folder), folder / "wheel")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, env=CLEAN)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return python.parent


def output_of(*command: Path | str, cwd: Path) -> str:
    done = subprocess.run([*command], cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_what_is_imported(installed: Path, tmp_path: Path) -> None:
    script = "import kvtier, kvtier.engine.config as config; print(kvtier.__file__); print(config.__file__)"

    files = output_of(installed / "python", "-c", script, cwd=tmp_path).split()

    assert [Path(file).is_relative_to(installed.parent) for file in files] == [True, True]
    assert not any(Path(file).is_relative_to(ROOT) for file in files)


def test_the_wheel_says_its_version_and_finds_its_configurations(installed: Path, tmp_path: Path) -> None:
    script = "from kvtier import load_config; print(load_config('laptop').disk.codec)"

    assert output_of(installed / "kvtier", "--version", cwd=tmp_path) == f"kvtier {version('kvtier')}\n"
    assert output_of(installed / "python", "-c", script, cwd=tmp_path) == "zstd\n"


def test_the_wheel_shows_the_demo_with_right_answers_from_each_tier(installed: Path, tmp_path: Path) -> None:
    shown = json.loads(output_of(installed / "kvtier", "demo", "--tokens", "1000", "--json", cwd=tmp_path))

    steps = {step["name"]: step for step in shown["steps"]}
    assert list(steps) == ["cold", "device", "host", "disk", "restart", "corrupt"]
    assert all(step["answers_correct"] == step["questions"] > 0 for step in steps.values())
    assert all(steps[tier]["tokens"][tier] > 0 for tier in ("device", "host", "disk"))
    assert steps["restart"]["tokens"]["disk"] > 0
    assert steps["corrupt"]["corrupt_blocks"] == 1
