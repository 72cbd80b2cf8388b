"""form.sh makes one cluster of six real servers with our configuration and users, and again of what is left of it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis_servers import HOST, NUM_SLOTS, RedisServer, free_port, running_server
from remote_cases import needs_redis, put_blocks, read_blocks
from store_cases import blob_of
from waiting import wait_for

from kvtier.engine.config import RemoteConfig
from kvtier.engine.remote_store import remote_store

CLUSTER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")
NUM_NODES = 6
NUM_PRIMARIES = 3

pytestmark = [pytest.mark.long, needs_redis, pytest.mark.skipif(CLI is None, reason="needs redis-cli")]


class FormedCluster:
    """Six servers that know nothing of each other, until `form` has said that they are whole."""

    def __init__(self, nodes: list[RedisServer], secrets: Path) -> None:
        self.nodes = nodes
        self._secrets = secrets

    def form_once(self) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "NODES": " ".join(f"{HOST}:{node.port}@{node.bus_port}" for node in self.nodes),
            "PRIMARIES": str(NUM_PRIMARIES),
            "REDISCLI_AUTH": (self._secrets / "valkey" / "keeper-password").read_text(),
            "CLI": f"{CLI} --user keeper --no-auth-warning",
        }
        script = [CLUSTER / "valkey" / "form.sh"]
        return subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def form(self) -> None:
        said = []

        def is_whole() -> bool:
            done = self.form_once()
            said.append(done.stdout + done.stderr)
            return done.returncode == 0

        try:
            wait_for(is_whole, 0.2)
        except BaseException as error:
            error.add_note("".join(said))
            raise

    def roles(self) -> list[tuple[str, int]]:
        """By node, "master" or "slave" and how many slots it has itself."""
        roles = []
        for node in self.nodes:
            known = self._ask(node, "CLUSTER NODES")
            (own,) = [each for each in known.values() if "myself" in each["flags"]]
            num_slots = sum(int(last[0]) - int(first) + 1 for first, *last in own["slots"])
            roles.append(("master" if "master" in own["flags"] else "slave", num_slots))
        return roles

    def has_copied(self) -> bool:
        """Whether each replica has all that its primary has."""
        told = [self._ask(node, "INFO", "replication") for node in self.nodes]
        primaries = [each for each in told if each["role"] == "master"]
        return all(each["slave0"]["offset"] == each["master_repl_offset"] for each in primaries)

    def config(self) -> RemoteConfig:
        addresses = ",".join(str(node.address) for node in self.nodes)
        file = self._secrets / "store" / "password"
        return RemoteConfig(url=f"redis+cluster://kvtier@{addresses}", password_file=str(file))

    def _ask(self, node: RedisServer, *command: str) -> Any:
        password = (self._secrets / "valkey" / "keeper-password").read_text()
        with node.client(username="keeper", password=password) as client:
            return client.execute_command(*command)

    def replace(self, node: RedisServer) -> None:
        """A new node in its place, at another address as a new pod is, which knows nothing."""
        node.close()
        node.port, node.bus_port = free_port(), free_port()
        (node.folder / "nodes.conf").unlink()
        node.start_again()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets") / "made"
    subprocess.run([CLUSTER / "make-secrets.sh", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, secrets: Path) -> Iterator[FormedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    config = folder / "valkey.conf"
    text = (CLUSTER / "valkey" / "valkey.conf").read_text().replace("/etc/valkey/users", str(secrets / "valkey"))
    lines = [line for line in text.splitlines() if line.split(" ")[0] not in ("port", "dir", "maxmemory")]
    config.write_text("\n".join(lines) + "\n")
    with ExitStack() as servers:
        options = ("--include", str(config))
        nodes = [servers.enter_context(running_server(folder / str(number), *options)) for number in range(NUM_NODES)]
        formed = FormedCluster(nodes, secrets)
        formed.form()
        yield formed


def is_three_and_three(cluster: FormedCluster) -> bool:
    roles = cluster.roles()
    shares = sorted(num_slots for role, num_slots in roles if role == "master")
    return [role for role, _ in roles].count("slave") == NUM_NODES - NUM_PRIMARIES and shares == [
        NUM_SLOTS // NUM_PRIMARIES,
        NUM_SLOTS // NUM_PRIMARIES,
        NUM_SLOTS // NUM_PRIMARIES + 1,
    ]


def test_six_nodes_become_three_primaries_with_a_replica_each(cluster: FormedCluster) -> None:
    cluster.form()

    assert is_three_and_three(cluster)


def test_a_cluster_that_is_whole_is_left_alone(cluster: FormedCluster) -> None:
    cluster.form()
    before = cluster.roles()

    done = cluster.form_once()

    assert done.stdout == "whole: 6 nodes, 3 primaries\n"
    assert cluster.roles() == before


def test_sidecars_put_and_find_blocks_with_the_user_that_the_script_has_made(cluster: FormedCluster) -> None:
    cluster.form()

    with remote_store(cluster.config()) as store:
        assert put_blocks(store, *range(1, 20)) == [True] * 19
        assert read_blocks(store, *range(1, 20)) == [blob_of(number).digest for number in range(1, 20)]


@pytest.mark.parametrize("role", ["master", "slave"])
def test_a_node_that_comes_back_with_nothing_is_a_part_of_the_cluster_again(cluster: FormedCluster, role: str) -> None:
    cluster.form()
    gone = next(node for node, (its, _) in zip(cluster.nodes, cluster.roles(), strict=True) if its == role)

    cluster.replace(gone)
    cluster.form()

    assert is_three_and_three(cluster)


def test_blocks_of_a_primary_that_is_replaced_are_on_its_replica(cluster: FormedCluster) -> None:
    cluster.form()
    with remote_store(cluster.config()) as store:
        put_blocks(store, *range(30, 50))
    wait_for(cluster.has_copied, 0.02)
    primary = next(node for node, (role, _) in zip(cluster.nodes, cluster.roles(), strict=True) if role == "master")

    cluster.replace(primary)
    cluster.form()

    with remote_store(cluster.config()) as store:
        assert read_blocks(store, *range(30, 50)) == [blob_of(number).digest for number in range(30, 50)]


def test_six_nodes_that_come_back_with_nothing_are_a_cluster_again(cluster: FormedCluster) -> None:
    cluster.form()

    for node in cluster.nodes:
        cluster.replace(node)
    cluster.form()

    assert is_three_and_three(cluster)


def test_a_node_that_is_away_is_waited_for(cluster: FormedCluster) -> None:
    cluster.form()
    cluster.nodes[-1].close()

    done = cluster.form_once()

    assert done.returncode == 1
    assert f"not yet: {HOST}:{cluster.nodes[-1].port}" in done.stdout
    cluster.nodes[-1].start_again()
    cluster.form()
