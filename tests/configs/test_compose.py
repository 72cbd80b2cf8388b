"""Three containers: compose.yaml and the image agree with each other and with kvtier."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from manifests import CLUSTER
from package_builds import ROOT, build, copy_of_tree

from kvtier.cli.main import build_parser
from kvtier.engine.config import config_from_dict, load_toml
from kvtier.routing.config import route_config

FILE = CLUSTER / "compose.yaml"
DOCKERFILE = (CLUSTER / "Dockerfile").read_text()
MADE = {"context": "../..", "dockerfile": "configs/cluster/Dockerfile", "target": "kvtier"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


@pytest.mark.parametrize(("broken", "status"), [(False, 0), (True, 1)])
def test_the_schema_of_compose_accepts_the_file_and_not_any(tmp_path: Path, broken: bool, status: int) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(FILE.read_text().replace("command:", "comand:") if broken else FILE.read_text())
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file]

    done = subprocess.run(check, capture_output=True, text=True, check=False)

    assert done.returncode == status, done.stdout


def test_there_are_three_containers_and_each_may_as_little_as_can_be(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"valkey", "server", "router"}
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" in service or service["image"].startswith("kvtier:"), name  # whose image has a user
    assert compose["services"]["server"]["build"] == MADE


@pytest.mark.parametrize("name", ["server", "router"])
def test_our_commands_are_understood_and_read_the_file_that_is_mounted(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    options = build_parser().parse_args(service["command"])
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"] if volume.startswith("./"))

    assert (CLUSTER / mounts[options.config]).is_file()
    assert options.config.endswith(Path(mounts[options.config]).name)


def test_each_finds_what_it_connects_to_in_a_network_of_both_and_nothing_else(compose: dict[str, Any]) -> None:
    networks = {name: set(service["networks"]) for name, service in compose["services"].items()}
    server = config_from_dict(load_toml(CLUSTER / "compose" / "server.toml"), "server.toml")
    (replica,) = route_config(CLUSTER / "compose" / "route.toml", {}).replicas
    assert server.remote is not None
    assert server.events is not None
    at = [urlsplit(url or "") for url in (replica.url, replica.events, replica.replay)]
    listening = [server.events.endpoint, server.events.replay_endpoint or ""]

    assert urlsplit(server.remote.url).hostname == "valkey"
    assert {each.hostname for each in at} == {"server"}
    assert [each.port for each in at] == [server.server.port, *(int(url.rpartition(":")[2]) for url in listening)]
    assert networks["server"] & networks["valkey"]
    assert networks["router"] & networks["server"]
    assert not networks["router"] & networks["valkey"]
    assert [name for name, network in compose["networks"].items() if not network.get("internal")] == ["clients"]
    assert networks["router"] - networks["server"] == {"clients"}


def test_only_this_machine_reaches_the_router_and_nobody_the_others(compose: dict[str, Any]) -> None:
    port = route_config(CLUSTER / "compose" / "route.toml", {}).port

    assert {name: each["ports"] for name, each in compose["services"].items() if "ports" in each} == {
        "router": [f"127.0.0.1:{port}:{port}"]
    }


def test_containers_have_time_to_end_and_blocks_a_volume(compose: dict[str, Any]) -> None:
    services = compose["services"]
    server = config_from_dict(load_toml(CLUSTER / "compose" / "server.toml"), "server.toml")
    router = route_config(CLUSTER / "compose" / "route.toml", {})
    mounted = dict(volume.split(":")[:2] for volume in services["server"]["volumes"] if not volume.startswith("$"))
    assert server.disk is not None

    assert int(services["server"]["stop_grace_period"].removesuffix("s")) > server.server.drain_s
    assert int(services["router"]["stop_grace_period"].removesuffix("s")) > router.drain_s
    assert server.disk.path.startswith(f"{mounted['blocks']}/")
    assert f" {mounted['blocks']}\n" in DOCKERFILE  # the folder of the image, whose owner a new volume has


def test_the_image_is_of_a_user_without_rights_and_of_extras_that_there_are() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    extras = re.search(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)

    assert users == ["10001:10001", "10001:10001"]
    assert extras is not None
    assert [extra for extra in extras[1].split(",") if not re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)] == []
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image, _ in bases)
    assert [name for _, name in bases] == ["wheel", "vllm", "kvtier"]  # the last one is built by default


@pytest.mark.long
def test_a_wheel_of_what_the_image_copies_has_what_a_wheel_of_all_has(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    copied = tmp_path / "src"
    copied.mkdir()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, to = line.split()
        for source in sources:
            if (tree / source).is_dir():
                shutil.copytree(tree / source, copied / Path(to).relative_to("/src"), symlinks=True)
            else:
                shutil.copy(tree / source, copied)

    whole = build("wheel", tree, tmp_path / "whole")
    made = build("wheel", copied, tmp_path / "made")

    assert names_in(made) == names_in(whole)


def names_in(wheel: Path) -> list[str]:
    listing = subprocess.run([sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True)
    return sorted(line.split()[0] for line in listing.stdout.splitlines()[1:])
