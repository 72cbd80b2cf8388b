"""The board and the alerts that ship with kvtier: what they name exists, and a real Prometheus answers all of it."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana import all_panels, open_panels
from markdown_links import anchors_of

import kvtier.configs
from kvtier.engine.observability.metrics.metric_name import Kind
from kvtier.engine.observability.metrics.names import CATALOGUE

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "configs"
BOARD = json.loads((CONFIGS / "grafana" / "kvtier.json").read_text())
PANELS = all_panels(BOARD)
ROWS = [panel for panel in BOARD["panels"] if panel["type"] == "row"]
MAX_OPEN_HEIGHT = 45  # of a board that fits three screens; a unit is 30 pixels
RULES = CONFIGS / "prometheus" / "alerts.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
CASES = Path(__file__).parent / "alerts_test.yml"
ENDINGS = {Kind.COUNTER: ["_total"], Kind.GAUGE: [""], Kind.HISTOGRAM: ["_bucket", "_sum", "_count"]}


def expressions() -> list[str]:
    """Every query of the board and of the alerts."""
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in ALERTS]


def promtool(*arguments: object) -> str:
    """What promtool says, if it is content."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_metric_of_the_board_and_the_alerts_is_in_the_catalogue_with_its_ending() -> None:
    told = {each.name + ending for each in CATALOGUE for ending in ENDINGS[each.kind]}

    named = {name for expression in expressions() for name in re.findall(r"\bkvtier_\w+", expression)}

    assert named - told == set()


def test_every_label_that_the_board_and_the_alerts_choose_by_is_one_of_the_metric() -> None:
    labels = {each.name + ending: set(each.labels) for each in CATALOGUE for ending in ENDINGS[each.kind]}
    chosen = re.compile(r"\b(kvtier_\w+)\{([^}]*)\}")

    for expression in expressions():
        for name, inside in chosen.findall(expression):
            assert set(re.findall(r"(\w+)[=!]", inside)) <= labels[name] | {"job", "instance"}, expression


def test_the_board_shows_what_no_others_board_has() -> None:
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]

    for expected in (
        r"sum by \(reason\) \(rate\(kvtier_recomputed_tokens_total",
        r"sum by \(tier, cause\) \(rate\(kvtier_evicted_blocks_total",
        r"kvtier_eviction_age_seconds_bucket",
        r"avg by \(tier, size\) \(kvtier_what_if_hit_ratio",
        r"kvtier_ssd_life_used_ratio",
        r"kvtier_ssd_years_left",
        r"sum by \(tenant\) \(rate\(kvtier_tenant_tokens_total",
        r"sum by \(route\) \(kvtier_pending_bytes",
    ):
        assert any(re.search(expected, expression) for expression in shown), expected


def test_the_board_is_one_that_grafana_can_draw() -> None:
    ids = [panel["id"] for panel in [*PANELS, *ROWS]]
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}

    assert len(set(ids)) == len(ids)
    assert variables == {"datasource", "job", "instance"}
    assert BOARD["uid"]
    assert BOARD["schemaVersion"] >= 39
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        assert all("legendFormat" in target and target["expr"] for target in panel["targets"])
        assert set(re.findall(r"\$\{?(\w+)", " ".join(t["expr"] for t in panel["targets"]))) <= {
            *variables,
            "__rate_interval",
            "__range",
        }


@pytest.mark.parametrize("panels", [BOARD["panels"], *(row["panels"] for row in ROWS)])
def test_no_two_panels_of_the_board_lie_upon_each_other(panels: list[dict[str, Any]]) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in panels]

    assert all(place["x"] + place["w"] <= 24 for _, place in places)
    for (one, a), (other, b) in itertools.combinations(places, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_beside or is_below, f"{one} lies upon {other}"


def test_what_is_shown_at_first_is_short_and_needs_no_option_of_kvtier() -> None:
    shown = open_panels(BOARD)
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in BOARD["panels"])

    assert bottom <= MAX_OPEN_HEIGHT
    for panel in shown:
        for target in panel["targets"]:
            assert not re.search(r"kvtier_(disk|ssd|remote|sidecar|tenant)_", target["expr"]), panel["title"]
    assert [row["collapsed"] for row in ROWS] == sorted(row["collapsed"] for row in ROWS)  # open rows first
    assert all(bool(row["panels"]) == row["collapsed"] for row in ROWS)


def test_years_have_a_unit_and_states_are_words() -> None:
    defaults = {panel["title"]: panel["fieldConfig"]["defaults"] for panel in PANELS}

    assert defaults["SSD years left"]["unit"] == "suffix: years"
    for title, no, yes in (
        ("Disk", "Closed", "Open"),
        ("Store", "Closed", "Open"),
        ("Ready and attached", "No", "Yes"),
    ):
        (mapping,) = defaults[title]["mappings"]
        assert (mapping["options"]["0"]["text"], mapping["options"]["1"]["text"]) == (no, yes)
    assert "none" not in {each["unit"] for each in defaults.values()}


def test_restarts_are_marked() -> None:
    (restarts,) = BOARD["annotations"]["list"]

    assert "resets(kvtier_prompt_tokens_total" in restarts["expr"]


def test_grafana_is_told_where_the_board_and_prometheus_are() -> None:
    provisioning = CONFIGS / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvtier.yml").read_text())["providers"]
    scrape = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]

    assert (source["type"], source["jsonData"]["timeInterval"]) == ("prometheus", scrape)
    assert (provider["type"], provider["options"]["path"]) == ("file", "$KVTIER_BOARDS")


def test_the_package_has_the_board_where_the_page_says() -> None:
    (folder,) = kvtier.configs.__path__

    assert json.loads((Path(folder) / "grafana" / "kvtier.json").read_text()) == BOARD
    assert (Path(folder) / "prometheus" / "alerts.yml").read_text() == RULES.read_text()


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", RULES)
    assert "is valid prometheus config" in promtool("check", "config", CONFIGS / "prometheus" / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_not_when_it_should_not() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES)


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case["alert_rule_test"][0] for case in yaml.safe_load(CASES.read_text())["tests"]]

    found = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}

    assert found == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_names_the_remedy_and_where_more_is_said(rule: dict[str, dict[str, str]]) -> None:
    page, _, anchor = rule["annotations"]["page"].partition("#")

    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["remedy"]) > 20
    assert (ROOT / page).is_relative_to(ROOT / "docs")
    assert anchor in anchors_of(ROOT / page)


def test_the_page_of_alerts_has_each_alert_with_its_severity_and_no_other() -> None:
    text = (ROOT / "docs" / "how-to" / "alerts.md").read_text()

    shown = re.findall(r"^- \*\*`(Kvtier\w+)`\*\* \((\w+)\): ", text, re.MULTILINE)
    assert shown == [(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS]
