"""Do eight clients at once get as much as one, does each get its part, and how long does a hit's answer take?"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.attached.client import Client
from bench.attached.sidecar_process import sidecar_process
from bench.report import Effort, Row
from bench.rounds import at_least, at_most

BLOCK_BYTES = 256 << 10
NUM_BLOCKS = 16  # of a document
NUM_CLIENTS = 8
ENDS_WITHIN_S = 120.0


def crowd_rows(effort: Effort, folder: Path) -> list[Row]:
    """One client, then eight, then one again: each writes a document, and reads one of its own and two of others."""
    seconds, longest_chain = effort.of((8.0, 8192), quick=(1.0, 1024))
    with sidecar_process(folder, host="1GiB", disk=None) as sidecar:
        alone = _run(sidecar.socket, 1, seconds, longest_chain)
        together = _run(sidecar.socket, NUM_CLIENTS, seconds, longest_chain)
        alone += _run(sidecar.socket, 1, seconds, longest_chain)
    one = statistics.mean(seen["bytes_per_s"] for seen in alone)
    speeds = [seen["bytes_per_s"] for seen in together]
    ratio, minimum = sum(speeds) / one, min(speeds) / (sum(speeds) / NUM_CLIENTS)
    lookups = [took for seen in together for took in seen["lookups_s"]]
    answers = [took for seen in together for took in seen["answers_s"]]
    lookup_p99 = statistics.quantiles(lookups, n=100)[-1]
    return [
        at_least("8 clients: bytes a second of one client's", ratio, 0.9),
        at_most(f"8 clients: look-up of {longest_chain:,} names, p99", 1e3 * lookup_p99, "ms", 20),
        at_least("8 clients: slowest client of the mean", minimum, 0.5),
        Row("8 clients: a document's leases, p50", 1e3 * statistics.median(answers), "ms"),
        Row("8 clients: a document's leases, p99", 1e3 * statistics.quantiles(answers, n=100)[-1], "ms"),
        Row("one client: bytes", one / 1e9, "GB/s"),
    ]


def _run(socket: Path, num_clients: int, seconds: float, longest_chain: int) -> list[dict[str, Any]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.attached.crowd", socket, str(number), str(seconds), str(longest_chain)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(num_clients)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline(), "a client could not attach"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
    seen = []
    for process in started:
        assert process.stdout is not None
        seen.append(json.loads(process.stdout.readline()))
        process.wait(ENDS_WITHIN_S)
    return seen


def main(socket: Path, number: int, max_s: float, longest_chain: int) -> None:
    """Be one client for *max_s* seconds: it begins when its input ends."""
    client = Client(socket, BLOCK_BYTES)
    chain = client.chain(1, longest_chain)
    print("ready", flush=True)
    sys.stdin.read()
    lookups, answers, num_bytes, written = [], [], 0, 0
    began_at = time.perf_counter()
    while time.perf_counter() < began_at + max_s:
        num_bytes += client.write(1000 * number + written % 20, NUM_BLOCKS) * BLOCK_BYTES
        written += 1
        for other in (number, (number + 1) % NUM_CLIENTS, (number + 3) % NUM_CLIENTS):
            looked_at = time.perf_counter()
            client.lookup(chain)
            lookups.append(time.perf_counter() - looked_at)
            num_read = client.read(1000 * other + written % 20, NUM_BLOCKS)
            answers.append(client.answered_s)
            num_bytes += num_read * BLOCK_BYTES
    seconds = time.perf_counter() - began_at
    client.close()
    print(json.dumps({"bytes_per_s": num_bytes / seconds, "lookups_s": lookups, "answers_s": answers}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
