"""A real Ray of this machine alone, and kvtier's application in it."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from foreign.running import free_port
from serving import DEADLINE_S, MODEL, Address, chat_tokenizer
from small_models import build

REPLICA = "x-kvtier-replica"


@dataclass(frozen=True)
class Cluster:
    """A Ray that runs, and the process that started it; *model* is a small one's folder."""

    port: int
    model: str
    driver: "subprocess.Popen[str]"

    def do(self, verb: str, **told: object) -> Any:
        """What the driver has answered. EOFError with what it said if it has failed."""
        assert self.driver.stdin is not None
        print(json.dumps({"do": verb, **told}), file=self.driver.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """What it answers next."""
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        if not line:
            raise EOFError(Path(self.model).with_name("driver.log").read_text())
        return json.loads(line)

    @contextmanager
    def application(self, name: str, replicas: dict[str, object], **args: object) -> Iterator["Application"]:
        """kvtier's, until the context ends."""
        small = {"ray_actor_options": {"num_cpus": 0}}
        args = {"model": self.model, "replicas": {**small, **replicas}, "fronts": small, **args}
        self.do("deploy", name=name, args=args)
        yield Application(self.port, name, self)
        self.do("delete", name=name)


@dataclass(frozen=True)
class Application(Address):
    """An application that answers."""

    name: str
    cluster: Cluster

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.name}"

    def chat(self, content: str) -> httpx.Response:
        """The answer to a greedy chat."""
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def chosen_by_another(self, prompt: list[int]) -> str:
        """The replica that a request router chooses which knows what it has been told by events, and nothing else."""
        status, headers = self.cluster.do("ask", name=self.name, model=MODEL, prompt=prompt)
        assert status == 200
        return str(headers[REPLICA])

    def known_by_another(self, prompt: list[int]) -> dict[str, dict[str, int]]:
        """What that router knows of a prompt: tokens by replica and tier."""
        return self.cluster.do("known", name=self.name, prompt=prompt)

    def num_running(self) -> int:
        """Replicas that Ray sends requests to."""
        return int(self.cluster.do("num_running", name=self.name))

    def kill(self, replica: str) -> None:
        """End a replica at once."""
        self.cluster.do("kill", name=self.name, replica=replica)


@contextmanager
def running_ray() -> Iterator[Cluster]:
    """Ray and Serve on loopback, without a dashboard, until the context ends."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # Ray's sockets need a short path
    try:
        model = folder / MODEL
        build("llama").save_pretrained(model)
        chat_tokenizer().save_pretrained(model)
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("ray_driver.py")), str(port), str(folder / "ray")]
        with (
            (folder / "driver.log").open("w") as log,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            ) as driver,
        ):
            cluster = Cluster(port, str(model), driver)
            try:
                cluster.answer()
                yield cluster
            finally:
                assert driver.stdin is not None
                driver.stdin.close()
                try:
                    driver.wait(DEADLINE_S)
                finally:
                    driver.kill()
    finally:
        shutil.rmtree(folder)
