"""Makes a folder with what each extra of kvtier installs, and nothing else: extra_environments.py FOLDER. A minute.

`make` has it run once. Each environment has the packages of one extra; those that kvtier requires are there once, and
the environments see them. Packages that this environment has are linked, file by file, with all that they require; an
extra with another one is installed by pip.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Sequence
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

Found = dict[str, Distribution]


def sites_of(extras: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """The folders that have the packages of *extras* together, and of kvtier's own requirements, first ones first."""
    return [_site(folder / name) for name in (*extras, BASE)]


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


def _find(requirements: Iterable[str], found: Found, extras: Iterable[str] = ("",)) -> None:
    """Add to *found* what *requirements* name and what that requires, by name; PackageNotFoundError if it is not here.

    *extras* are those of the package whose requirements they are.
    """
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": name}) for name in extras):
            continue
        key = f"{requirement.name.lower()}[{','.join(sorted(requirement.extras))}]"
        if key not in found:
            dist = found[key] = distribution(requirement.name)
            if not requirement.specifier.contains(dist.version, prereleases=True):
                raise PackageNotFoundError(line)
            _find(dist.requires or (), found, ["", *requirement.extras])


def _link(dists: Iterable[Distribution], site: Path) -> None:
    for dist in dists:
        for file in dist.files or ():
            if file.parts[0] != ".." and not (site / file).exists():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(str(dist.locate_file(file)))


def main(folder: Path) -> None:
    """Make the environments in *folder*."""
    base: Found = {}
    _find(PROJECT["dependencies"], base)
    make_venv(folder / BASE, [])
    _link(base.values(), _site(folder / BASE))
    for name in TRIED:
        requirements, found = PROJECT["optional-dependencies"][name], dict(base)
        python = make_venv(folder / name, sites_of([], folder))
        try:
            _find(requirements, found)
        except PackageNotFoundError:
            pip(python, "install", "-q", "-c", ROOT / "constraints.txt", *requirements)
        else:
            _link((found[key] for key in found.keys() - base.keys()), _site(folder / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
