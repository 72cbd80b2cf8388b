"""Sidecars for tests: real ones, small, on a thread of the test's process, with an endpoint for the test."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
from layout_bed import content, layout
from plain_http import NO_TLS
from waiting import DEADLINE_S, join, wait_for

from kvtier.sidecar.build_sidecar import build_sidecar
from kvtier.sidecar.config import SidecarConfig, sidecar_config
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.sidecar.http.serve_http import serve_http
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.sidecar import Sidecar
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.named_blocks import number_of, tenant_of
from kvtier.web.operating.routes import Operating

T = TypeVar("T")
TOKEN = "a-token-of-operators"
# Made once, as it reads the certificates of all authorities. A client for each request: one that several threads share
# and that keeps no connections closes some that are another thread's by then (httpcore 1.0).


class OpenEndpoint:
    """A `Endpoint` at which no frame ever comes; tests say who is attached."""

    is_waiting = False

    def __init__(self) -> None:
        self.file = os.eventfd(0, os.EFD_CLOEXEC)
        self.attached: list[AttachedClient] = []
        self.counted = ConnectorCounts("open")
        self.cleared: list[Layout] = []
        self.damage = ""

    def receive(self) -> bool:
        return False

    def tick(self) -> None:
        """There is nothing to answer."""

    def on_clear(self, layouts: Sequence[Layout]) -> None:
        self.cleared += layouts

    def clients(self) -> Sequence[AttachedClient]:
        return list(self.attached)

    def counts(self) -> ConnectorCounts:
        return self.counted

    def check(self) -> None:
        assert not self.damage, self.damage

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def small_config(store: Path | None = None, **tables: object) -> SidecarConfig:
    """Four extents of a MiB, and HTTP on a free port."""
    given: dict[str, object] = {"host": {"capacity": 4 << 20}, "extent": 1 << 20, "http": {"port": 0}, **tables}
    if store is not None:
        given["disk"] = {"path": str(store), "capacity": "64MiB"}
    return sidecar_config(None, given)


@dataclass
class RunningSidecar:
    """A sidecar that another thread runs, with HTTP beside it."""

    sidecar: Sidecar
    endpoint: OpenEndpoint
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **others: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S, verify=NO_TLS, **others)

    def post(self, path: str, **others: object) -> httpx.Response:
        return httpx.post(self.url + path, timeout=DEADLINE_S, verify=NO_TLS, **others)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(self.url + path, timeout=DEADLINE_S, verify=NO_TLS)

    def ask(self, question: Callable[[], T]) -> T:
        return self.sidecar.ask(question).result(DEADLINE_S)

    def store(self, document: int, num_chunks: int, model: str = "m", salt: str | None = None) -> Layout:
        """Have chunks stored as engines do, the last first; their layout."""

        def put() -> Layout:
            tiers = self.sidecar.layouts.open(layout(model))
            chain = BlockChain(tiers.layout.chunk_tokens, ExtraKeys(cache_salt=salt))
            chain.extend([document * 1000 + i for i in range(num_chunks * tiers.layout.chunk_tokens)])
            names, slots = chain.names[::-1], tiers.reserve(0, num_chunks)
            assert len(slots) == num_chunks, "no room"
            blocks = [tiers.memories[0].host_block(slot) for slot in slots]
            for name, block in zip(names, blocks, strict=True):
                block[:] = content(tiers.layout, 0, name)
            owners = np.full(num_chunks, number_of(tenant_of(salt)), np.uint64)
            rows = [NamedSpan(0, num_chunks, list(names), None)]
            tiers.tiers.publish(0, np.array(slots, np.intp), rows, [digest(block) for block in blocks], owners)
            return tiers.layout

        return self.ask(put)

    def hold(self) -> Callable[[], None]:
        """The owner's thread is stuck from now on, until the answer is called."""
        is_stuck, let_go = threading.Event(), threading.Event()

        def wait() -> None:
            is_stuck.set()
            let_go.wait(DEADLINE_S)

        self.sidecar.ask(wait)
        assert is_stuck.wait(DEADLINE_S)
        return let_go.set


@contextmanager
def running_sidecar(
    config: SidecarConfig, answer_s: float = DEADLINE_S, operating: Operating | None = None
) -> Iterator[RunningSidecar]:
    """A sidecar that is ready; it ends with the context."""
    endpoint = OpenEndpoint()
    sidecar = build_sidecar(config, lambda layouts, transfers: [endpoint])
    thread = threading.Thread(target=sidecar.run)
    thread.start()
    try:
        with serve_http(sidecar, config, answer_s, operating=operating) as http:
            running = RunningSidecar(sidecar, endpoint, http.port)
            wait_for(lambda: not running.ask(lambda: sidecar.why_not_ready))
            yield running
    finally:
        sidecar.stop()
        join(thread)
        sidecar.close()
