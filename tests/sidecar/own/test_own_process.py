"""The own endpoint as people see it: HTTP, metrics, `kvtier top`, and what the command prints and refuses."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from engine_bed import hello
from plain_http import NO_TLS
from sidecars import small_config
from waiting import DEADLINE_S, join, wait_for

from kvtier.cli.main import main
from kvtier.engine.attached import wire
from kvtier.sidecar.build_sidecar import build_sidecar
from kvtier.sidecar.config import sidecar_config
from kvtier.sidecar.endpoints import endpoints_of
from kvtier.sidecar.http.serve_http import serve_http


@dataclass
class Attached:
    """A sidecar that another thread runs, at which an engine has reserved three slots."""

    url: str
    path: str
    connection: socket.socket

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S, verify=NO_TLS)


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Attached]:
    path = str(tmp_path / "engines.sock")
    config = small_config(socket={"path": path}, lmcache={"listen": f"ipc://{tmp_path}/lmcache.sock"})
    sidecar = build_sidecar(config, endpoints_of(config, {}))
    thread = threading.Thread(target=sidecar.run)
    thread.start()
    try:
        with serve_http(sidecar, config, DEADLINE_S) as http, socket.socket(socket.AF_UNIX) as connection:
            wait_for(lambda: not sidecar.ask(lambda: sidecar.why_not_ready).result(DEADLINE_S))
            connection.settimeout(DEADLINE_S)
            connection.connect(path)
            connection.sendall(wire.frame_of(hello(model="a-model")) + wire.frame_of(wire.Reserve(0, 3)))
            read_until(connection, wire.Reserved)
            yield Attached(f"http://127.0.0.1:{http.port}", path, connection)
    finally:
        sidecar.stop()
        join(thread)
        sidecar.close()


def read_until(connection: socket.socket, kind: type) -> None:
    frames = wire.Frames()
    while data := connection.recv(1 << 16):
        if any(isinstance(wire.message_of_sidecar(payload), kind) for payload in frames.receive(data)):
            return
    raise AssertionError("the connection has ended")


def test_http_tells_of_engines_and_what_they_lease(attached: Attached) -> None:
    (client,) = attached.get("/v1/kvtier/clients").json()["clients"]
    (lease,) = attached.get("/v1/kvtier/leases").json()["leases"]
    (layout,) = attached.get("/v1/kvtier/stats").json()["layouts"]

    assert client["layout"]["model"] == "a-model"
    group = {"block_size": 16, "forgets": True, "block_bytes": 3000, "keeps_states": False}
    assert client["layout"]["groups"][1] == group
    assert client["leased_chunks"] == 3
    assert (lease["use"], lease["group"], lease["num_chunks"]) == ("written", 0, 3)
    assert (layout["chunk_bytes"], layout["leased_chunks"]) == (7096, 3)
    assert layout["weights"].startswith("namespace ")


def test_metrics_count_what_engines_do(attached: Attached) -> None:
    lines = attached.get("/metrics").text.splitlines()

    assert 'kvtier_sidecar_operations_total{endpoint="engine",operation="reserve"} 1.0' in lines
    assert "kvtier_sidecar_clients 1.0" in lines
    assert "kvtier_sidecar_leased_chunks 3.0" in lines
    assert "kvtier_sidecar_unknown_weights_layouts 0.0" in lines


def test_top_shows_engines(attached: Attached, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["top", attached.url, "--once"])

    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.split()}
    assert status == 0
    assert rows["a-model"].split()[1] == "namespace"
    assert "connection" in rows["process"]
    assert rows["written"].split()[-4:-2] == ["0", "3"]


def test_a_second_sidecar_at_the_same_socket_says_what_to_do(
    attached: Attached, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--host", "64MiB", "--http-port", "none", "--listen", f"ipc://{tmp_path}/another", "--socket"]

    status = main(["sidecar", *options, attached.path])

    said = capsys.readouterr().err
    assert status == 2
    assert f"cannot listen at {attached.path} (another sidecar listens there); choose another --socket" in said


def test_the_command_prints_how_to_attach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "--socket", "/run/a/b.sock", "--check-config"]) == 0

    assert "  kvtier serve --sidecar unix:///run/a/b.sock\n" in capsys.readouterr().out


def test_without_a_socket_it_says_nothing_of_attaching(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar", "--socket", "none", "--check-config"]) == 0

    assert "unix://" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"path = '/{'a' * 120}'", "a Unix socket's path has at most 107 bytes"),
        ("path = ''", r"\$.socket.path"),
        ("allow_uids = [-1]", r"\$.socket.allow_uids"),
        ("allow_uid = [1]", r"\$.socket.allow_uid: unknown key; did you mean allow_uids"),
    ],
)
def test_a_setting_that_cannot_be_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(f"[socket]\n{text}\n")

    with pytest.raises(ValueError, match=message):
        sidecar_config(file, {})
