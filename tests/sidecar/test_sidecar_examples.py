"""The files in configs/sidecar/: systemd, Kubernetes and the sidecar itself read them as they are meant."""

import configparser
import json
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_blocks import blocks_of

from kvtier.cli.main import main
from kvtier.engine.config import parse_bytes
from kvtier.sidecar.attach_commands import attach_commands
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.sidecar.inherited import ENGINE, HTTP, LMCACHE, SEGMENT
from kvtier.sidecar.process import LEAVING
from kvtier.sidecar.systemd import MIN_WATCHDOG_S

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "sidecar"
UNIT = FOLDER / "kvtier-sidecar.service"
SOCKETS = [FOLDER / "kvtier-sidecar.socket", FOLDER / "kvtier-sidecar-http.socket"]


def section(file: Path, name: str) -> dict[str, str]:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names as they are written
    unit.read(file)
    return dict(unit[name])


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    return section(UNIT, "Service")


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def in_cluster(objects: dict[str, Any]) -> SidecarConfig:
    tables = tomllib.loads(objects["ConfigMap"]["data"]["sidecar.toml"])
    return sidecar_config(None, tables)


def test_the_configuration_is_read_with_what_is_commented_out_too(tmp_path: Path) -> None:
    text = (FOLDER / "sidecar.toml").read_text()
    config = sidecar_config(FOLDER / "sidecar.toml", {})
    whole = tmp_path / "whole.toml"
    whole.write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE).replace('host = "127.0.0.1"\n', "", 1))

    assert (config.host.capacity, config.http.port) == (32 << 30, 9464)
    assert set(sidecar_config(whole, {}).models) == {"meta-llama/Llama-3.1-8B-Instruct", "my-finetune"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    units = [UNIT, *SOCKETS]
    for unit in units:
        (tmp_path / unit.name).write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", unit.read_text()))

    command = ["systemd-analyze", "verify", *(tmp_path / unit.name for unit in units)]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert [line for line in found.stderr.splitlines() if "kvtier-sidecar" in line] == []
    assert found.returncode == 0


def test_the_unit_starts_the_sidecar_and_waits_as_long_as_it_takes(service: dict[str, str]) -> None:
    config = sidecar_config(FOLDER / "sidecar.toml", {})
    command = shlex.split(service["ExecStart"])

    assert command[1:3] == ["sidecar", "--config"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure"
    assert float(service["WatchdogSec"]) >= MIN_WATCHDOG_S
    assert float(service["TimeoutStopSec"]) > config.drain_s
    assert config.disk is not None
    assert config.disk.path == f"/var/lib/{service['StateDirectory']}"


def test_the_socket_units_listen_where_the_sidecar_does_and_by_the_names_that_it_takes(service: dict[str, str]) -> None:
    config = sidecar_config(FOLDER / "sidecar.toml", {})
    endpoint, http = (section(file, "Socket") for file in SOCKETS)

    assert config.lmcache is not None
    assert (f"tcp://{endpoint['ListenStream']}", endpoint["FileDescriptorName"]) == (config.lmcache.listen, LMCACHE)
    assert (http["ListenStream"], http["FileDescriptorName"]) == (f"{config.http.host}:{config.http.port}", HTTP)
    assert http["Service"] == UNIT.name
    assert service["Sockets"].split() == [file.name for file in SOCKETS]


def test_engines_of_other_users_reach_the_socket_in_a_folder_that_a_restart_keeps(
    service: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = shlex.split(service["ExecStart"])
    path = Path(command[command.index("--socket") + 1])
    smaller = ["--host-memory", "1GiB", "--disk", f"{tmp_path}:1GiB"]  # this machine may be smaller than the example
    status = main(["sidecar", "--config", str(FOLDER / "sidecar.toml"), *command[4:], *smaller, "--check-config"])

    assert str(path.parent) == f"/run/{service['RuntimeDirectory']}"
    assert int(service["RuntimeDirectoryMode"], 8) & 0o011 == 0o011
    assert service["RuntimeDirectoryPreserve"] == "restart"
    assert status == 0
    assert f'"sidecar":"{path}"' in capsys.readouterr().out


def test_a_restart_leaves_what_a_stop_takes_away(service: dict[str, str]) -> None:
    assert signal.Signals[service["RestartKillSignal"]] in LEAVING
    assert "KillSignal" not in service
    assert int(service["FileDescriptorStoreMax"]) >= len((LMCACHE, ENGINE, HTTP, SEGMENT))
    assert service["KillMode"] == "mixed"  # the store's process has ended before the next sidecar maps its memory


def test_the_pods_containers_share_memory_that_is_large_enough(
    objects: dict[str, Any], in_cluster: SidecarConfig
) -> None:
    spec = objects["Pod"]["spec"]
    (sidecar,), (engine,) = spec["initContainers"], spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    names = {
        container["name"]: {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        for container in (sidecar, engine)
    }

    assert in_cluster.socket.path.startswith("/run/kvtier/")
    assert names["vllm"]["/run/kvtier"] == names["kvtier"]["/run/kvtier"]
    shared = names["kvtier"]["/dev/shm"]
    assert names["vllm"]["/dev/shm"] == shared
    assert volumes[shared]["emptyDir"]["medium"] == "Memory"
    assert parse_bytes(volumes[shared]["emptyDir"]["sizeLimit"] + "B") > in_cluster.host.capacity
    assert parse_bytes(sidecar["resources"]["limits"]["memory"] + "B") > in_cluster.host.capacity
    assert {m["name"] for c in (sidecar, engine) for m in c["volumeMounts"]} == set(volumes)
    assert sidecar["restartPolicy"] == "Always"
    assert spec["terminationGracePeriodSeconds"] > in_cluster.drain_s


def test_the_probes_ask_where_the_sidecar_answers_and_wait_longer_than_it_does(
    objects: dict[str, Any], in_cluster: SidecarConfig
) -> None:
    (sidecar,) = objects["Pod"]["spec"]["initContainers"]
    paths = {}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        code = sidecar[kind]["exec"]["command"][-1]
        compile(code, kind, "exec")
        found = re.search(r'"http://127\.0\.0\.1:(\d+)(/\w+)", timeout=(\d+)', code)
        assert found is not None
        assert int(found[1]) == in_cluster.http.port
        assert 2 < int(found[3]) < sidecar[kind]["timeoutSeconds"]
        paths[kind] = found[2]

    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}


def test_the_engine_is_told_what_the_sidecar_says_to_tell_it(
    objects: dict[str, Any], in_cluster: SidecarConfig
) -> None:
    (engine,) = objects["Pod"]["spec"]["containers"]
    given = engine["args"][1].removeprefix("--kv-transfer-config=")
    recommended, *_ = attach_commands(in_cluster)
    printed = shlex.split(recommended.lines[-1])[-1]

    assert json.loads(given) == json.loads(printed)


def test_kvtiers_own_connector_is_the_first_way_to_attach_and_lmcaches_client_the_last() -> None:
    path = "/run/kvtier/own.sock"
    config = sidecar_config(None, {"socket": {"path": path}})

    first, second, last = attach_commands(config)

    assert json.loads(shlex.split(first.lines[-1])[-1]) == {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"sidecar": path},
    }
    assert second.lines == (f"kvtier serve --sidecar unix://{path}",)
    assert json.loads(shlex.split(last.lines[-1])[-1])["kv_connector"] == "LMCacheMPConnector"


@pytest.mark.parametrize(("page", "place"), [("vllm.md", 0), ("vllm-lmcache.md", -1)])
def test_the_pages_about_vllm_have_the_commands_that_the_sidecar_prints(page: str, place: int) -> None:
    config = sidecar_config(None, {"socket": {"path": "/tmp/kvtier.sock"}})
    *before, attach = attach_commands(config)[place].lines

    blocks = blocks_of(ROOT / "docs" / "how-to" / page, ROOT)
    commands = [command for block in blocks if block.is_shell for command in block.commands()]
    transfers = [shlex.split(command)[-1] for command in commands if "--kv-transfer-config" in command]

    assert [json.loads(transfer) for transfer in transfers] == [json.loads(shlex.split(attach)[-1])]
    assert [line for line in before if line not in commands] == []
