"""How fast is the sidecar beside LMCache's own server, through LMCache's own client?"""

import json
import statistics
import subprocess
from pathlib import Path

from foreign.running import Sidecar, free_endpoint

from bench.report import Row
from bench.sidecar.lmcache_server import lmcache_server

MEASURE = Path(__file__).parents[2] / "tests" / "support" / "foreign" / "lmcache_measure.py"
MEASURED_ROUNDS = 7
STORED_BYTES = 128 << 20  # in one go, in chunks of 1 MiB


def lmcache_rows(python: str, folder: Path) -> list[Row]:
    """The sidecar beside LMCache's own server, in turns; medians."""
    with lmcache_server(python) as url, Sidecar(free_endpoint(), "--host", "1GiB") as sidecar:
        command = [python, str(MEASURE), str(MEASURED_ROUNDS), f"kvtier={sidecar.endpoint}", f"lmcache={url}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    rows: list[Row] = []
    for what in seconds["kvtier"]:
        own, other = (statistics.median(seconds[name][what]) for name in ("kvtier", "lmcache"))
        if what in ("store", "retrieve"):
            speed = STORED_BYTES / own / 1e9
            rows.append(
                Row(f"{what}: LMCache's client, GB/s of LMCache's server", other / own, "", ">= 1", other >= own)
            )
            rows.append(Row(f"{what}: LMCache's client and the sidecar", speed, "GB/s"))
        else:
            is_promised = "miss" in what  # hits are verified before they are told, which LMCache's are not
            target, ok = ("<= 1", own <= other) if is_promised else ("", None)
            rows.append(Row(f"{what}: of LMCache's server's time", own / other, "", target, ok))
            rows.append(Row(f"{what}: the sidecar", 1e3 * own, "ms"))
    return rows
