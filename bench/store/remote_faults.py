"""What does a cluster of Redis cost its clients while a primary dies or hangs, or hands slots over?

Six nodes of this machine, which notice after a second that one is away; four threads read, put and ask all the time. A
call may fail as a whole, or in part: those are misses. It may not raise anything else, or outlast its deadline; and
hits are back within 5 s of the moment when the cluster has a primary for each slot again.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from redis.crc import key_slot
from redis_servers import SERVER, ClusterOfSix, RedisServer, running_cluster
from remote_load import RemoteLoad
from waiting import wait_for

from bench.report import Effort, Row, arguments, publish
from bench.rounds import KIB, at_most, never
from bench.store.ground import note
from kvtier.store.blob_store import Blob
from kvtier.store.record import digest
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.sealed_remote import SealedRemote

TIMEOUT_S = 0.5
MAX_TIMEOUTS = 4  # that a call may take: two for its bytes, one to connect, one that a thread comes late
BACK_WITHIN_S = 5.0
NUM_BLOCKS = 60
BLOCK_BYTES = 64 * KIB
NUM_SLOTS = 10  # that are moved to another node and back

Deed = Callable[[ClusterOfSix, RedisServer, RemoteLoad], float]
"""Does something to the primary of the first block; seconds until everything is found again once it could be."""


def kill(cluster: ClusterOfSix, primary: RedisServer, load: RemoteLoad) -> float:
    """End it with SIGKILL."""
    replica = cluster.replica_of(primary)
    primary.kill()
    wait_for(lambda: replica.told("INFO replication", "role") == "master")
    return load.back_after_s()


def hang(cluster: ClusterOfSix, primary: RedisServer, load: RemoteLoad) -> float:
    """Stop it with SIGSTOP."""
    replica = cluster.replica_of(primary)
    primary.pause()
    wait_for(lambda: replica.told("INFO replication", "role") == "master")
    return load.back_after_s()


def hang_without_replica(cluster: ClusterOfSix, primary: RedisServer, load: RemoteLoad) -> float:
    """Stop it and its replica, and let it go on once the others know."""
    other = next(node for node in cluster.primaries() if node is not primary)
    cluster.replica_of(primary).pause()
    primary.pause()
    wait_for(lambda: other.told("CLUSTER INFO", "cluster_state") == "fail")
    primary.resume()
    wait_for(lambda: other.told("CLUSTER INFO", "cluster_state") == "ok")
    return load.back_after_s()


def hand_over(cluster: ClusterOfSix, primary: RedisServer, load: RemoteLoad) -> float:
    """Move slots of blocks to another node and back."""
    other = next(node for node in cluster.primaries() if node is not primary)
    slots = sorted({key_slot(_name(blob.key)) for blob in _blobs()} & primary.own_slots())[:NUM_SLOTS]
    for to in (other, primary):
        for slot in slots:
            cluster.move_slot(slot, to)
    return load.back_after_s()


DEEDS: dict[str, Deed] = {
    "a primary is killed": kill,
    "a primary hangs": hang,
    "a primary and its replica hang": hang_without_replica,
    "slots are handed over": hand_over,
}


QUICK_DEEDS: dict[str, Deed] = {name: do for name, do in DEEDS.items() if do is hand_over}


def fault_rows(effort: Effort, cluster: ClusterOfSix) -> list[Row]:
    """Each deed under load, in a cluster that was healed before; in a quick run the one that waits for no failover."""
    rows: list[Row] = []
    for name, do in effort.of(DEEDS, quick=QUICK_DEEDS).items():
        note(name)
        cluster.heal()
        blobs = _blobs()
        with RedisRemote(cluster.settings(timeout_s=TIMEOUT_S)) as store:
            assert all(SealedRemote(store).put_many(blobs)), "the cluster takes no blocks"
            with RemoteLoad(store, blobs) as load:
                back_after_s = do(cluster, cluster.owner_of(_name(blobs[0].key)), load)
        rows += [
            at_most(f"{name}: back to hits after", back_after_s, "s", BACK_WITHIN_S),
            at_most(f"{name}: longest call", load.longest_s, "s", MAX_TIMEOUTS * TIMEOUT_S),
            never(f"{name}: wrong results, and errors that are none of a store", len(load.wrong)),
            Row(f"{name}: calls that found nobody, of {load.num_calls}", load.num_unavailable, ""),
        ]
        if do is hand_over:
            missed = load.num_incomplete + load.num_unavailable
            rows.append(at_most(f"{name}: calls that missed something", missed, "", 0))
    return rows


def _blobs() -> list[Blob]:
    raws = [memoryview(bytes([number]) * BLOCK_BYTES) for number in range(NUM_BLOCKS)]
    return [Blob(b"bench/redis_node" + bytes([number]) * 32, digest(raw), raw) for number, raw in enumerate(raws)]


def _name(key: bytes) -> bytes:
    return b"kvtier:{%b}" % key.hex().encode()


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "python -m bench.store.remote_faults --json"
    options = parser.parse_args()
    if SERVER is None:
        parser.error("needs redis-server: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        publish("remote_faults", fault_rows(options.effort, cluster), options.json)


if __name__ == "__main__":
    main()
