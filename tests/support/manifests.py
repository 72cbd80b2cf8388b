"""The manifests of configs/cluster as one set of objects, and who may connect to whom by their NetworkPolicies."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CLUSTER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
SERVERS = ("servers.yaml", "vllm.yaml")  # one or the other
WORKLOADS = ("StatefulSet", "Deployment")
SYSTEM = {"kubernetes.io/metadata.name": "kube-system"}

Object = dict[str, Any]


@dataclass(frozen=True, order=True)
class Connection:
    """A connection to a port of *to*, made by *by*: names of apps, or "names", "clients" and "observers"."""

    by: str
    to: str
    port: int


class Manifests:
    """All objects that are applied, *servers* being one of `SERVERS`."""

    def __init__(self, servers: str) -> None:
        self.kustomization: Object = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
        files = [name.replace(SERVERS[0], servers) for name in self.kustomization["resources"] if name.endswith("yaml")]
        self.objects: list[Object] = [each for name in files for each in objects_in(CLUSTER / name)]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def workloads(self) -> dict[str, Object]:
        """By app, the spec of its pods."""
        return {
            each["spec"]["template"]["metadata"]["labels"]["app"]: each["spec"]["template"]["spec"]
            for each in self.of_kind(*WORKLOADS)
        }

    def container(self, app: str, name: str) -> Object:
        (found,) = [each for each in containers_of(self.workloads()[app]) if each["name"] == name]
        return found

    def config_maps(self) -> dict[str, dict[str, Path]]:
        """By name, the files of each ConfigMap that kustomize makes."""
        made = {}
        for folder in (CLUSTER, CLUSTER.parent / "prometheus"):
            kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
            for each in kustomization["configMapGenerator"]:
                made[each["name"]] = {Path(file).name: folder / file for file in each["files"]}
        return made

    def allowed(self) -> set[Connection]:
        """Each connection that some policy of its source and some policy of its destination allow."""
        leaving, coming = set(), set()
        apps = set(self.workloads())
        for policy in self.of_kind("NetworkPolicy"):
            spec = policy["spec"]
            chosen = apps_of(spec["podSelector"], apps)
            for rule in spec.get("egress", []):
                leaving |= {Connection(by, to, port) for by in chosen for to, port in ends_of(rule, "to", apps)}
            for rule in spec.get("ingress", []):
                coming |= {Connection(by, to, port) for to in chosen for by, port in ends_of(rule, "from", apps)}
        inside = leaving & coming
        outside = {each for each in leaving | coming if each.by not in apps or each.to not in apps}
        return inside | outside


def objects_in(file: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def containers_of(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def apps_of(selector: Object, apps: set[str]) -> set[str]:
    """The apps whose pods a selector chooses."""
    if not selector:
        return apps
    labels = selector.get("matchLabels", {})
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    assert set(labels) <= {"app"}, labels
    chosen = {app for app in apps if labels.get("app", app) == app}
    for each in selector.get("matchExpressions", []):
        assert (each["key"], each["operator"]) == ("app", "In"), each
        assert set(each["values"]) <= apps, each
        chosen &= set(each["values"])
    assert chosen, f"{selector} chooses nothing"
    return chosen


def ends_of(rule: Object, side: str, apps: set[str]) -> Iterator[tuple[str, int]]:
    """The others that a rule is about, by name, and their ports."""
    for peer in rule[side]:
        if "namespaceSelector" in peer:
            labels = peer["namespaceSelector"]["matchLabels"]
            names = {"names"} if labels == SYSTEM else {label.partition("/")[2] for label in labels}
        else:
            names = apps_of(peer["podSelector"], apps)
        yield from ((name, each["port"]) for name in names for each in rule["ports"])
