"""The wheel and the source distribution have each file once and miss none; the sdist builds the same wheel."""

import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

import pytest
from markdown_links import links_of, pages
from package_builds import ROOMS, ROOT, build, copy_of_tree, unpacked

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_tree(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


def test_the_wheel_has_each_module_marker_and_configuration_once_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "kvtier"
    page = (ROOT / "web" / "dashboard" / "page").iterdir()
    expected = {f"kvtier/{path.name}" for path in package.iterdir() if path.suffix in (".py", ".typed")}
    expected |= {f"kvtier/web/dashboard/page/{path.name}" for path in page}
    for room in ROOMS:
        patterns = ("*.py", "*.toml", "*.service", "*.socket", "*.yaml", "*.yml", "*.json", "py.typed")
        patterns += ("*.sh", "*.conf", "Dockerfile") if room == "configs" else ()
        files = [path for pattern in patterns for path in (ROOT / room).rglob(pattern)]
        expected |= {f"kvtier/{path.relative_to(ROOT)}" for path in files}

    with ZipFile(wheel) as archive:
        names = archive.namelist()

    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "kvtier/py.typed" in expected
    assert any(name.endswith(".toml") for name in expected)


def test_the_source_distribution_has_each_file_once_and_no_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    paths = [member.name.partition("/")[2] for member in members if not member.isdir()]

    assert [path for path, count in Counter(paths).items() if count > 1] == []
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert [path for path in paths if path.startswith(tuple(f"kvtier/{room}/" for room in ROOMS))] == []


def test_the_source_distribution_has_what_the_documents_link_to(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers()}
    wanted = {page.relative_to(ROOT).as_posix() for page in pages()}
    wanted |= {link.file.relative_to(ROOT).as_posix() for page in pages() for link in links_of(page)}

    assert sorted(wanted - packed) == []


def test_the_source_distribution_has_what_the_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers()}
    sources = [path for room in ("tests", "bench") for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".c")]
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}

    assert sorted((wanted | {"Makefile", "constraints.txt", "pyproject.toml", ".ci/run"}) - packed) == []


def test_an_unpacked_source_distribution_gets_the_links_that_a_clone_has(sdist: Path, tmp_path: Path) -> None:
    unpack = unpacked(sdist, tmp_path / "unpacked")
    links = [f"kvtier/{room}" for room in ROOMS]

    subprocess.run(["make", *links], cwd=unpack, check=True, capture_output=True)

    script = "import kvtier.tiers.cache, kvtier.engine.config; print(kvtier.tiers.cache.__file__)"
    shown = subprocess.run([sys.executable, "-c", script], cwd=unpack, check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == str(unpack / "kvtier" / "tiers" / "cache.py")
    assert [os.readlink(unpack / link) for link in links] == [os.readlink(ROOT / link) for link in links]


def test_a_wheel_made_from_the_source_distribution_is_the_wheel_made_from_the_tree(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    again = build("wheel", unpacked(sdist, tmp_path / "unpacked"), tmp_path / "wheel")

    with ZipFile(wheel) as archive, ZipFile(again) as from_sdist:
        content = {name: archive.read(name) for name in archive.namelist()}
        content_again = {name: from_sdist.read(name) for name in from_sdist.namelist()}
    assert sorted(content) == sorted(content_again)
    assert [name for name in content if content[name] != content_again[name] and not name.endswith("/RECORD")] == []
