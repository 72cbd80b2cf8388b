"""`kvtier route` before it routes: its arguments, its configuration, and one line for each mistake."""

from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.routing.config import RouteConfig, route_config

EXAMPLE = Path(__file__).parents[2] / "configs" / "route" / "route.toml"
ONE, OTHER = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["route", "--check-config", *arguments]) == 2
    err = capsys.readouterr().err
    return err.removeprefix("kvtier: checking the router's configuration\n")


def test_check_config_says_what_the_arguments_come_to(capsys: pytest.CaptureFixture[str]) -> None:
    events = ["--events", "tcp://10.0.0.1:5557", "--events", "tcp://10.0.0.2:5557"]

    assert main(["route", ONE, OTHER, *events, "--check-config"]) == 0

    out = capsys.readouterr().out
    assert f"{ONE}, events from tcp://10.0.0.1:5557\n" in out
    assert f"{OTHER}, events from tcp://10.0.0.2:5557\n" in out


def test_the_example_has_the_defaults_and_two_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    config = route_config(EXAMPLE, {})

    assert [each.name for each in config.replicas] == ["one", "two"]
    assert config == RouteConfig(replicas=config.replicas)
    assert main(["route", "--config", str(EXAMPLE), "--check-config"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvtier: route: $: no replicas: give the URL of at least one server\n"),
        (
            ["10.0.0.1:8000"],
            "kvtier: route: $.replicas[0]: url 10.0.0.1:8000: is not the URL of a server; write it as http://HOST:PORT\n",
        ),
        ([ONE, ONE], f"kvtier: route: $: replicas: the name {ONE} is used twice; give each replica its own\n"),
        (
            [ONE, OTHER, "--events", "tcp://10.0.0.1:5557"],
            "kvtier: --events: 1 addresses for 2 URLs; give one per URL, in the same order\n",
        ),
        (
            [ONE, "--events", "tcp://*:5557"],
            "kvtier: route: $.replicas[0]: events tcp://*:5557: is not an endpoint to connect to; "
            "write it as tcp://HOST:PORT\n",
        ),
        (
            [ONE, "--replay", "tcp://10.0.0.1:5558"],
            "kvtier: route: $.replicas[0]: replay without events: give the endpoint of events too\n",
        ),
        ([ONE, "--api-keys", "/nowhere/keys.toml"], "kvtier: api keys /nowhere/keys.toml: No such file or directory; "),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert refused(capsys, *arguments).startswith(message)


def test_a_key_that_is_not_known_is_told_with_the_one_that_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "route.toml"
    file.write_text('[[replicas]]\nurl = "http://a:1"\n[policy]\nhost_cots = 0.2\n')

    assert "$.policy.host_cots: unknown key; did you mean host_cost?" in refused(capsys, "--config", str(file))
