"""What is left of an engine that is killed while it writes, and what do engines notice of a sidecar that is killed?"""

import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench.attached.client import Client
from bench.attached.engine_process import EngineProcess
from bench.attached.sidecar_process import SidecarProcess, sidecar_process
from bench.report import Effort, Row
from bench.rounds import at_most, never

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
DOCUMENT_TOKENS = 600
NUM_DOCUMENTS = 6  # of each engine, and two that all have
LONGEST_S = 2.0
BETWEEN_S = (0.5, 2.5)  # kills of the sidecar
WARM_UP_S = 10.0  # until the first


def engine_kill_rows(effort: Effort, folder: Path) -> list[Row]:
    """A client is killed again and again while it writes and reads; another one is served meanwhile, and checks all."""
    num_kills = effort.of(100, quick=6)
    with sidecar_process(folder, host="256MiB", disk=None) as sidecar:
        witness = Client(sidecar.socket, BLOCK_BYTES)
        num_slots = witness.memory.blocks.shape[0]
        rng, took, num_wrong = random.Random(1), list[float](), 0
        for number in range(num_kills):
            _kill_one(sidecar.socket, number, rng.uniform(0.0, 0.05))
            killed_at = time.monotonic()
            # All slots can be had again only once those of the killed one are back.
            slots: list[int] = []
            while len(slots) < num_slots // 2 and time.monotonic() < killed_at + 10:
                slots += witness.tiers.reserve(0, num_slots // 2 - len(slots))
                witness.turn()
            took.append(time.monotonic() - killed_at)
            witness.give_back(slots)
            witness.write(10_000 + number, 8)
            num_wrong += witness.read(10_000 + number, 8) != 8
        for number in range(num_kills):
            witness.read(number, NUM_BLOCKS)  # checks every block that is there
        witness.close()
    return [
        at_most(f"engine killed {num_kills} times: slots back after, at most", max(took), "s", 1),
        never(f"engine killed {num_kills} times: another one's blocks missing", num_wrong),
    ]


def _kill_one(socket: Path, number: int, after_s: float) -> None:
    ready, is_ready = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            client = Client(socket, BLOCK_BYTES)
            os.write(is_ready, b"r")
            while True:
                client.write(number, NUM_BLOCKS)
                client.read(number, NUM_BLOCKS)
        finally:
            os._exit(1)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def sidecar_kill_rows(effort: Effort, folder: Path) -> list[Row]:
    """The sidecar is killed again and again while engines answer questions all the time."""
    num_kills, num_engines = effort.of((50, 4), quick=(2, 2))
    with sidecar_process(folder) as sidecar:
        config = {
            "threads": 1,
            "device": {"capacity": "8MiB", "block_size": 16},
            "sidecar": sidecar.url,
            "scheduler": {"load": "always"},
        }
        engines = [EngineProcess(config) for _ in range(num_engines)]
        ending = threading.Event()
        seen: list[list[dict[str, Any]]] = [[] for _ in engines]
        threads = [
            threading.Thread(target=_ask_on, args=(number, engine, seen[number], ending))
            for number, engine in enumerate(engines)
        ]
        for thread in threads:
            thread.start()
        warm = _kill_again_and_again(sidecar, seen, num_kills, effort.of(WARM_UP_S, quick=2.0))
        ending.set()
        for thread in threads:
            thread.join(60)
        failed = num_engines - sum(engine.process.poll() is None for engine in engines)
        for engine in engines:
            engine.kill()
        sidecar.stop()
        left = sidecar.left_in_shared_memory()
    answers = [each for own in seen for each in own]
    worst, wrong = max(each["took_s"] for each in answers), sum(not each["is_right"] for each in answers)
    name = f"sidecar killed {num_kills} times"
    below = sum(each["host"] + each["disk"] for each in answers) / sum(each["num_tokens"] for each in answers)
    return [
        never(f"{name}: engines that failed", failed),
        never(f"{name}: wrong answers", wrong, f"of {len(answers)}"),
        at_most(f"{name}: longest request", worst, "s", LONGEST_S),
        Row(f"{name}: median request", statistics.median(each["took_s"] for each in answers), "s"),
        Row(f"{name}: tokens from below", 100 * below, "%"),
        Row("first hit below after a restart, median", statistics.median(warm), "s"),
        at_most("first hit below after a restart, at most", max(warm), "s", LONGEST_S),
        never("left in shared memory", len(left), "files"),
    ]


def _ask_on(number: int, engine: EngineProcess, seen: list[dict[str, Any]], ending: threading.Event) -> None:
    rng = random.Random(number)
    while not ending.is_set():
        document = rng.choice([*range(2), *(100 * (number + 1) + i for i in range(NUM_DOCUMENTS))])
        answer = engine.ask(document, DOCUMENT_TOKENS, rng.randrange(10))
        seen.append({**answer, "at": time.monotonic()})


def _kill_again_and_again(
    sidecar: SidecarProcess, seen: list[list[dict[str, Any]]], num_kills: int, warm_up_s: float
) -> list[float]:
    """How long after each start of the sidecar an engine had tokens from it."""
    rng, warm = random.Random(1), []
    time.sleep(warm_up_s)
    for _ in range(num_kills):
        time.sleep(rng.uniform(*BETWEEN_S))
        sidecar.kill()
        sidecar.start()
        started_at = time.monotonic()
        while time.monotonic() < started_at + 20:
            hits = [
                each["at"] - started_at
                for own in seen
                for each in own[-5:]
                if each["at"] - each["took_s"] > started_at and each["host"] + each["disk"] > 0
            ]
            if hits:
                warm.append(min(hits))
                break
            time.sleep(0.02)
        else:
            warm.append(20.0)
    return warm
