"""The manifests of configs/cluster: Kubernetes' schemas accept them, and they agree with each other and with kvtier."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from manifests import CLUSTER, SERVERS, WORKLOADS, Connection, Manifests, containers_of, objects_in

from kvtier.cli.main import build_parser
from kvtier.engine.config import Config, config_from_dict, load_toml, parse_bytes
from kvtier.routing.config import RouteConfig, route_config
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.store.codec.cipher import Cipher
from kvtier.store.remote.redis_settings import RedisSettings
from kvtier.web.api_keys import ApiKeys

OF_KUSTOMIZE = ("kustomization.yaml", "compose.yaml")
FILES = sorted(path.name for path in CLUSTER.glob("*.yaml") if path.name not in OF_KUSTOMIZE)
KUBERNETES = "1.31"
BUS = 10000  # a node's bus is so far above its port
DNS = 53


@pytest.fixture(scope="module", params=SERVERS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return Manifests(request.param)


@pytest.fixture(scope="module")
def sidecar() -> SidecarConfig:
    return sidecar_config(CLUSTER / "sidecar.toml", {})


@pytest.fixture(scope="module")
def server() -> Config:
    return config_from_dict(load_toml(CLUSTER / "server.toml"), "server.toml")


@pytest.fixture(scope="module")
def router() -> RouteConfig:
    return route_config(CLUSTER / "route.toml", {})


@pytest.fixture(scope="module")
def scrapes() -> list[dict[str, Any]]:
    return list(yaml.safe_load((CLUSTER / "prometheus.yml").read_text())["scrape_configs"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("version", [KUBERNETES, kubernetes_validate.latest_version()])
def test_the_schemas_of_kubernetes_accept_each_object(file: str, version: str) -> None:
    for each in objects_in(CLUSTER / file):
        kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    (namespace,) = objects_in(CLUSTER / "namespace.yaml")
    namespace["metadata"]["lables"] = {}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(namespace, KUBERNETES, strict=True)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_builds_what_is_applied_and_the_schemas_accept_that_too() -> None:
    built = subprocess.run(["kubectl", "kustomize", CLUSTER], capture_output=True, text=True, check=True).stdout
    objects = [each for each in yaml.safe_load_all(built) if each]

    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    expected = sorted((each["kind"], each["metadata"]["name"]) for each in Manifests(SERVERS[0]).objects)
    assert sorted((o["kind"], o["metadata"]["name"]) for o in objects if o["kind"] != "ConfigMap") == expected
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    made = Manifests(SERVERS[0]).config_maps()
    assert sorted(name.rpartition("-")[0] for name in maps) == sorted(made)
    used = {
        v["configMap"]["name"] for o in objects if o["kind"] in WORKLOADS for v in volumes_of(o) if "configMap" in v
    }
    assert used == set(maps)


def volumes_of(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return list(workload["spec"]["template"]["spec"].get("volumes", []))


def test_every_file_is_applied_or_is_the_other_kind_of_server(manifests: Manifests) -> None:
    named = {name for name in manifests.kustomization["resources"] if name.endswith(".yaml")}

    assert set(FILES) == named | {SERVERS[1]}


def test_every_pod_may_as_little_as_can_be(manifests: Manifests) -> None:
    for app, pod in manifests.workloads().items():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, app
        assert context["runAsUser"] > 0, app
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, app
        assert pod["automountServiceAccountToken"] is False, app
        for container in containers_of(pod):
            may = container["securityContext"]
            assert may["allowPrivilegeEscalation"] is False, container["name"]
            assert may["readOnlyRootFilesystem"] is True, container["name"]
            assert may["capabilities"] == {"drop": ["ALL"]}, container["name"]
            assert "memory" in container["resources"]["limits"], container["name"]


def test_every_image_has_a_version(manifests: Manifests) -> None:
    tags = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in manifests.kustomization["images"]}

    for pod in manifests.workloads().values():
        for container in containers_of(pod):
            assert re.search(r":v?\d+\.\d+\.\d+$", tags.get(container["image"], container["image"]))


def test_every_volume_is_mounted_and_every_mount_is_a_volume(manifests: Manifests) -> None:
    for each in manifests.of_kind(*WORKLOADS):
        claims = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in volumes_of(each)} | claims
        containers = containers_of(each["spec"]["template"]["spec"])
        assert {m["name"] for c in containers for m in c.get("volumeMounts", [])} == volumes


def test_every_config_map_is_made_and_mounted_by_the_names_of_its_files(manifests: Manifests) -> None:
    made, used = manifests.config_maps(), set()
    for pod in manifests.workloads().values():
        maps = {v["name"]: v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
        used |= set(maps.values())
        for container in containers_of(pod):
            for mount in container.get("volumeMounts", []):
                if mount["name"] in maps and "subPath" in mount:
                    assert mount["subPath"] in made[maps[mount["name"]]]
                    assert mount["mountPath"].endswith(f"/{mount['subPath']}")

    assert used == set(made)
    assert all(path.is_file() for files in made.values() for path in files.values())


def test_every_secret_is_made_by_the_script_with_the_keys_that_are_read(manifests: Manifests, tmp_path: Path) -> None:
    made = secrets_of(tmp_path / "made")

    for pod in manifests.workloads().values():
        for volume in pod["volumes"]:
            if "secret" in volume:
                secret = volume["secret"]
                assert secret["defaultMode"] == 0o440  # for the group of the pod, which kvtier takes for private
                assert {item["key"] for item in secret.get("items", [])} <= made[secret["secretName"]]
        for container in containers_of(pod):
            for variable in container.get("env", []):
                key = variable.get("valueFrom", {}).get("secretKeyRef")
                assert key is None or key["key"] in made[key["name"]]


def secrets_of(folder: Path) -> dict[str, set[str]]:
    """The keys of each secret, by the commands that the script prints."""
    script = CLUSTER / "make-secrets.sh"
    printed = subprocess.run([script, folder], check=True, capture_output=True, text=True).stdout
    made = {}
    for line in printed.splitlines():
        assert line.startswith("kubectl -n kvtier create secret generic "), line
        name, *files = line.split()[6:]
        paths = [Path(file.removeprefix("--from-file=")) for file in files]
        assert all(path.is_file() for path in paths), line
        made[name] = {path.name for path in paths}
    return made


def test_the_secrets_are_what_kvtier_reads_and_no_one_else_may(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    secrets_of(folder)
    keys = ApiKeys.from_file(folder / "keys" / "keys.toml")
    operators = ApiKeys.from_file(folder / "keys" / "operators.toml")

    assert keys.tenant_of((folder / "client.key").read_text().strip()) == "team-a"
    assert keys.tenant_of((folder / "metrics" / "prometheus.key").read_text().strip()) == "prometheus"
    assert operators.tenant_of((folder / "operator.token").read_text().strip()) == "operator"
    Cipher.from_file(folder / "store" / "encryption.key")
    assert [path for path in folder.rglob("*") if path.stat().st_mode & 0o077] == []


def test_a_second_run_of_the_script_changes_nothing(tmp_path: Path) -> None:
    secrets_of(tmp_path / "made")
    before = {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}

    again = subprocess.run([CLUSTER / "make-secrets.sh", tmp_path / "made"], capture_output=True, check=False)

    assert again.returncode != 0
    assert {path: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("app", "name"), [("server", "sidecar"), ("server", "server"), ("router", "router")])
def test_our_commands_are_understood_and_read_the_files_that_are_mounted(app: str, name: str) -> None:
    container = Manifests("servers.yaml").container(app, name)
    options = build_parser().parse_args(container["args"])

    assert options.config in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_each_file_that_a_configuration_names_is_in_a_volume(
    server: Config, sidecar: SidecarConfig, router: RouteConfig
) -> None:
    manifests = Manifests("servers.yaml")
    assert sidecar.disk is not None
    assert sidecar.remote is not None
    of_sidecar = [sidecar.disk.path, sidecar.disk.encryption_key_file, sidecar.remote.password_file]
    of_sidecar += [sidecar.remote.encryption_key_file, sidecar.socket.path, sidecar.http.token_file]
    named = {
        ("server", "sidecar"): of_sidecar,
        ("server", "server"): [
            server.server.api_keys,
            server.operators.tokens,
            (server.sidecar or "")[len("unix://") :],
        ],
        ("router", "router"): [router.api_keys, router.operators.tokens],
    }

    for (app, name), files in named.items():
        mounts = [mount["mountPath"] for mount in manifests.container(app, name)["volumeMounts"]]
        assert [file for file in files if not any((file or "").startswith(f"{mount}/") for mount in mounts)] == []


def test_engines_attach_where_the_sidecar_listens(server: Config, sidecar: SidecarConfig) -> None:
    args = Manifests("vllm.yaml").container("server", "server")["args"]
    given = {arg.partition("=")[0]: arg.partition("=")[2] for arg in args}
    connector = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]
    assert server.events is not None

    assert server.sidecar == f"unix://{sidecar.socket.path}"
    assert connector["sidecar"] == sidecar.socket.path
    events = json.loads(given["--kv-events-config"])
    assert events["endpoint"] == server.events.endpoint
    assert events["replay_endpoint"] == server.events.replay_endpoint
    assert (given["--host"], int(given["--port"])) == (server.server.host, server.server.port)
    assert given["--served-model-name"] == server.server.model_name


def test_the_sidecar_is_the_same_beside_vllm() -> None:
    assert Manifests("vllm.yaml").container("server", "sidecar") == Manifests("servers.yaml").container(
        "server", "sidecar"
    )


def test_memory_and_disk_are_larger_than_what_is_put_there(manifests: Manifests, sidecar: SidecarConfig) -> None:
    (each,) = [o for o in manifests.of_kind("StatefulSet") if o["metadata"]["name"] == "server"]
    (shm,) = [volume["emptyDir"] for volume in volumes_of(each) if volume["name"] == "shm"]
    (claim,) = each["spec"]["volumeClaimTemplates"]
    container = manifests.container("server", "sidecar")
    assert sidecar.disk is not None

    assert shm["medium"] == "Memory"
    assert parse_bytes(shm["sizeLimit"] + "B") > sidecar.host.capacity
    assert parse_bytes(container["resources"]["limits"]["memory"] + "B") > parse_bytes(shm["sizeLimit"] + "B")
    assert parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B") > 1.1 * sidecar.disk.capacity
    limits = manifests.container("valkey", "valkey")["resources"]["limits"]
    maxmemory = re.search(r"^maxmemory (\d+)gb$", (CLUSTER / "valkey" / "valkey.conf").read_text(), re.MULTILINE)
    assert maxmemory is not None
    assert parse_bytes(limits["memory"] + "B") > 1.2 * (int(maxmemory[1]) << 30)


def test_pods_have_time_to_end(
    manifests: Manifests, server: Config, sidecar: SidecarConfig, router: RouteConfig
) -> None:
    pods = manifests.workloads()

    assert pods["server"]["terminationGracePeriodSeconds"] > server.server.drain_s + sidecar.drain_s
    assert pods["router"]["terminationGracePeriodSeconds"] > router.drain_s


def test_containers_listen_at_the_ports_that_configurations_have(
    manifests: Manifests, server: Config, sidecar: SidecarConfig, router: RouteConfig
) -> None:
    assert server.events is not None
    events, replay = (urlsplit(str(at)).netloc for at in (server.events.endpoint, server.events.replay_endpoint))
    listening = {
        ("server", "server"): {server.server.port, int(events.split(":")[1]), int(replay.split(":")[1])},
        ("server", "sidecar"): {sidecar.http.port},
        ("router", "router"): {router.port},
        ("valkey", "valkey"): {6379, 6379 + BUS},
    }

    for (app, name), ports in listening.items():
        assert {port["containerPort"] for port in manifests.container(app, name)["ports"]} == ports
    assert {server.server.host, server.events.host, sidecar.http.host, router.host} == {"0.0.0.0"}
    conf = (CLUSTER / "valkey" / "valkey.conf").read_text()
    assert "port 6379\n" in conf


def test_services_lead_to_ports_that_containers_have(manifests: Manifests) -> None:
    for service in manifests.of_kind("Service"):
        containers = containers_of(manifests.workloads()[service["spec"]["selector"]["app"]])
        named = {port["name"]: port["containerPort"] for c in containers for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert port["port"] == named[port["targetPort"]]
    for each in manifests.of_kind("StatefulSet"):
        services = [s["metadata"]["name"] for s in manifests.of_kind("Service")]
        assert each["spec"]["serviceName"] in services


def needed(sidecar: SidecarConfig, router: RouteConfig, scrapes: list[dict[str, Any]]) -> set[Connection]:
    """What containers connect to, by their configurations."""
    assert sidecar.remote is not None
    addresses = RedisSettings.from_url(sidecar.remote.url, "word").addresses
    of_router = {urlsplit(at or "") for each in router.replicas for at in (each.url, each.events, each.replay)}
    made = {("server", at.host, at.port) for at in addresses}
    made |= {("router", at.hostname or "", at.port or 0) for at in of_router}
    for job in scrapes:
        targets = [target for static in job.get("static_configs", []) for target in static["targets"]]
        targets += [f"{name}:{sd['port']}" for sd in job.get("dns_sd_configs", []) for name in sd["names"]]
        made |= {("prometheus", host, int(port)) for host, _, port in (target.partition(":") for target in targets)}
    variables = Manifests("servers.yaml").container("valkey-keeper", "keeper")["env"]
    (nodes,) = [each["value"].split() for each in variables if each["name"] == "NODES"]
    made |= {("valkey-keeper", node.partition(":")[0], int(node.partition(":")[2])) for node in nodes}
    services = {each["metadata"]["name"]: each for each in Manifests("servers.yaml").of_kind("Service")}
    connections = {
        Connection(by, services[host.rpartition(".")[2]]["spec"]["selector"]["app"], port) for by, host, port in made
    }
    connections |= {Connection(by, "names", DNS) for by, _, _ in made}
    connections |= {Connection("valkey", "valkey", port) for port in (6379, 6379 + BUS)}
    return connections | {Connection("clients", "router", router.port), Connection("observers", "prometheus", 9090)}


def test_each_connection_that_a_container_makes_is_allowed_and_no_other(
    manifests: Manifests, sidecar: SidecarConfig, router: RouteConfig, scrapes: list[dict[str, Any]]
) -> None:
    assert sorted(manifests.allowed()) == sorted(needed(sidecar, router, scrapes))


def test_what_no_policy_names_is_refused(manifests: Manifests) -> None:
    (deny,) = [each["spec"] for each in manifests.of_kind("NetworkPolicy") if each["spec"]["podSelector"] == {}]

    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for each in manifests.of_kind("NetworkPolicy"):
        rules = {name.capitalize() for name in ("ingress", "egress") if name in each["spec"]}
        assert rules <= set(each["spec"]["policyTypes"])


def test_names_of_pods_are_those_of_the_replicas(
    manifests: Manifests, sidecar: SidecarConfig, router: RouteConfig, scrapes: list[dict[str, Any]]
) -> None:
    sets = {each["metadata"]["name"]: each["spec"] for each in manifests.of_kind("StatefulSet")}
    pods = {name: {f"{name}-{n}.{spec['serviceName']}" for n in range(spec["replicas"])} for name, spec in sets.items()}
    assert sidecar.remote is not None
    variables = manifests.container("valkey-keeper", "keeper")["env"]
    (nodes,) = [each["value"].split() for each in variables if each["name"] == "NODES"]

    assert {urlsplit(each.url).hostname for each in router.replicas} == pods["server"]
    assert {at.host for at in RedisSettings.from_url(sidecar.remote.url, "word").addresses} == pods["valkey"]
    assert {node.partition(":")[0] for node in nodes} == pods["valkey"]
    for job in scrapes[:2]:
        assert {target.partition(":")[0] for target in job["static_configs"][0]["targets"]} == pods["server"]


def test_prometheus_has_the_rules_and_jobs_that_these_know_and_may_read_metrics(
    scrapes: list[dict[str, Any]], server: Config, tmp_path: Path
) -> None:
    container = Manifests("servers.yaml").container("prometheus", "prometheus")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    rules = yaml.safe_load((CLUSTER / "prometheus.yml").read_text())["rule_files"]
    secrets_of(tmp_path / "made")
    keys = {path.name for path in (tmp_path / "made" / "metrics").iterdir()}
    files = {job["authorization"]["credentials_file"] for job in scrapes if "authorization" in job}

    assert [str(Path(rule).parent) for rule in rules] == ["/etc/prometheus/alerts"]
    assert {str(Path(rule).parent) for rule in rules} <= mounts
    assert {Path(file).name for file in files} == keys
    assert {str(Path(file).parent) for file in files} <= mounts
    assert [job["job_name"] for job in scrapes] == ["kvtier", "kvtier-sidecar", "kvtier-route"]
    assert server.server.metrics_tenants == ("prometheus",)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_accepts_the_configuration_with_its_rules(tmp_path: Path) -> None:
    (tmp_path / "alerts").mkdir()
    (tmp_path / "secrets").mkdir()
    for name in ("prometheus.key", "sidecar.token"):
        (tmp_path / "secrets" / name).write_text("word")
    shutil.copy(CLUSTER.parent / "prometheus" / "alerts.yml", tmp_path / "alerts")
    config = tmp_path / "prometheus.yml"
    config.write_text((CLUSTER / "prometheus.yml").read_text().replace("/etc/prometheus", str(tmp_path)))

    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout
