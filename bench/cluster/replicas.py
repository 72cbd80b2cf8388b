"""Servers of one model that share a store and nothing else, and what clients see of them."""

import random
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anthropic

from bench.server.cache_control import NUM_TOKENS, Seen, ask, save_model
from bench.server.serving_bed import BLOCK_SIZE, kvtier_server
from kvtier.cli.demo.document import Document, make_document

WAIT_S = 60.0
LOOK_S = 0.05


@dataclass(frozen=True)
class Replica:
    """One server, as a client sees it."""

    url: str
    log: Path

    def ask(self, document: Document, number: int) -> Seen:
        """Ask for the document's fact of that number; raises what the client raises."""
        client = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S)
        return ask(client, document, number)

    def metric(self, name: str) -> float:
        """A number of its `/metrics`, of all labels together."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{re.escape(name)}(_total)?[ {{]", line)
        )

    def wait_put(self) -> None:
        """Until all that is to go to the store has gone there."""
        give_up_at = time.monotonic() + WAIT_S
        while self.metric("kvtier_remote_wanted_blocks"):
            if time.monotonic() > give_up_at:
                raise TimeoutError("blocks are still to be put")
            time.sleep(LOOK_S)


class Replicas:
    """Starts servers of the bundled model, which looks facts up, so that a wrong block shows as a wrong answer."""

    def __init__(
        self,
        folder: Path,
        device_documents: float,
        host_documents: float,
        document_tokens: int = NUM_TOKENS,
        load: str = "split",
    ) -> None:
        """Each has room for so many documents on its device and in its host memory, and no disk. *load*: see
        `SchedulerConfig`."""
        self._folder = folder
        token_bytes = save_model(folder / "model")
        self.block_bytes = BLOCK_SIZE * token_bytes
        self._tables: Mapping[str, Mapping[str, object]] = {
            "device": {"capacity": int(device_documents * document_tokens * token_bytes), "block_size": BLOCK_SIZE},
            "host": {"capacity": int(host_documents * document_tokens * token_bytes)},
            "scheduler": {"load": load},
        }

    @contextmanager
    def started(self, remote: str | None = None, **others: object) -> Iterator[Replica]:
        """A server with that remote tier, for the time of a block."""
        tables = self._tables if remote is None else {**self._tables, "remote": {"url": remote, **others}}
        with kvtier_server(self._folder / "model", self._folder, tables) as url:
            yield Replica(url, self._folder / f"server-{url.rpartition(':')[2]}.log")


def documents(num: int, num_tokens: int = NUM_TOKENS) -> list[Document]:
    """So many documents of that length, about."""
    return [make_document(number, num_tokens) for number in range(num)]


def asked(replica: Replica, asked_about: Sequence[Document], number: int, seed: int) -> list[Seen]:
    """One question about each document, in some order."""
    order = random.Random(seed).sample(list(asked_about), len(asked_about))
    return [replica.ask(document, number) for document in order]


def median_ttft(seen: Sequence[Seen]) -> float:
    return statistics.median(each.ttft_s for each in seen)
