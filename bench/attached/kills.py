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
from bench.report import Row

NUM_ENGINE_KILLS = 100
NUM_SIDECAR_KILLS = 50
NUM_ENGINES = 4
BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
DOCUMENT_TOKENS = 600
NUM_DOCUMENTS = 6  # of each engine, and two that all have
LONGEST_S = 2.0
BETWEEN_S = (0.5, 2.5)  # kills of the sidecar


def engine_kill_rows(folder: Path) -> list[Row]:
    """A client is killed 100 times while it writes and reads; another one is served meanwhile, and checks all."""
    with sidecar_process(folder, host="256MiB", disk=None) as sidecar:
        witness = Client(sidecar.socket, BLOCK_BYTES)
        num_slots = witness.memory.blocks.shape[0]
        rng, took, num_wrong = random.Random(1), list[float](), 0
        for number in range(NUM_ENGINE_KILLS):
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
        for number in range(NUM_ENGINE_KILLS):
            witness.read(number, NUM_BLOCKS)  # checks every block that is there
        witness.close()
    worst = max(took)
    return [
        Row("engine killed 100 times: slots back after, at most", worst, "s", "<= 1", worst <= 1),
        Row("engine killed 100 times: another one's blocks missing", num_wrong, "", "0", not num_wrong),
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


def sidecar_kill_rows(folder: Path) -> list[Row]:
    """The sidecar is killed 50 times while four engines answer questions all the time."""
    with sidecar_process(folder) as sidecar:
        config = {
            "threads": 1,
            "device": {"capacity": "8MiB", "block_size": 16},
            "sidecar": sidecar.url,
            "scheduler": {"load": "always"},
        }
        engines = [EngineProcess(config) for _ in range(NUM_ENGINES)]
        ending = threading.Event()
        seen: list[list[dict[str, Any]]] = [[] for _ in engines]
        threads = [
            threading.Thread(target=_ask_on, args=(number, engine, seen[number], ending))
            for number, engine in enumerate(engines)
        ]
        for thread in threads:
            thread.start()
        warm = _kill_again_and_again(sidecar, seen, ending)
        ending.set()
        for thread in threads:
            thread.join(60)
        failed = NUM_ENGINES - sum(engine.process.poll() is None for engine in engines)
        for engine in engines:
            engine.kill()
        sidecar.stop()
        left = SidecarProcess.left_in_shared_memory()
    answers = [each for own in seen for each in own]
    worst, wrong = max(each["took_s"] for each in answers), sum(not each["is_right"] for each in answers)
    below = sum(each["host"] + each["disk"] for each in answers) / sum(each["num_tokens"] for each in answers)
    return [
        Row("sidecar killed 50 times: engines that failed", failed, "", "0", not failed),
        Row("sidecar killed 50 times: wrong answers", wrong, f"of {len(answers)}", "0", not wrong),
        Row("sidecar killed 50 times: longest request", worst, "s", "<= 2", worst <= LONGEST_S),
        Row("sidecar killed 50 times: median request", statistics.median(each["took_s"] for each in answers), "s"),
        Row("sidecar killed 50 times: tokens from below", 100 * below, "%"),
        Row("first hit below after a restart, median", statistics.median(warm), "s"),
        Row("first hit below after a restart, at most", max(warm), "s", "<= 2", max(warm) <= LONGEST_S),
        Row("left in shared memory", len(left), "files", "0", not left),
    ]


def _ask_on(number: int, engine: EngineProcess, seen: list[dict[str, Any]], ending: threading.Event) -> None:
    rng = random.Random(number)
    while not ending.is_set():
        document = rng.choice([*range(2), *(100 * (number + 1) + i for i in range(NUM_DOCUMENTS))])
        answer = engine.ask(document, DOCUMENT_TOKENS, rng.randrange(10))
        seen.append({**answer, "at": time.monotonic()})


def _kill_again_and_again(
    sidecar: SidecarProcess, seen: list[list[dict[str, Any]]], ending: threading.Event
) -> list[float]:
    """How long after each start of the sidecar an engine had tokens from it."""
    rng, warm = random.Random(1), []
    time.sleep(10)
    for _ in range(NUM_SIDECAR_KILLS):
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
