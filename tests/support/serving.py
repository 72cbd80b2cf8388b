"""Servers for tests: in a thread of the test's process, or in a process of their own; real ones, on free ports."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import openai
from plain_http import NO_TLS
from small_models import byte_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.server.build_server import build_server
from kvtier.server.http_server import HttpServer
from kvtier.server.service import Service
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.routes import Operating

MODEL = "small"
BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
T = TypeVar("T")
DEADLINE_S = 180.0  # for what takes milliseconds, or a process seconds: reached only when a test fails
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tables(num_slots: int = 600, **server: object) -> dict[str, object]:
    """A configuration of so many blocks on the device and in host memory."""
    return {
        "device": {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": num_slots * BLOCK_BYTES},
        "scheduler": {"load": "always", "prefill_chunk": 128, "token_budget": 256},
        "server": server,
    }


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> openai.OpenAI:
        """A client that tries once, and leaves no connection open between its requests."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=DEADLINE_S,
            http_client=httpx.Client(verify=NO_TLS, limits=httpx.Limits(max_keepalive_connections=0)),
        )

    def get(self, path: str, **others: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S, verify=NO_TLS, **others)

    def post(self, path: str, **others: object) -> httpx.Response:
        return httpx.post(self.url + path, timeout=DEADLINE_S, verify=NO_TLS, **others)

    def complete(self, prompt: object, key: str = "none", **others: object) -> dict:
        """The answer to a greedy completion, as an object."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **others}
        answer = self.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @contextmanager
    def streaming(self, prompt: object, key: str = "none", **others: object) -> Iterator[Iterator[dict]]:
        """The events of a greedy completion, read as they come; on leaving the connection is closed."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **others}
        headers = {"Authorization": f"Bearer {key}"}
        with (
            httpx.Client(timeout=DEADLINE_S, verify=NO_TLS) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status_code == 200
            yield events(answer.iter_lines())


@dataclass(frozen=True)
class ServerInThread(Address):
    """A server of this process, whose inside can be looked at."""

    server: HttpServer
    loop: asyncio.AbstractEventLoop

    @property
    def service(self) -> Service:
        """What it serves with, once its model is loaded."""
        return self.server.app.service

    def stop(self) -> None:
        """As a signal does it."""
        self.loop.call_soon_threadsafe(self.server.stop)

    def ask(self, question: Callable[[EngineCore], T]) -> T:
        """What *question* returns in the engine's thread, between two steps."""
        return asyncio.run_coroutine_threadsafe(self.service.llm.ask(question), self.loop).result(DEADLINE_S)

    def is_at_rest(self) -> bool:
        """Nobody runs or waits, and nobody leases a slot."""

        def is_idle(core: EngineCore) -> bool:
            num_slots = core.config.device.capacity // BLOCK_BYTES
            return not core.has_work and core.cache.free_slots() == [num_slots] * len(core.cache.groups)

        return self.ask(is_idle) and self.service.room.num_inside == 0


@dataclass(frozen=True)
class ServerProcess(Address):
    """`kvtier serve`."""

    process: subprocess.Popen
    log: Path

    def lines(self) -> list[dict]:
        """Its log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


@contextmanager
def serving(
    model: PreTrainedModel,
    config: Mapping[str, object],
    keys: Mapping[str, str] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    until: str = "/ready",
    started: Callable[[HttpServer], None] = lambda server: None,
    operating: Operating | None = None,
) -> Iterator[ServerInThread]:
    """A server in a thread, once the path *until* answers 200. *started* is given it before it begins to load."""
    bound = socket.create_server(("127.0.0.1", 0))
    api_keys = None if keys is None else ApiKeys(keys)
    tokenizer = tokenizer or chat_tokenizer()
    server = build_server(model, as_config(config), bound, MODEL, api_keys, tokenizer, operating=operating)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[server.run()])
    address = ServerInThread(bound.getsockname()[1], server, loop)
    started(server)
    thread.start()
    try:
        come_true(lambda: address.get(until).status_code == 200)
        yield address
    finally:
        address.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        loop.close()


@contextmanager
def serving_process(folder: Path, model: Path, config: str, *arguments: object) -> Iterator[ServerProcess]:
    """A server in a process of its own, once it is ready. It logs JSON lines into a file in *folder*."""
    file, log = folder / "kvtier.toml", folder / "server.log"
    file.write_text(config)
    command = [
        sys.executable,
        "-m",
        "kvtier.cli.main",
        "serve",
        "--model",
        model,
        "--config",
        file,
        "--port",
        0,
    ]
    command += ["--model-name", MODEL, "--log-format", "json", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (
        log.open("w") as output,
        subprocess.Popen([str(part) for part in command], env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            address = ServerProcess(_port(log, process), process, log)
            come_true(lambda: address.get("/ready").status_code == 200, pause_s=0.2)  # it needs the processor itself
            yield address
        finally:
            process.kill()


def _port(log: Path, process: subprocess.Popen) -> int:
    come_true(lambda: "listening" in log.read_text() or process.poll() is not None)
    assert process.poll() is None, log.read_text()
    return next(json.loads(line)["port"] for line in log.read_text().splitlines() if "listening" in line)


def come_true(condition: Callable[[], bool], pause_s: float = 0.005) -> None:
    """Wait for it."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(pause_s)


def events(lines: Iterator[str]) -> Iterator[dict]:
    """The objects of a stream of events, which ends as it should."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream did not end with [DONE]")
