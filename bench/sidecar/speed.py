"""How fast is the sidecar beside LMCache's own server, through LMCache's own client?"""

import json
import mmap
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foreign.lmcache_server import lmcache_server
from foreign.running import Sidecar, free_endpoint

from bench.report import Effort, Row
from bench.rounds import at_least, at_most, seconds
from kvtier.sidecar.build_sidecar import NUM_CHECKERS
from kvtier.store.record import digest_for_threads

MEASURE = Path(__file__).parents[2] / "tests" / "support" / "foreign" / "lmcache_measure.py"
CHUNK_BYTES = 1 << 20
STORED_BYTES = 128 * CHUNK_BYTES  # in one go
NUM_LOOKED_UP = 512  # chunks


def lmcache_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The sidecar beside LMCache's own server, in turns; medians. The sidecar verifies hits before they are loaded,
    which LMCache's server does not."""
    num_rounds = effort.of(7, quick=1)
    with lmcache_server(python) as url, Sidecar(free_endpoint(), "--host", "3GiB") as sidecar:
        command = [python, str(MEASURE), str(num_rounds), f"kvtier={sidecar.endpoint}", f"lmcache={url}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = json.loads(done.stdout.splitlines()[-1])
    rows: list[Row] = []
    for what in took["kvtier"]:
        own, other = (statistics.median(took[name][what]) for name in ("kvtier", "lmcache"))
        if what in ("store", "retrieve"):
            speed = STORED_BYTES / own / 1e9
            rows.append(at_least(f"{what}: LMCache's client, GB/s of LMCache's server", other / own, 1))
            rows.append(Row(f"{what}: LMCache's client and the sidecar", speed, "GB/s"))
        else:
            rows.append(at_most(f"{what}: of LMCache's server's time", own / other, "", 1))
            rows.append(Row(f"{what}: the sidecar", 1e3 * own, "ms"))
    rows.append(Row("digests alone of the chunks of 131,072 tokens, 512 MiB", 1e3 * digests_s(num_rounds), "ms"))
    return rows


def digests_s(num_rounds: int) -> float:
    """The seconds that digests of as many bytes take as a hit of 131,072 tokens has, with nothing around."""
    memory = memoryview(mmap.mmap(-1, NUM_LOOKED_UP * CHUNK_BYTES))
    chunks = [memory[start : start + CHUNK_BYTES] for start in range(0, len(memory), CHUNK_BYTES)]
    for chunk in chunks:
        chunk[:] = bytes(range(256)) * (CHUNK_BYTES // 256)
    with ThreadPoolExecutor(NUM_CHECKERS) as threads:
        return statistics.median(
            seconds(lambda: list(threads.map(digest_for_threads(NUM_CHECKERS), chunks, chunksize=8)))
            for _ in range(num_rounds)
        )
