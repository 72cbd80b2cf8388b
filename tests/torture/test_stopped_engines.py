"""Engines at both endpoints that are stopped, continued and killed at random, and sidecars that are restarted."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from copying_engine import NUM_COUNTS, OPERATIONS, WRONG
from service_manager import ServiceManager
from waiting import DEADLINE_S, wait_for

from kvtier.transfer.segment import leftovers

PROGRAM = Path(__file__).with_name("copying_engine.py")
# The sidecar ends the session of an engine that reads nothing for a minute. Here its clock runs SPEED times as fast,
# and its messages fill the connection of a stopped engine within a few rounds.
SPEED, BUFFER_BYTES = 40, 1024
HASTY = f"""
import socket, time
real_time, real_accept = time.monotonic, socket.socket.accept
time.monotonic = lambda: {SPEED} * real_time()
def accept(listener):
    connection, address = real_accept(listener)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {BUFFER_BYTES})
    return connection, address
socket.socket.accept = accept
"""
KINDS = ("own", "own", "lmcache")
MAX_ENGINES = 1024
SHORT, LONG = 20, 300  # operations of a round; in a long one the session of a stopped engine ends


class TorturedEngine:
    """An engine's processes. Some of them may be stopped."""

    def __init__(self, kind: str, where: str, seed: int, counts: Path, number: int) -> None:
        self.kind = kind
        self.number = number
        self.is_stopped = False
        arguments = [where, str(seed), str(counts), str(number)]
        self.processes: list[subprocess.Popen[bytes]] = []
        if kind == "lmcache":
            self._start("lmcache", arguments, -1)
            return
        ends = Pipe()
        for role, end in zip(("scheduler", "worker"), ends, strict=True):
            self._start(role, arguments, end.fileno())
        for end in ends:
            end.close()

    @property
    def copier(self) -> subprocess.Popen[bytes]:
        """The process that copies."""
        return self.processes[-1]

    def signal(self, number: signal.Signals, *processes: subprocess.Popen[bytes]) -> None:
        """Send the signal to these processes, by default to all."""
        for process in processes or self.processes:
            process.send_signal(number)

    @property
    def has_ended(self) -> bool:
        """Whether one of its processes has; the other one then ends too."""
        return any(process.poll() is not None for process in self.processes)

    def stop_in_copy(self, num_done: Callable[[], int]) -> None:
        """Stop it in the middle of its next copy, or anywhere if it has no slots to copy to or from.

        *num_done* counts the operations of the engine. They go on without copies while other engines hold all slots.
        """
        start = num_done()
        self.signal(signal.SIGUSR1, self.copier)
        wait_for(lambda: self.has_ended or _is_stopped(self.copier.pid) or num_done() > start + LONG)
        self.signal(signal.SIGUSR2, self.copier)  # it comes too late if the engine is stopped
        self.stop()

    def stop(self) -> None:
        """Stop it, anywhere."""
        self.is_stopped = True
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Wake it up."""
        self.is_stopped = False
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill what is left of it."""
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)

    def _start(self, role: str, arguments: list[str], file: int) -> None:
        command = [sys.executable, str(PROGRAM), role, *arguments, str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        files = () if file < 0 else (file,)
        self.processes.append(subprocess.Popen(command, pass_fds=files, env=environment))


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Torture:
    """A sidecar that a service manager runs, and three engines."""

    def __init__(self, folder: Path, manager: ServiceManager, seed: int) -> None:
        self.rng = random.Random(seed)
        self._folder = folder
        self._manager = manager
        self._counts_path = folder / "counts"
        self._counts_path.write_bytes(bytes(8 * NUM_COUNTS * MAX_ENGINES))
        self._counts = np.memmap(self._counts_path, np.int64, "r").reshape(MAX_ENGINES, NUM_COUNTS)
        self._num_engines = 0
        self._gone: list[TorturedEngine] = []  # killed in part: a worker may go on without its scheduler
        (folder / "sidecar.toml").write_text('extent = "1MiB"\n')
        self.start_sidecar()
        self.engines = [self._engine(kind) for kind in KINDS]
        self.go_forward(self.engines)

    @property
    def num_ended(self) -> int:
        """Sessions that sidecars have ended because nothing was read, as often as they have told of it."""
        return self._manager.log.read_text().count("has read no answers")

    @property
    def num_wrong(self) -> int:
        """Copies with other bytes than they must have."""
        return int(self._counts[:, WRONG].sum())

    def start_sidecar(self) -> None:
        """Start it, with what the one before has left."""
        self._manager.start(
            "sidecar",
            *("--config", str(self._folder / "sidecar.toml"), "--host", "16MiB", "--http-port", "none"),
            *("--listen", f"ipc://{self._folder / 'lmcache.sock'}", "--chunk-tokens", "16"),
            *("--socket", str(self._folder / "own.sock")),
        )

    def restart_sidecar(self, how: signal.Signals) -> None:
        """End it, and start the next one on the same memory."""
        self._manager.end(how)
        self.start_sidecar()

    def round(self) -> None:
        """Do something to one engine, and let those that run go on."""
        number = self.rng.randrange(len(self.engines))
        engine, fate = self.engines[number], self.rng.random()
        if fate < 0.12 or engine.has_ended:
            self._kill(number)
        elif engine.is_stopped:
            engine.go_on()
        elif fate < 0.8 and self._counts[engine.number, OPERATIONS]:  # so it knows what the signal means
            engine.stop_in_copy(lambda: int(self._counts[engine.number, OPERATIONS]))
        else:
            engine.stop()
        while len(stopped := [each for each in self.engines if each.is_stopped]) > 1:
            self.rng.choice(stopped).go_on()
        num_operations = LONG if self.rng.random() < 0.2 else SHORT
        self.go_forward([each for each in self.engines if not each.is_stopped], num_operations)

    def go_forward(self, engines: list[TorturedEngine], num_operations: int = 1) -> None:
        """Wait until these engines have done so much together."""
        start = self._num_done()
        wait_for(lambda: self._num_done() >= start + num_operations)

    def end(self) -> None:
        """Wake all up, and have each do some more."""
        for engine in [*self.engines, *self._gone]:
            engine.go_on()
        self.go_forward(self.engines, 3 * SHORT)

    def close(self) -> None:
        """End all processes."""
        for engine in [*self.engines, *self._gone]:
            engine.close()

    def _kill(self, number: int) -> None:
        """Kill the engine, or its scheduler alone: the worker ends by itself when it is not stopped."""
        engine = self.engines[number]
        if self.rng.random() < 0.5:
            engine.signal(signal.SIGKILL)
        else:
            engine.signal(signal.SIGKILL, engine.processes[0])
        self._gone.append(engine)
        for gone in self._gone:
            if self.rng.random() < 0.3:
                gone.go_on()
        self.engines[number] = self._engine(engine.kind)

    def _engine(self, kind: str) -> TorturedEngine:
        self._num_engines += 1
        where = str(self._folder / "own.sock") if kind == "own" else f"ipc://{self._folder / 'lmcache.sock'}"
        return TorturedEngine(kind, where, self.rng.randrange(1 << 32), self._counts_path, self._num_engines)

    def _num_done(self) -> int:
        return int(self._counts[:, OPERATIONS].sum())


@pytest.fixture
def torture(tmp_path: Path, seed: int) -> Iterator[Torture]:
    with ServiceManager(tmp_path, before=HASTY) as manager:
        torture = Torture(tmp_path, manager, seed)
        yield torture
        torture.close()
    list(leftovers(Path("/dev/shm")))


@pytest.mark.parametrize(
    "num_rounds", [pytest.param(24, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.slow)]
)
def test_no_copy_of_an_engine_that_was_stopped_or_killed_has_wrong_bytes(torture: Torture, num_rounds: int) -> None:
    restarts = {num_rounds // 3: signal.SIGUSR1, 2 * num_rounds // 3: signal.SIGKILL}
    for number in range(num_rounds):
        torture.round()
        if number in restarts:
            torture.restart_sidecar(restarts[number])
        assert torture.num_wrong == 0, f"after {number} rounds"
    torture.end()

    assert torture.num_wrong == 0
    assert torture.num_ended or num_rounds < 200, "no session of a stopped engine was ended: nothing was tortured"
