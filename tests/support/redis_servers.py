"""Real Redis servers on loopback, alone and as a cluster, in folders and processes of their own."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry
from waiting import stop, wait_for

from kvtier.store.remote.redis_settings import Address, RedisSettings

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")

HOST = "127.0.0.1"
PATIENT_S = 60.0  # a client's timeout, unless a test says otherwise: the machine may be busy
NUM_SLOTS = 16384
_QUIET = ("--bind", HOST, "--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", "log")
_CLUSTER = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0")
NUM_PRIMARIES = 3
_NUM_TRIES = 5  # somebody else may take a port that was free


class RedisServer:
    """A server; it runs from the start to `close`, but for what a test does to it."""

    def __init__(self, folder: Path, *options: str, port_option: str = "--port") -> None:
        """*port_option*: `--tls-port` for a server that is asked with TLS alone."""
        self.folder = folder
        self.options = options
        self._port_option = port_option
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_NUM_TRIES):
            self.port, self.bus_port = free_port(), free_port()
            if self._comes_up():
                return
        raise RuntimeError(f"no server: {(folder / 'log').read_text()}")

    @property
    def address(self) -> Address:
        return Address(HOST, self.port)

    def settings(self, **others: Any) -> RedisSettings:
        return RedisSettings((self.address,), **{"timeout_s": PATIENT_S, **others})

    def client(self, **options: Any) -> Any:
        """redis-py's own client, by which tests see and change what is there."""
        return Redis(HOST, self.port, socket_timeout=30, retry=Retry(NoBackoff(), 0), **options)

    def ask(self, command: str, *arguments: Any) -> Any:
        """What it answers to one command."""
        with self.client() as client:
            return client.execute_command(*command.split(), *arguments)

    def told(self, command: str, field: str) -> str | None:
        """A field of what it tells of itself in lines; None if there is none."""
        text = self.ask(command)
        lines = text.decode().splitlines() if isinstance(text, bytes) else [f"{name}:{text[name]}" for name in text]
        return next((line.partition(":")[2] for line in lines if line.startswith(f"{field}:")), None)

    def own_slots(self) -> set[int]:
        """The slots that it takes for its own."""
        ranges = [slots for slots in self.ask("CLUSTER SLOTS") if slots[2][1] == self.port]
        return {slot for first, last, *_ in ranges for slot in range(first, last + 1)}

    def is_up(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        stop(self.process.pid)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def start_again(self) -> None:
        assert self._comes_up(), (self.folder / "log").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()

    def _comes_up(self) -> bool:
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        assert SERVER is not None, "needs redis-server: apt-get install redis-server"
        ports = ["--port", "0", self._port_option, str(self.port), "--cluster-port", str(self.bus_port)]
        command = [SERVER, *ports, "--dir", str(self.folder), *_QUIET, *self.options]
        self.process = subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(lambda: self.process.poll() is not None or (log.exists() and "Ready to accept" in log.read_text()))
        return self.process.poll() is None


@contextmanager
def running_server(folder: Path, *options: str, port_option: str = "--port") -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, port_option=port_option)
    try:
        yield server
    finally:
        server.close()


