"""Processes that tests and benchmarks of foreign engines start: the sidecar, and the real vLLM."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENDS_WITHIN_S = 60.0
PAGE_BYTES = 4096
SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # it can be told to forget
}
SERVER_OPTIONS = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "10240", "--max-num-seqs", "4", "--seed", "0"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"),
]
ANSWERS_WITHIN_S = 240.0  # an engine that has not answered for so long has failed


def flip_disk(store: Path) -> None:
    """Damage the highest byte of a number in each 4 KiB on disk. Nothing has the store open."""
    for slab in store.glob("slab-*"):
        with open(slab, "r+b") as file:
            for offset in range(2051, slab.stat().st_size, PAGE_BYTES):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 64]))


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
        script = f"{before}\nfrom kvtier.cli.main import main\nraise SystemExit(main({arguments!r}))"
        self._command = [sys.executable, "-c", script]
        self.start()

    @property
    def segment(self) -> Path:
        """The file of its shared memory."""
        (path,) = Path("/dev/shm").glob(f"kvtier-*-{self.process.pid}-*")
        return path

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

    def zero_host_memory(self) -> None:
        """Make every byte of the segment 0 that has been written to, but for the ledger behind the extents."""
        self._change_pages(lambda page: bytes(len(page)))

    def flip_host_memory(self) -> None:
        """Damage the highest byte of a number in each 4 KiB of the segment that has been written to."""
        self._change_pages(lambda page: page[:2051] + bytes([page[2051] ^ 64]) + page[2052:])

    def _change_pages(self, changed: Callable[[bytes], bytes]) -> None:
        with open(self.segment, "r+b") as file:
            for offset in range(0, self.segment.stat().st_size, PAGE_BYTES):
                file.seek(offset)
                page = file.read(PAGE_BYTES)
                if len(page) == PAGE_BYTES and any(page):  # the ledger behind the extents has no whole page
                    file.seek(offset)
                    file.write(changed(page))

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

    def __init__(
        self,
        python: str,
        model: Path,
        transfer: dict[str, Any],
        before: str = "",
        path: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        """*before*: Python that the process runs first, to have a fault; *path*: where it and its children look for
        modules first. `EngineEnded` if vLLM does not start."""
        arguments = [json.dumps(transfer), json.dumps(options), before]
        self.process = subprocess.Popen(
            [python, HERE / "vllm_engine.py", model, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            text=True,
            bufsize=1,
            env={**_own_threads(), "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},  # for what is ours
        )
        self.attached = self._answer()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 8,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Any:
        """See `Engine.generate` of vllm_engine.py."""
        asked = {"prompts": list(prompts), "num_tokens": num_tokens, "salt": salt, "adapter": adapter}
        return self._ask({"do": "generate", **asked})

    def beside(self, decoding: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See `Engine.beside` of vllm_engine.py."""
        return self._ask({"do": "beside", "decoding": list(decoding), "prompts": list(prompts)})

    def counts(self, prefix: str = "kvtier_vllm_") -> dict[str, int]:
        """What our connector has counted in vLLM's metrics, or with another *prefix* our tier, less what is 0."""
        return dict(self._ask({"do": "counts", "prefix": prefix}))

    def wait_attached(self, num_attached: int) -> None:
        """Return once our connector has attached to a sidecar that often."""
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        while self._ask({"do": "standing"})["num_attached"] < num_attached:
            assert time.monotonic() < give_up_at, "it does not attach"
            time.sleep(0.05)

    def reset(self) -> None:
        """Forget the engine's own prefix cache."""
        assert self._ask({"do": "reset"})["reset"], "vLLM did not forget its prefix cache"

    def step(self) -> None:
        """Have a request without a prefix computed, with whose steps vLLM tells its metrics."""
        self.generate([[3, 4, 5]], 1)

    def settle(self) -> None:
        """Return once vLLM's offloading has nothing under way."""
        assert self._ask({"do": "settle"})["settled"], "vLLM's offloading has not ended what it began"

    def forget(self) -> None:
        """Forget the engine's own prefix cache, and the host memory of vLLM's offloading, once nothing is under way."""
        self.settle()
        assert self._ask({"do": "forget"})["reset"], "vLLM did not forget its prefix cache and its host memory"

    def reset_all(self) -> None:
        """Have vLLM reset its prefix cache and its connector."""
        assert self._ask({"do": "reset_all"})["reset"], "vLLM did not reset its connector"

    def reload(self, model: Path) -> None:
        """Load other weights into the model that runs."""
        assert self._ask({"do": "reload", "path": str(model)})["reloaded"] == str(model)

    def offloading(self) -> dict[str, float]:
        """What vLLM's offloading has counted (`tiering_write_bytes KVTier`), less what is 0."""
        return dict(self._ask({"do": "offloading"}))

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
    """vLLM's own HTTP server, as `vllm serve` starts it: its scheduler and its workers are processes of their own."""

    def __init__(self, python: str, model: Path, transfer: dict[str, Any], *options: str) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["--model", str(model), "--port", str(port), "--kv-transfer-config", json.dumps(transfer), *options]
        self.process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *arguments, *SERVER_OPTIONS],
            stdout=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            stderr=subprocess.DEVNULL if "KVTIER_SHOW_ENGINES" not in os.environ else None,
            env={**_own_threads(), **SERVER_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self._wait_ready()

    def complete(self, prompt: Sequence[int], num_tokens: int = 8) -> Any:
        """The greedy completion as the server answers it, its tokens' numbers with it."""
        asked = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "return_token_ids": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
            return json.load(answer)

    def reset(self, query: str = "") -> None:
        """Forget the engine's own prefix cache; *query*: of the URL."""
        request = urllib.request.Request(f"{self._url}/reset_prefix_cache{query}", b"")
        urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S).close()

    def metrics(self) -> str:
        """What it tells Prometheus."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=ANSWERS_WITHIN_S) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        """End it as a service manager does."""
        self.process.terminate()
        self.process.wait(ENDS_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ENDS_WITHIN_S)

    def _wait_ready(self) -> None:
        give_up_at = time.monotonic() + ANSWERS_WITHIN_S
        while time.monotonic() < give_up_at:
            if self.process.poll() is not None:
                raise EngineEnded(f"vLLM's server has ended with status {self.process.returncode}")
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise EngineEnded("vLLM's server does not answer")


def _own_threads() -> dict[str, str]:
    """The environment of this process, less what its tests say of threads: vLLM has as many as for its users."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


class NamedVllmServer:
    """vLLM's own HTTP server, that names its model by its folder's last part alone."""

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
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=ANSWERS_WITHIN_S):
                return
            time.sleep(0.2)
        raise TimeoutError("vLLM does not listen")

    def reset(self) -> None:
        """Forget the engine's own prefix cache."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"")
        urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S).read()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
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


def make_model(python: str, folder: Path, kind: str = "llama", seed: int = 0) -> Path:
    """A tiny model that vLLM loads, made by the foreign environment's *python*; *kind*: see vllm_model.py; another
    *seed* gives other weights."""
    made = folder / kind
    subprocess.run([python, HERE / "vllm_model.py", made, kind, str(seed)], check=True, capture_output=True)
    return made


def make_adapter(python: str, folder: Path, seed: int) -> None:
    """A LoRA adapter of the tiny Llama, whose weights are another one's for another *seed*."""
    subprocess.run([python, HERE / "vllm_adapter.py", folder, str(seed)], check=True, capture_output=True)


def connector_config(socket: str, policy: str = "fail", **extra: object) -> dict[str, Any]:
    """What attaches vLLM by our own connector, as a value; *extra*: of its settings."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"sidecar": socket, **extra},
    }


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
