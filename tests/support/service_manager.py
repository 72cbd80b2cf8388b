"""What systemd does for a service, for tests: it listens, starts the process with descriptors, and keeps others."""

import os
import signal
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

from waiting import DEADLINE_S, wait_for

_LAUNCHER = """
import os, sys
number, command = int(sys.argv[1]), sys.argv[2 + int(sys.argv[1]):]
files = [os.dup(int(text)) for text in sys.argv[2:2 + number]]
high = [os.dup2(file, 200 + place) for place, file in enumerate(files)]
for place, file in enumerate(high):
    os.dup2(file, 3 + place)
os.closerange(3 + number, 256)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(command[0], command)
"""


class ServiceManager:
    """Runs one service, as `Type=notify` with `FileDescriptorStoreMax=` and, given *sockets*, a socket unit."""

    def __init__(self, folder: Path, *, before: str = "", **sockets: socket.socket) -> None:
        """*before*: what the service's process does first, in Python."""
        self._before = before
        self._sockets = sockets
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.setblocking(False)
        self._folder = folder
        self.log = folder / "log"
        self.stored: list[tuple[str, int]] = []
        self.told: list[str] = []
        self.child: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []

    def start(self, *arguments: str) -> None:
        """Start `kvtier` with these arguments, and return once it is ready."""
        passed = [*((name, each.fileno()) for name, each in self._sockets.items()), *self.stored]
        environment = os.environ | {"NOTIFY_SOCKET": str(self._folder / "notify")}
        if passed:
            environment |= {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join(name for name, _ in passed)}
        program = f"{self._before}\nfrom kvtier.cli.main import main; raise SystemExit(main({list(arguments)!r}))"
        files = [str(file) for _, file in passed]
        command = [sys.executable, "-c", _LAUNCHER, str(len(files)), *files, sys.executable, "-c", program]
        self.told.clear()
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, env=environment, pass_fds=[int(file) for file in files]
            )
        self._pids.append(self.child.pid)
        wait_for(lambda: self._looks() or (self.child is not None and self.child.poll() is not None))
        assert "READY=1" in self.told, self.log.read_text()

    def end(self, number: signal.Signals) -> int:
        """Send the signal and wait for the end; the exit status."""
        assert self.child is not None
        self.child.send_signal(number)
        status = self.child.wait(DEADLINE_S)
        self._looks()
        return status

    def stop(self) -> int:
        """As `systemctl stop` does: what is kept goes with the service."""
        status = self.end(signal.SIGTERM)
        self._drop({name for name, _ in self.stored})
        return status

    def segments(self) -> list[Path]:
        """Shared memory that processes of this service have made, and that is still there."""
        return [path for pid in self._pids for path in Path("/dev/shm").glob(f"kvtier-*-{pid}-*")]

    def names(self) -> list[str]:
        """What is kept now."""
        self._looks()
        return [name for name, _ in self.stored]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait(DEADLINE_S)
        self._looks()
        self._drop({name for name, _ in self.stored})
        self._notify.close()

    def _looks(self) -> bool:
        """Take in what the service has told; whether it is ready."""
        while True:
            try:
                data, passed, _, _ = self._notify.recvmsg(4096, socket.CMSG_SPACE(4 * 4))
            except BlockingIOError:
                return "READY=1" in self.told
            files = array("i")
            for level, kind, content in passed:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    files.frombytes(content)
            self.told.append(data.decode())
            told = dict(line.split("=", 1) for line in data.decode().splitlines())
            if told.get("FDSTORE") == "1":
                self.stored += [(told["FDNAME"], file) for file in files]
            elif told.get("FDSTOREREMOVE") == "1":
                self._drop({told["FDNAME"]})

    def _drop(self, names: set[str]) -> None:
        for name, file in self.stored:
            if name in names:
                os.close(file)
        self.stored = [(name, file) for name, file in self.stored if name not in names]
