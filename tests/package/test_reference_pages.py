"""The generated pages of the reference are those of the source, and their examples are accepted."""

import re
import tomllib

import cli_page
import metrics_compat_page
import metrics_page
import msgspec
import pytest
from configuration_page import EXAMPLES, example_of, example_value, keys_of, meanings_of, parts_of
from markdown_links import ROOT
from page_checks import faults_of_command
from peer_boards import BOARDS
from reference_pages import PAGES

from kvtier.cli.main import build_parser
from kvtier.engine.config import Config, Table, config_from_dict, parse_bytes, tree_from_dict
from kvtier.engine.observability.metrics.compat.lmcache_names import LMCACHE_CATALOGUE
from kvtier.engine.observability.metrics.compat.vllm_names import VLLM_CATALOGUE
from kvtier.routing.config import RouteConfig
from kvtier.sidecar.config import SidecarConfig

KINDS = [Config, SidecarConfig, RouteConfig]
LONGEST_LINE = 125


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_that_of_the_source(page: str) -> None:
    assert (ROOT / page).read_text() == PAGES[page](), f"{page} is stale: run make reference"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_depends_on_no_terminal_and_no_home(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = PAGES[page]()
    for name, value in {"COLUMNS": "40", "HOME": "/nowhere", "XDG_RUNTIME_DIR": "/nowhere"}.items():
        monkeypatch.setenv(name, value)

    assert PAGES[page]() == before


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_are_short(page: str) -> None:
    assert [line for line in PAGES[page]().splitlines() if len(line) > LONGEST_LINE and "https://" not in line] == []


def test_every_command_and_option_is_on_the_page() -> None:
    page = cli_page.cli_page()
    parsers = [parser for parser, _, _ in cli_page.commands_of(build_parser())]
    options = {option for each in parsers for action in each._actions for option in action.option_strings}

    assert [each.prog for each in parsers if f"\n## `{each.prog}`\n" not in page] == []
    assert [option for option in options - {"-h", "--help"} if option not in page] == []


def test_examples_in_the_help_of_commands_have_options_that_exist() -> None:
    text = re.sub(r" *\\\n *", " ", cli_page.cli_page())
    examples = re.findall(r"^  (kvtier .*?)(?:  .*)?$", text, re.MULTILINE)

    assert len(examples) > len(PAGES)
    assert [fault for command in examples for fault in faults_of_command(command)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning_and_every_meaning_a_key(kind: type[Table]) -> None:
    for part in parts_of(kind):
        assert {field.name for field in keys_of(part)} == set(meanings_of(part.kind)) - {""}, part.kind


@pytest.mark.parametrize("kind", [Config, SidecarConfig])
def test_the_example_with_all_keys_is_the_default_configuration(kind: type[Table]) -> None:
    assert tree_from_dict(kind, tomllib.loads(example_of(kind)), "example") == kind()


def test_the_example_of_a_router_has_one_replica_and_the_defaults() -> None:
    given = {"replicas": [{"url": EXAMPLES["replicas.url"]}]}

    found = tree_from_dict(RouteConfig, tomllib.loads(example_of(RouteConfig)), "example")
    assert found == tree_from_dict(RouteConfig, given, "given")


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_has_each_key_once(kind: type[Table]) -> None:
    lines = [line.removeprefix("# ") for line in example_of(kind).splitlines()]
    keys = [field.name for part in parts_of(kind) for field in keys_of(part)]

    assert sorted(line.partition(" = ")[0] for line in lines if " = " in line) == sorted(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_of_keys_without_a_default_are_accepted(kind: type[Table]) -> None:
    for part in parts_of(kind):
        for field in keys_of(part):
            if field.default is None or field.required:
                value = example_value(part, field.name)
                msgspec.convert(value, field.type, dec_hook=lambda _, size: parse_bytes(size))


def test_an_example_of_a_table_that_is_not_there_by_default_is_accepted() -> None:
    example = example_of(Config).replace("# [", "[")
    for table, keys in {"disk": ["path", "capacity", "codec"], "events": ["endpoint", "replay_endpoint"]}.items():
        body = example.partition(f"[{table}]\n")[2].partition("\n\n")[0].replace("# ", "")
        tables = {table: {key: value for key, value in tomllib.loads(body).items() if key in keys}}

        assert getattr(config_from_dict(tables), table) is not None


def test_every_metric_is_on_the_page_and_every_remark_belongs_to_one() -> None:
    found = {each.name for each in metrics_page.metrics_on_page()}

    assert set(metrics_page.MORE) <= found
    assert [name for name in found if f"`{name}" not in metrics_page.metrics_page()] == []


def test_every_name_of_other_projects_has_a_meaning_and_no_other() -> None:
    exported = {each.name for each in (*VLLM_CATALOGUE, *LMCACHE_CATALOGUE)}

    assert metrics_compat_page.names_with_meaning() == exported


def test_every_panel_of_the_boards_of_other_projects_is_on_the_page() -> None:
    page = " ".join(metrics_compat_page.metrics_compat_page().split())
    titles = [panel.title for board in BOARDS.values() for panel in board.panels]

    assert titles
    assert [title for title in titles if title not in page] == []
