"""Makes a folder with what each extra of kvtier installs, and nothing else: extra_environments.py FOLDER. Two minutes.

`make` has it run once. Each environment has the packages of one extra, and sees those of kvtier's requirements, which
are installed once. Of torch, which has gigabytes on some machines, it sees the one of the environment that runs this.
"""

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDER = ROOT / ".venv" / "extras"
BASE = "base"  # the environment with kvtier's requirements
LEFT_OUT = {
    "cuda12": "of use on a GPU only, and large",
    "cuda13": "of use on a GPU only, and large",
    "dev": "the environment that runs the tests",
    "docs": "make docs uses it, of a checkout",
}
TRIED = [name for name in PROJECT["optional-dependencies"] if name not in LEFT_OUT]


def sites_of(extras: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """The folders that have the packages of *extras* together, and of kvtier's own requirements, first ones first."""
    return [*(_site(folder / name) for name in extras), _site(folder / BASE), folder / "torch"]


def make_venv(folder: Path, sites: Sequence[Path]) -> Path:
    """Make an environment without pip that sees the packages in *sites*, and return its Python."""
    venv.create(folder, with_pip=False)
    (_site(folder) / "seen.pth").write_text("".join(f"{site}\n" for site in sites))
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip for the environment of *python*."""
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *arguments], check=True)


def _site(environment: Path) -> Path:
    return environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"


def _closure(name: str, found: dict[str, Distribution]) -> Iterator[Distribution]:
    """The distribution *name* of this environment and all that it requires, without those in *found*."""
    try:
        dist = found[name] = distribution(name)
    except PackageNotFoundError:  # of another platform
        return
    yield dist
    for line in dist.requires or ():
        requirement = Requirement(line)
        canonical = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if canonical not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            yield from _closure(canonical, found)


def _link(name: str, folder: Path) -> None:
    """Link the distribution *name* and all that it requires into *folder*, as they are in this environment."""
    folder.mkdir(parents=True)
    for dist in _closure(name, {}):
        for top in {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(dist.locate_file(top))))


def main(folder: Path) -> None:
    """Make the environments in *folder*."""
    _link("torch", folder / "torch")
    extras = PROJECT["optional-dependencies"]
    wanted = {BASE: PROJECT["dependencies"]} | {name: extras[name] for name in TRIED}
    for name, requirements in wanted.items():
        sites = [folder / "torch"] if name == BASE else sites_of([], folder)
        python = make_venv(folder / name, sites)
        pip(python, "install", "-q", "-c", ROOT / "constraints.txt", *requirements)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
