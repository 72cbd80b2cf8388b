"""Builds of the package: a wheel and a source distribution, from a copy of the tree that has no leftovers."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "cli",
    "configs",
    "connectors",
    "engine",
    "routing",
    "server",
    "sidecar",
    "store",
    "tiers",
    "transfer",
    "web",
)


def copy_of_tree(folder: Path) -> Path:
    """A copy of the repository in *folder* without what git ignores: an old build/ would end up in the wheel."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
    return copy


def build(kind: str, tree: Path, folder: Path) -> Path:
    """The distribution of *kind* ("wheel" or "sdist") that `python -m build` makes of *tree*; it needs no network."""
    before = set(folder.iterdir()) if folder.exists() else set()
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    (made,) = set(folder.iterdir()) - before
    return made


def unpacked(sdist: Path, folder: Path) -> Path:
    """The one folder in *sdist*, unpacked into *folder*."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree
