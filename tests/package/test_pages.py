"""Documents that users read: their links lead somewhere, and files, commands, settings and metrics in them exist."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from markdown_links import (
    ROOT,
    anchors_of,
    code_of,
    definitions_of,
    examples_of,
    links_of,
    pages,
    references_of,
    site_titles,
)
from metrics_page import names_on_page

from kvtier.connectors.sglang_storage.options import JUDGED as SGLANG_OPTIONS
from kvtier.connectors.vllm_connector.options import JUDGED as VLLM_OPTIONS
from kvtier.engine.config import Config, ConfigError, tree_from_dict
from kvtier.routing.config import RouteConfig
from kvtier.sidecar.config import SidecarConfig

PAGES = [page.relative_to(ROOT).as_posix() for page in pages()]
# DESIGN.md and CHANGELOG.md also name what is planned, or gone.
GUIDES = [page for page in PAGES if page not in ("CHANGELOG.md", "DESIGN.md", "STYLE.md")]
LONGEST_README = 120
LONGEST_LINE = 125
KINDS = (Config, SidecarConfig, RouteConfig)
TABLES = {name: field.type for name, field in ((field.name, field) for field in msgspec.structs.fields(Config))}


def commands_of(page: Path) -> list[str]:
    """Return the examples of commands in *page*, and of output."""
    return [*examples_of(page, ""), *examples_of(page, "sh"), *examples_of(page, "text")]


def words_of(page: Path) -> list[str]:
    """The words of all code in *page*: between backticks, and in examples."""
    return " ".join([*code_of(page), *commands_of(page)]).split()


def keys_of(table: str) -> set[str]:
    """The keys of a configuration's table."""
    kind = TABLES[table]
    for struct in (kind, *getattr(kind, "__args__", ())):
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
            return {field.name for field in msgspec.structs.fields(struct)}
    return set()


def faults_of(tables: dict[str, object]) -> list[str]:
    """Return an error for each kind of configuration that does not accept *tables*."""
    faults = []
    for kind in KINDS:
        try:
            tree_from_dict(kind, tables, kind.__name__)
        except ConfigError as error:
            faults.append(str(error))
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_each_link_leads_to_a_file_and_each_anchor_to_a_heading(page: str) -> None:
    links = links_of(ROOT / page)

    assert [link.file for link in links if not link.file.is_file()] == []
    assert [link for link in links if link.anchor and link.anchor not in anchors_of(link.file)] == []


@pytest.mark.parametrize("page", PAGES)
def test_each_link_by_reference_has_a_definition_and_each_definition_a_link(page: str) -> None:
    assert references_of(ROOT / page) == set(definitions_of(ROOT / page))


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_are_short(page: str) -> None:
    """Longer lines are hard to read in an editor and in a diff. URLs do not count, because they cannot be wrapped."""
    lines = [re.sub(r"https?://[^\s)>\]]+", "", line) for line in (ROOT / page).read_text().splitlines()]

    assert [line for line in lines if len(line) > LONGEST_LINE] == []


@pytest.mark.parametrize("page", GUIDES)
def test_each_path_that_is_named_exists(page: str) -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    tops = {path.name for path in ROOT.iterdir()} - ignored
    words = [word.strip(",;:()") for word in words_of(ROOT / page)]
    paths = [word for word in words if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word)]
    named = [path for path in paths if path.endswith(".py") or ("/" in path and path.partition("/")[0] in tops)]

    beside = (ROOT / page).parent
    assert [path for path in named if not (ROOT / path).exists() and not (beside / path).exists()] == []


def test_each_module_that_the_design_names_and_does_not_plan_exists() -> None:
    there = [
        path.as_posix() for path in ROOT.rglob("*.py") if not {".venv", "build"} & set(path.relative_to(ROOT).parts)
    ]
    lines = [line for line in (ROOT / "DESIGN.md").read_text().splitlines() if "*(planned)*" not in line]
    named = set(re.findall(r"`([a-z_/]+\.py)`", "\n".join(lines)))

    assert sorted(name for name in named if not any(path.endswith(f"/{name}") for path in there)) == []


@pytest.mark.parametrize("page", PAGES)
def test_each_benchmark_that_is_named_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    modules = {module.replace(".", "/") for module in re.findall(r"-m (bench[.\w]+)", text)}
    paths = set(re.findall(r"\bbench/[\w/]+\.py", text)) if page != "STYLE.md" else set()

    gone = [each for each in modules if not any((ROOT / f"{each}{end}").is_file() for end in (".py", "/__main__.py"))]
    assert gone + [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", GUIDES)
def test_each_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join([*code_of(ROOT / page), *commands_of(ROOT / page)])

    assert [target for target in re.findall(r"^make ([\w-]+)", code, re.MULTILINE) if target not in targets] == []


@pytest.mark.parametrize("page", GUIDES)
def test_each_setting_that_is_named_exists(page: str) -> None:
    dotted = re.compile(rf"({'|'.join(name for name in TABLES if keys_of(name))})\.(?!toml$)(\w+)")  # not server.toml
    named = [match.groups() for word in words_of(ROOT / page) if (match := dotted.fullmatch(word.strip(",;:()")))]

    assert [f"{table}.{key}" for table, key in named if key not in keys_of(table)] == []


@pytest.mark.parametrize("page", GUIDES)
def test_examples_of_configuration_are_accepted(page: str) -> None:
    """By the server, the sidecar or the router; the file of API keys has the table [keys] alone."""
    tables = [tomllib.loads(example) for example in examples_of(ROOT / page, "toml")]

    assert [faults for each in tables if set(each) != {"keys"} and len(faults := faults_of(each)) == len(KINDS)] == []


@pytest.mark.parametrize("page", GUIDES)
def test_examples_in_python_compile(page: str) -> None:
    for example in examples_of(ROOT / page, "python"):
        compile(example, page, "exec")


@pytest.mark.parametrize("page", GUIDES)
def test_each_metric_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"\bkvtier_\w+", (ROOT / page).read_text())) - {"kvtier_"}

    assert named <= names_on_page()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_every_page_can_be_reached_from_readme_by_links() -> None:
    reached: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += {link.file for link in links_of(page) if link.file.suffix == ".md" and link.file.is_file()} - reached

    assert sorted(str(page) for page in set(pages()) - reached) == []


def test_the_sites_navigation_has_each_page_once() -> None:
    assert sorted(page for page, _ in site_titles()) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_what_make_docs_copies(page: str) -> None:
    (copied,) = re.findall(r"^\tcp -r (.*) build/pages/$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    there = [path for pattern in copied.split() for path in ROOT.glob(pattern)]

    linked = {link.file for link in links_of(ROOT / page)}
    assert [file for file in linked if not any(file.is_relative_to(path) for path in there)] == []


@pytest.mark.parametrize(
    "page", [path for path in [*pages(), *(ROOT / "examples").rglob("*.py")] if path.name != "CHANGELOG.md"], ids=str
)
def test_kvtier_is_installed_from_a_clone(page: Path) -> None:
    """It is on no package index: `pip install kvtier` installs nothing, or what another owner of the name has."""
    assert re.findall(r"pip install [^`\n#&]*\bkvtier\b(?! is\b).*", page.read_text()) == []


def test_no_test_imports_a_benchmark() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    imports = re.compile(r"^\s*(from|import) bench\b", re.MULTILINE)

    assert [path.name for path in tests if imports.search(path.read_text())] == []


def test_the_page_of_namespaces_has_every_option_that_decides_bytes_and_no_other() -> None:
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", (ROOT / "docs" / "explanation" / "namespaces.md").read_text(), re.M)

    assert rows == [*VLLM_OPTIONS.decides.items(), *SGLANG_OPTIONS.decides.items()]
