"""form.sh makes one cluster of six real servers with our configuration and users, and again of what is left of it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis_servers import HOST, RedisServer, free_port, running_server
from remote_cases import needs_redis, put_blocks, read_blocks
from store_cases import blob_of
from waiting import wait_for

from kvtier.engine.config import RemoteConfig
from kvtier.engine.stores.remote_store import remote_store

CLUSTER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")
NUM_NODES = 6
NUM_PRIMARIES = 3
WHOLE = [(5461, 1), (5461, 1), (5462, 1)]  # the slots of each primary, and its replicas

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
            said.append(done.stdout)
            assert done.stderr == ""
            return done.returncode == 0

        try:
            wait_for(is_whole, 0.2)
        except BaseException as error:
            error.add_note("".join(said))
            raise

    def roles(self) -> list[str]:
        """By node, "primary" or "replica", as it says itself."""
        return ["primary" if "master" in own["flags"] else "replica" for own in self._selves()]

    def shares(self) -> list[tuple[int, int]]:
        """Of each primary, how many slots it has, and how many replicas say that they are its own; in order."""
        selves = self._selves()
        following = [own["master_id"] for own in selves]
        return sorted(
            (sum(int(last[0]) - int(first) + 1 for first, *last in own["slots"]), following.count(own["node_id"]))
            for own in selves
            if "master" in own["flags"]
        )

    def node_that_is(self, role: str) -> RedisServer:
        return self.nodes[self.roles().index(role)]

    def has_copied(self) -> bool:
        """Whether each replica has all that its primary has."""
        told = [self._ask(node, "INFO", "replication") for node in self.nodes]
        primaries = [each for each in told if each["role"] == "master"]
        return all(each["slave0"]["offset"] == each["master_repl_offset"] for each in primaries)

    def config(self) -> RemoteConfig:
        addresses = ",".join(str(node.address) for node in self.nodes)
        file = self._secrets / "store" / "password"
        return RemoteConfig(url=f"redis+cluster://kvtier@{addresses}", password_file=str(file))

    def _selves(self) -> list[dict[str, Any]]:
        """What each node says of itself."""
        known = [self._ask(node, "CLUSTER NODES").values() for node in self.nodes]
        return [each for nodes in known for each in nodes if "myself" in each["flags"]]

    def _ask(self, node: RedisServer, *command: str) -> Any:
        password = (self._secrets / "valkey" / "keeper-password").read_text()
        with node.client(username="keeper", password=password) as client:
            return client.execute_command(*command)

    def move_a_replica(self) -> None:
        """Have a replica leave its primary for one that has a replica."""
        selves = self._selves()
        number, own = next((i, own) for i, own in enumerate(selves) if "slave" in own["flags"])
        others = [each["node_id"] for each in selves if "master" in each["flags"]]
        others.remove(own["master_id"])
        self._ask(self.nodes[number], "CLUSTER REPLICATE", others[0])

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


def test_six_nodes_become_three_primaries_with_a_replica_each(cluster: FormedCluster) -> None:
    cluster.form()

    assert cluster.shares() == WHOLE


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


@pytest.mark.parametrize("role", ["primary", "replica"])
def test_a_node_that_comes_back_with_nothing_is_a_part_of_the_cluster_again(cluster: FormedCluster, role: str) -> None:
    cluster.form()

    cluster.replace(cluster.node_that_is(role))
    cluster.form()

    assert cluster.shares() == WHOLE


def test_blocks_of_a_primary_that_is_replaced_are_on_its_replica(cluster: FormedCluster) -> None:
    cluster.form()
    with remote_store(cluster.config()) as store:
        put_blocks(store, *range(30, 50))
    wait_for(cluster.has_copied, 0.02)

    cluster.replace(cluster.node_that_is("primary"))
    cluster.form()

    with remote_store(cluster.config()) as store:
        assert read_blocks(store, *range(30, 50)) == [blob_of(number).digest for number in range(30, 50)]


def test_six_nodes_that_come_back_with_nothing_are_a_cluster_again(cluster: FormedCluster) -> None:
    cluster.form()

    for node in cluster.nodes:
        cluster.replace(node)
    cluster.form()

    assert cluster.shares() == WHOLE


def test_a_primary_that_lacks_a_replica_gets_one_of_another(cluster: FormedCluster) -> None:
    cluster.form()
    cluster.move_a_replica()
    assert cluster.shares() != WHOLE

    cluster.form()

    assert cluster.shares() == WHOLE


def test_a_node_that_is_away_is_waited_for(cluster: FormedCluster) -> None:
    cluster.form()
    cluster.nodes[-1].close()

    done = cluster.form_once()

    assert done.returncode == 1
    assert f"not yet: {HOST}:{cluster.nodes[-1].port}" in done.stdout
    cluster.nodes[-1].start_again()
    cluster.form()
