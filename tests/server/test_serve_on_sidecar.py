"""`kvtier serve --sidecar`: a server that is killed finds what it had cached, and tells how its sidecar is."""

import signal
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from foreign.running import free_port
from serving import Address, ServerProcess, come_true, serving_process

pytestmark = pytest.mark.long

TOKEN = "op-token-3333"
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


def test_what_operators_reset_at_the_sidecar_is_found_by_no_engine_and_what_they_reset_at_the_engine_is_below(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", TOKEN)
    socket, port = str(tmp_path / "own.sock"), free_port()
    with (
        started_sidecar(tmp_path, socket, http_port=port),
        serving_process(tmp_path, model_folder, CONFIG, "--sidecar", f"unix://{socket}") as server,
    ):
        come_true(lambda: metric(server, "kvtier_sidecar_attached") == 1)
        cold = server.complete(PROMPT, max_tokens=6)
        come_true(lambda: metric(server, 'kvtier_resident_blocks{tier="host"}') >= len(PROMPT) // 16)
        at_engine = operate(server, "reset", all=True)
        from_sidecar = server.complete(PROMPT, max_tokens=6)
        operate(server, "reset", all=True)
        at_sidecar = operate(Address(port), "reset", all=True)
        come_true(lambda: metric(server, 'kvtier_resident_blocks{tier="host"}') == 0)
        explained = server.post("/v1/kvtier/explain", json={"prompt": PROMPT}).json()["data"][0]
        from_nowhere = server.complete(PROMPT, max_tokens=6)
        audited = [line for line in server.lines() if line["logger"] == "kvtier.audit"]

    assert at_engine["tiers"]["device"]["blocks"] >= len(PROMPT) // 16
    assert "send the request there" in at_engine["note"]
    assert from_sidecar["kvtier"]["tokens"]["host"] == (len(PROMPT) - 1) // 16 * 16
    assert at_sidecar["tiers"]["host"]["blocks"] >= len(PROMPT) // 16
    assert from_nowhere["kvtier"]["tokens"]["recomputed"] == len(PROMPT)
    assert {row["evicted"]["cause"] for row in explained["rows"] if row["evicted"]} == {"cleared"}
    assert explained["rows"][0]["evicted"] is not None
    assert {each["choices"][0]["text"] for each in (cold, from_sidecar, from_nowhere)} == {cold["choices"][0]["text"]}
    assert [(line["who"], line["verb"]) for line in audited] == [("operator", "reset"), ("operator", "reset")]


def operate(server: Address, verb: str, **asked: object) -> dict:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = server.post(f"/v1/kvtier/operate/{verb}", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()
