"""`kvtier serve --sidecar`: a server that is killed finds what it had cached, and tells how its sidecar is."""

import signal
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from serving import ServerProcess, come_true, serving_process

pytestmark = pytest.mark.long

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
CONFIG = """
[device]
capacity = "8MiB"
block_size = 16

[scheduler]
load = "always"
"""


def metric(server: ServerProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def test_a_server_that_is_killed_finds_what_it_had_cached_and_serves_on_without_its_sidecar(
    tmp_path: Path, model_folder: Path
) -> None:
    socket = str(tmp_path / "own.sock")
    arguments = ["--sidecar", f"unix://{socket}"]
    with started_sidecar(tmp_path, socket) as sidecar:
        with serving_process(tmp_path, model_folder, CONFIG, *arguments) as server:
            cold = server.complete(PROMPT, max_tokens=6)
            come_true(lambda: metric(server, 'kvtier_resident_blocks{tier="host"}') >= len(PROMPT) // 16)
            server.signal(signal.SIGKILL)
            server.wait()

        with serving_process(tmp_path, model_folder, CONFIG, *arguments) as server:
            warm = server.complete(PROMPT, max_tokens=6)
            attached = metric(server, "kvtier_sidecar_attached")
            sidecar.kill()
            without = server.complete(PROMPT[::-1], max_tokens=6)
            come_true(lambda: metric(server, "kvtier_sidecar_attached") == 0)
            health = server.get("/health").status_code, server.get("/ready").status_code
            sidecar.start()
            come_true(lambda: metric(server, "kvtier_sidecar_attached") == 1)
            num_attached = metric(server, "kvtier_sidecar_attachments_total")
            told = [line["message"] for line in server.lines() if "sidecar" in line["message"]]
            server.signal()
            assert server.wait() == 0

    assert cold["kvtier"]["tokens"]["recomputed"] == len(PROMPT)
    assert warm["kvtier"]["tokens"]["host"] == (len(PROMPT) - 1) // 16 * 16
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert without["usage"]["completion_tokens"] == 6
    assert (attached, num_attached) == (1, 2)
    assert health == (200, 200)
    assert any("has gone or does not answer" in line for line in told)