class ClusterOfSix:
    """Six nodes: three primaries, each with a replica. `heal` makes them that again after whatever a test did."""

    def __init__(self, nodes: Sequence[RedisServer]) -> None:
        self.nodes = nodes
        for i, node in enumerate(nodes[:NUM_PRIMARIES]):
            first, after = (NUM_SLOTS * n // NUM_PRIMARIES for n in (i, i + 1))
            node.ask("CLUSTER SET-CONFIG-EPOCH", i + 1)
            node.ask("CLUSTER ADDSLOTSRANGE", first, after - 1)
        for node in nodes[1:]:
            nodes[0].ask("CLUSTER MEET", HOST, node.port, node.bus_port)
        wait_for(
            lambda: all(node.told("CLUSTER INFO", "cluster_known_nodes") == str(len(nodes)) for node in nodes), 0.02
        )
        for primary, replica in zip(nodes[:NUM_PRIMARIES], nodes[NUM_PRIMARIES:], strict=True):
            replica.ask("CLUSTER REPLICATE", primary.ask("CLUSTER MYID"))
        wait_for(self._is_whole, 0.02)

    def settings(self, **others: Any) -> RedisSettings:
        addresses = tuple(node.address for node in self.nodes)
        return RedisSettings(addresses, is_cluster=True, **{"timeout_s": PATIENT_S, **others})

    def primaries(self) -> list[RedisServer]:
        return [node for node in self.nodes if node.is_up() and node.told("INFO replication", "role") == "master"]

    def owner_of(self, name: bytes) -> RedisServer:
        """The node that has the slot of the key *name*, by what it says itself."""
        return self.owner_of_slot(key_slot(name))

    def owner_of_slot(self, slot: int) -> RedisServer:
        (owner,) = [node for node in self.primaries() if slot in node.own_slots()]
        return owner

    def replica_of(self, primary: RedisServer) -> RedisServer:
        (replica,) = [node for node in self.nodes if node.told("INFO replication", "master_port") == str(primary.port)]
        return replica

    def begin_to_move(self, slot: int, source: RedisServer, to: RedisServer) -> None:
        """From now on *source* sends those to *to* who ask for what it has no more of a slot."""
        to.ask("CLUSTER SETSLOT", slot, "IMPORTING", source.ask("CLUSTER MYID"))
        source.ask("CLUSTER SETSLOT", slot, "MIGRATING", to.ask("CLUSTER MYID"))

    def move_slot(self, slot: int, to: RedisServer, keys_at_once: int = 10) -> None:
        """Move a slot with all that is in it, as `redis-cli --cluster reshard` does."""
        source = self.owner_of_slot(slot)
        self.begin_to_move(slot, source, to)
        while names := source.ask("CLUSTER GETKEYSINSLOT", slot, keys_at_once):
            source.ask("MIGRATE", HOST, to.port, "", 0, 30_000, "KEYS", *names)
        for node in (to, source, *self.primaries()):
            node.ask("CLUSTER SETSLOT", slot, "NODE", to.ask("CLUSTER MYID"))

    def require_all_slots(self, is_required: bool) -> None:
        """Whether no node serves anything while nobody has some slot; so it is unless they are told otherwise."""
        for node in self.nodes:
            node.ask("CONFIG SET", "cluster-require-full-coverage", "yes" if is_required else "no")

    def heal(self) -> None:
        """Have all nodes up, each primary with a replica, and nothing in them."""
        for node in self.nodes:
            if node.process.poll() is not None:
                node.start_again()
            node.resume()
        wait_for(self._is_whole, 0.02)
        self.require_all_slots(True)
        for node in self.primaries():
            node.ask("FLUSHALL")

    def _is_whole(self) -> bool:
        primaries = self.primaries()
        return (
            len(primaries) == NUM_PRIMARIES
            and all(node.told("CLUSTER INFO", "cluster_state") == "ok" for node in self.nodes)
            and all(node.told("CLUSTER INFO", "cluster_slots_ok") == str(NUM_SLOTS) for node in self.nodes)
            and all(node.told("INFO replication", "connected_slaves") == "1" for node in primaries)
            and all(node.told("INFO replication", "master_link_status") in ("up", None) for node in self.nodes)
            and all(
                len({tuple(slots[2][:2]) for slots in node.ask("CLUSTER SLOTS")}) == NUM_PRIMARIES
                for node in self.nodes
            )
        )


@contextmanager
def running_cluster(folder: Path) -> Iterator[ClusterOfSix]:
    """A cluster that notices within a second or two that a node is away."""
    with ExitStack() as servers:
        yield ClusterOfSix([servers.enter_context(running_server(folder / str(i), *_CLUSTER)) for i in range(6)])


def free_port() -> int:
    """A port of this machine that no process listens at."""
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])
