"""Processes that tests and benchmarks of foreign engines start: the sidecar, and the real vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
ENDS_WITHIN_S = 60.0
ANSWERS_WITHIN_S = 240.0  # an engine that has not answered for so long has failed


class EngineEnded(RuntimeError):
    """The engine has ended in the middle of what it was asked for. *where*: the innermost functions, the last first;
    empty if it did not say."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(why)
        self.where = where


class Sidecar:
    """`kvtier sidecar` as a user starts it, and starts it again."""

    def __init__(self, endpoint: str, *options: str, before: str = "", http_port: int | None = None) -> None:
        """*before*: Python that the process runs first, to have a fault. Without *http_port* there is no HTTP."""
        self.endpoint = endpoint
        port = "none" if http_port is None else str(http_port)
        arguments = ["sidecar", "--listen", endpoint, "--socket", "none", "--http-port", port, *options]
        script = f"{before}\nfrom kvtier.engine.commands.cli import main\nraise SystemExit(main({arguments!r}))"
        self._command = [sys.executable, "-c", script]
        self.start()

    @property
    def segment(self) -> Path:
        """The file of its shared memory."""
        (path,) = Path("/dev/shm").glob(f"kvtier-*-{self.process.pid}-*")
        return path

    def flip_memory(self) -> None:
        """Damage the highest byte of a number in each 4 KiB of the segment that has been written to."""
        with open(self.segment, "r+b") as file:
            for offset in range(0, self.segment.stat().st_size, 4096):
                file.seek(offset)
                page = file.read(4096)
                if len(page) == 4096 and any(page):  # the ledger behind the extents has no whole page
                    file.seek(offset + 2051)
                    file.write(bytes([page[2051] ^ 64]))

    def start(self) -> None:
        """Start it, and return once engines may attach."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if "engines may attach" in line:
                return
        raise RuntimeError(f"the sidecar has ended: {''.join(self.said)}")

    def kill(self) -> None:
        """End it at once, also while it is paused."""
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)

    def stop(self) -> int:
        """Have it write what it has, and end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(ENDS_WITHIN_S)

    def pause(self) -> None:
        """Stop it, as a debugger or a full machine would."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


class Vllm:
    """The real vLLM in a process of the foreign environment's *python*."""

    def __init__(self, python: str, model: Path, transfer: dict[str, Any], **options: Any) -> None:
        arguments = [json.dumps(transfer), json.dumps(options)]
        self.process = subprocess.Popen(
            [python, HERE / "vllm_engine.py", model, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            text=True,
            bufsize=1,
        )
        self.attached = self._answer()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str | None = None) -> Any:
        """See `Engine.generate` of vllm_engine.py."""
        return self._ask({"do": "generate", "prompts": list(prompts), "num_tokens": num_tokens, "salt": salt})

    def reset(self) -> None:
        """Forget the engine's own prefix cache."""
        assert self._ask({"do": "reset"})["reset"], "vLLM did not forget its prefix cache"

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        is_late = threading.Timer(ANSWERS_WITHIN_S, self.process.kill)
        is_late.start()
        line = self.process.stdout.readline()
        is_late.cancel()
        if not line:
            raise EngineEnded(f"vLLM has ended with status {self.process.wait(ENDS_WITHIN_S)}")
        answer = json.loads(line)
        if "ended" in answer:
            self.process.wait(ENDS_WITHIN_S)
            raise EngineEnded(answer["ended"], answer["where"])
        return answer


class VllmServer:
    """The real vLLM's OpenAI-compatible server, in the foreign environment."""

    def __init__(self, python: str, folder: Path, transfer: dict[str, Any], *options: str) -> None:
        """*folder* is the model's, and its name that of the model: two in different places have one name. The server
        listens once `wait_ready` has returned."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["--model", folder.name, "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        arguments += ["--max-model-len", "4096", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)]
        arguments += ["--enable-prompt-tokens-details", "--disable-hybrid-kv-cache-manager"]
        arguments += ["--kv-transfer-config", json.dumps(transfer), *options]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # it has /reset_prefix_cache then
        }
        self.process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            cwd=folder.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            env=os.environ | environment,
            start_new_session=True,  # its engine is a process of its own, and ends with it
        )

    def wait_ready(self) -> None:
        """Return once it listens."""
        give_up_at = time.monotonic() + ANSWERS_WITHIN_S
        while time.monotonic() < give_up_at:
            if self.process.poll() is not None:
                raise EngineEnded(f"vLLM has ended with status {self.process.returncode}")
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=ANSWERS_WITHIN_S):
                return
            time.sleep(0.2)
        raise TimeoutError("vLLM does not listen")

    def reset(self) -> None:
        """Forget the engine's own prefix cache."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"")
        urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S).read()

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ENDS_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


class LmcacheClients:
    """LMCache's own clients, each a process of its own that can be killed; see lmcache_clients.py."""

    def __init__(self, python: str, url: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, HERE / "lmcache_clients.py", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            text=True,
            env=environment,
        )

    def start(self, number: int) -> None:
        """Start a client, and return once it has registered."""
        self._say("start", number)
        self.answer(number)

    def tell(self, number: int, function: str, *arguments: object) -> None:
        """Have the client begin with something; `answer` has what it gives."""
        self._say("tell", number, function, *arguments)

    def answer(self, number: int) -> Any:
        """What the client's last function has given."""
        return self._say("answer", number)

    def ask(self, number: int, function: str, *arguments: object) -> Any:
        """`tell` and `answer`."""
        self.tell(number, function, *arguments)
        return self.answer(number)

    def kill(self, number: int) -> None:
        """End the client at once, with SIGKILL."""
        self._say("kill", number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # upon which it kills its clients
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _say(self, *words: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the clients have ended in {words}")


def free_endpoint() -> str:
    """A TCP endpoint of this machine that no process listens at."""
    return f"tcp://127.0.0.1:{free_port()}"


def free_port() -> int:
    """A port of this machine that no process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def make_model(python: str, folder: Path, seed: int = 0) -> Path:
    """A tiny Llama that vLLM loads, made by the foreign environment's *python*; another *seed* gives other weights."""
    subprocess.run([python, HERE / "vllm_model.py", folder / "llama", str(seed)], check=True, capture_output=True)
    return folder / "llama"


def transfer_config(endpoint: str, policy: str = "recompute") -> dict[str, Any]:
    """What `kvtier sidecar` prints for vLLM, as a value."""
    host, _, port = endpoint.rpartition(":")
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "lmcache.mp.host": host,
            "lmcache.mp.port": int(port),
            "lmcache.mp.mp_transfer_mode": "engine_driven",
            "lmcache.mp.mq_timeout": 5,
            "lmcache.mp.heartbeat_interval": 2,
        },
    }
