"""A sidecar as a process of its own: what the service manager learns, what the log says, how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from waiting import DEADLINE_S, wait_for

from kvtier.cli.main import main
from kvtier.transfer.segment import leftovers

pytestmark = pytest.mark.long

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@dataclass
class Process:
    """The process, its log, and the socket at which the service manager would listen."""

    child: "subprocess.Popen[bytes]"
    log: Path
    manager: socket.socket
    stick: Path

    @property
    def url(self) -> str:
        wait_for(lambda: "http: listening on" in self.log.read_text())
        found = re.search(r"http: listening on (http://\S+)", self.log.read_text())
        assert found is not None
        return found[1]

    def told(self) -> str:
        """The next thing that the service manager is told, but for what it is to keep."""
        while (told := self.manager.recv(100).decode()).startswith("FDSTORE"):
            pass
        return told


@contextmanager
def served(tmp_path: Path, watchdog_s: float = 2.0) -> Iterator[Process]:
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'extent = "1MiB"\n[host]\ncapacity = "4MiB"\n[disk]\npath = "{tmp_path}/store"\ncapacity = "64MiB"\n'
        "[http]\nport = 0\n"
    )
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(DEADLINE_S)
    environment = os.environ | {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
        "PYTHONPATH": str(SUPPORT),
    }
    log, stick = tmp_path / "log", tmp_path / "stick"
    with log.open("wb") as file:
        command = [sys.executable, str(SUPPORT / "served_sidecar.py"), str(config), str(stick)]
        child = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
    try:
        yield Process(child, log, manager, stick)
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        manager.close()
        list(leftovers(Path("/dev/shm")))  # of one that was killed


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("kvtier-*")}


def test_the_service_manager_learns_of_readiness_life_and_end(tmp_path: Path) -> None:
    with served(tmp_path) as process:
        told = [process.told() for _ in range(4)]
        segment = httpx.get(f"{process.url}/v1/kvtier/stats", timeout=DEADLINE_S).json()["segment"]
        process.child.send_signal(signal.SIGTERM)
        while (last := process.told()) == "WATCHDOG=1":
            pass

        assert told == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]
        assert last == "STOPPING=1"
        assert process.child.wait(DEADLINE_S) == 0
        assert segment not in segments()
        assert process.log.read_text().splitlines()[-1].endswith("INFO ended")
        assert "Traceback" not in process.log.read_text()


def test_a_stuck_owner_is_told_to_http_and_no_longer_to_the_watchdog(tmp_path: Path) -> None:
    with served(tmp_path) as process:
        url = process.url
        while process.told() != "WATCHDOG=1":
            pass
        process.stick.touch()
        wait_for(lambda: httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 503)  # for 2 s each

        process.manager.setblocking(False)
        while True:
            try:
                process.told()
            except BlockingIOError:
                break
        assert httpx.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 503
        with pytest.raises(BlockingIOError):
            process.told()


def test_a_store_that_dies_is_in_the_log_and_the_sidecar_goes_on(tmp_path: Path) -> None:
    with served(tmp_path) as process:
        wait_for(
            lambda: httpx.get(f"{process.url}/v1/kvtier/stats", timeout=DEADLINE_S).json()["store"]["not_open"] is None
        )
        children = Path(f"/proc/{process.child.pid}/task/{process.child.pid}/children").read_text().split()
        for child in children:
            if "store" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)

        wait_for(lambda: "disk: the store's process ended" in process.log.read_text())
        assert process.child.poll() is None


def test_the_process_has_no_torch_and_no_transformers() -> None:
    modules = "kvtier.sidecar.process, kvtier.sidecar.http.serve_http"
    program = f"import sys, {modules}; print({{'torch', 'transformers', 'cupy'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"


def test_the_command_prints_what_the_configuration_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["sidecar", "--host", "1GiB", "--disk", "/kv:2GiB", "--check-config"])

    printed = capsys.readouterr().out
    assert status == 0
    assert "host memory  1.0 GiB" in printed
    assert "disk         /kv, at most 2.0 GiB" in printed
    assert "http         http://127.0.0.1:9464" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk", "nowhere"], "'nowhere' is not PATH:SIZE"),
        (["--disk", "/kv:many"], "bad size 'many'"),
        (["--config", "/no/such.toml"], "/no/such.toml: no such file"),
        (["--request-log", "/no/such/log"], "request log: there is no folder /no/such; make it, or give another path"),
        (["--chunk-tokens", "x"], "'x' is not a number; give a multiple of the engine's block size, such as 256"),
        (["--chunk-tokens", "-1"], "'-1' is not a number"),
        (["--chunk-tokens", "8"], "$.lmcache.chunk_tokens"),
        (["--listen", "localhost"], "'localhost' is not an endpoint; give tcp://127.0.0.1:PORT, or ipc:///PATH"),
        (["--listen", "tcp://127.0.0.1"], "is not an endpoint"),
        (["--listen", "tcp://127.0.0.1:65536"], "is not an endpoint"),
        (["--listen", "ipc://endpoint"], "is not an endpoint"),
        (["--listen", "tcp://0.0.0.0:1"], "LMCache's protocol has no authentication"),
        (["--host", "1MiB"], "host.capacity 1048576: use 67108864 (one extent) or more"),
    ],
)
def test_an_option_that_is_nonsense_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["sidecar", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)

    said = capsys.readouterr().err
    *stages, last = said.splitlines()
    assert status == 2
    assert message in last
    assert [stage for stage in stages if not stage.endswith("INFO starting the sidecar")] == []
