"""A sidecar in a process of its own, as a user starts it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST, DISK = "1GiB", "2GiB"
ENDS_WITHIN_S = 60.0


class SidecarProcess:
    """`kvtier sidecar` with its own endpoint in *folder*, killed and started as often as one likes."""

    def __init__(self, folder: Path, host: str = HOST, disk: str | None = DISK) -> None:
        self.socket = folder / "kvtier.sock"
        arguments = ["sidecar", "--socket", str(self.socket), "--listen", f"ipc://{folder / 'lmcache.sock'}"]
        arguments += ["--http-port", "none", "--host", host]
        arguments += [] if disk is None else ["--disk", f"{folder / 'store'}:{disk}"]
        self._pids: set[str] = set()  # of all starts
        self._command = [sys.executable, "-m", "kvtier.cli.main", *arguments]
        self.start()

    @property
    def url(self) -> str:
        """For an engine's configuration."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and return once engines may attach."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._pids.add(str(self._process.pid))
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if "engines may attach" in line:
                return
        raise RuntimeError(f"the sidecar has ended: {''.join(said)}")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(ENDS_WITHIN_S)

    def stop(self) -> None:
        """Have it write what it has, and end."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(ENDS_WITHIN_S)

    def resident_bytes(self) -> int:
        """Memory of its own that it has: not what it shares with engines."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))

    def left_in_shared_memory(self) -> list[Path]:
        """Segments under a name that has the process id of this sidecar, or of one of its earlier starts."""
        return [path for path in Path("/dev/shm").glob("kvtier-*") if path.name.split("-")[-2] in self._pids]


@contextmanager
def sidecar_process(folder: Path, host: str = HOST, disk: str | None = DISK) -> Iterator[SidecarProcess]:
    """A sidecar that is killed at the end."""
    sidecar = SidecarProcess(folder, host, disk)
    try:
        yield sidecar
    finally:
        sidecar.kill()
