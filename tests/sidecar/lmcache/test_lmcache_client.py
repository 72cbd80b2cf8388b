"""LMCache's own client classes at the endpoint, in an interpreter of their own: KVTIER_LMCACHE_PYTHON."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign.told_script import ToldScript, clients_of_lmcache

from kvtier.sidecar.finished_transfers import FinishedTransfers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.endpoint import LmcacheEndpoint
from kvtier.sidecar.lmcache.zmtp import Zmtp
from kvtier.sidecar.port import Port, listen
from kvtier.sidecar.refusals import Refusals
from kvtier.sidecar.sidecar import Sidecar
from kvtier.transfer.lane import ThreadLane
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, TransferEngine

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON")
CHUNK = 256
TOKENS = list(range(1000, 1000 + 8 * CHUNK + 2))
BLOCKS = list(range(16))
OTHER_BLOCKS = list(range(40, 56))
REAL_S = 30.0  # less than the minute after which leases end by themselves

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="KVTIER_LMCACHE_PYTHON names no interpreter with lmcache"),
]
CLIENTS = clients_of_lmcache(PYTHON or "/bin/python")


class LmcacheClient(ToldScript):
    """LMCache's own client classes of one version, in a process of their own."""

    def __init__(self, url: str, version: str = "0.5.6") -> None:
        assert PYTHON is not None
        super().__init__(PYTHON, "lmcache_client.py", url, before=CLIENTS[version])


class Served:
    """A sidecar with LMCache's endpoint, on a thread of its own."""

    def __init__(self, url: str) -> None:
        self.segment = Segment(64 << 20)
        assert self.segment.wait_backed(REAL_S)
        finished = FinishedTransfers()
        transfers = TransferEngine({route: ThreadLane(finished, route.value) for route in Route}, finished)
        layouts = Layouts(self.segment, transfers, extent_bytes=8 << 20)
        self.refusals = Refusals(time.monotonic)
        self.port = Port([listen(url)], time.monotonic, self.refusals.refused, Zmtp)
        self.endpoint = LmcacheEndpoint(self.port, layouts, transfers, CHUNK, self.refusals, time.monotonic)
        self._sidecar = Sidecar(self.segment, finished, transfers, layouts, [self.endpoint], None)
        self._thread = threading.Thread(target=self._sidecar.run)
        self._thread.start()

    def ask(self, question: Callable[[], Any]) -> Any:
        """Ask the sidecar's thread."""
        return self._sidecar.ask(question).result(REAL_S)

    def num_leased(self) -> int:
        return int(self.ask(lambda: sum(tiers.num_leased for tiers in self._sidecar.layouts)))

    def until_no_lease(self) -> None:
        """Wait until nothing is leased or reserved, and not until leases are over by time."""
        give_up_at = time.monotonic() + REAL_S
        while self.num_leased():
            assert time.monotonic() < give_up_at

    def flip(self) -> None:
        """A bit of each byte in the middle of the first chunk's slot."""
        (tiers,) = self._sidecar.layouts
        slot = self.ask(lambda: int(tiers.tiers.index.host_blocks[0].slots()[0]))
        tiers.memories[0].host_block(slot)[1000] ^= 64

    def close(self) -> None:
        self._sidecar.stop()
        self._thread.join(REAL_S)
        self._sidecar.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/endpoint.sock"


@pytest.fixture
def served(url: str) -> Iterator[Served]:
    served = Served(url)
    yield served
    served.close()


@pytest.fixture(params=CLIENTS)
def version(request: pytest.FixtureRequest) -> str:
    """Each of LMCache's versions that is served."""
    return str(request.param)


@pytest.fixture
def client(url: str, served: Served, version: str) -> Iterator[LmcacheClient]:
    with LmcacheClient(url, version) as client:
        assert client.version() == version
        yield client


def test_clients_of_all_versions_load_the_same_chunks(served: Served, url: str) -> None:
    with contextlib.ExitStack() as stack:
        clients = {version: stack.enter_context(LmcacheClient(url, version)) for version in CLIENTS}
        for number, (version, client) in enumerate(clients.items()):
            client.attach(number)
            own = [*TOKENS[: 4 * CHUNK], *[number + 1] * 4 * CHUNK]
            client.keep("same", BLOCKS)  # each process has made the same blocks
            assert client.lookup(own, f"{version} cold") == (4 if number else 0)
            assert client.store(number, own, f"{version} cold", BLOCKS) is True
        for number, (version, client) in enumerate(clients.items()):
            for other in range(len(clients)):
                request, own = f"{version} {other}", [*TOKENS[: 4 * CHUNK], *[other + 1] * 4 * CHUNK]
                assert client.lookup(own, request) == 8
                assert client.retrieve(number, own, request, OTHER_BLOCKS, "same") == [True, True]
                client.end_session(request)
    assert served.refusals.counts == {}


def test_another_engine_loads_the_bytes_that_one_has_stored(served: Served, client: LmcacheClient) -> None:
    assert client.chunk_size() == CHUNK
    assert client.attach(1) == "EngineDrivenContextShm"
    assert client.lookup(TOKENS, "cold") == 0
    assert client.store(1, TOKENS, "cold", BLOCKS) is True
    client.end_session("cold")
    client.attach(2)

    assert client.lookup(TOKENS, "warm") == 8
    assert client.retrieve(2, TOKENS, "warm", OTHER_BLOCKS, "cold") == [True, True]

    client.end_session("warm")
    assert served.num_leased() == 0
    assert client.lookup([*TOKENS[: 4 * CHUNK], *range(4 * CHUNK)], "half") == 4
    assert client.lookup(TOKENS, "salted", "x") == 0
    assert served.refusals.counts == {}


def test_a_load_of_a_chunk_with_a_flipped_byte_is_refused(served: Served, client: LmcacheClient) -> None:
    client.attach(1)
    client.store(1, TOKENS, "cold", BLOCKS)
    assert client.lookup(TOKENS, "before") == 8
    client.end_session("before")

    served.flip()

    assert client.lookup(TOKENS, "after") == 8
    assert client.retrieve(1, TOKENS, "after", OTHER_BLOCKS, "cold")[0] is False
    client.end_session("after")
    assert client.lookup(TOKENS, "damage is known") < 8
    client.end_session("damage is known")
    assert client.store(1, TOKENS, "again", BLOCKS) is True
    assert client.lookup(TOKENS, "healed") == 8
    assert client.retrieve(1, TOKENS, "healed", OTHER_BLOCKS, "again") == [True, True]
    assert served.ask(served.endpoint.statistics).promised.num_corrupt == 1


def test_a_worker_that_unregisters_leaves_what_it_stored(served: Served, client: LmcacheClient) -> None:
    client.attach(1)
    client.store(1, TOKENS, "cold", BLOCKS)
    served.until_no_lease()  # their digests are taken
    client.begin_store(1, [7] * 4 * CHUNK, "never")
    assert served.num_leased() == 4

    client.detach(1)

    assert served.num_leased() == 4, "its process may still be writing there"
    assert client.lookup(TOKENS, "without registration") == 0
    client.attach(2)
    assert client.lookup(TOKENS, "with one") == 8


def test_a_client_that_is_killed_in_the_middle_of_a_store_leaves_nothing(
    served: Served, url: str, version: str
) -> None:
    with LmcacheClient(url, version) as first:
        first.attach(1)
        assert first.begin_store(1, TOKENS, "r") == 8
        assert served.num_leased() == 8

        first.process.kill()

        served.until_no_lease()
    with LmcacheClient(url, version) as second:
        second.attach(2)
        assert second.lookup(TOKENS, "r") == 0
        assert second.store(2, TOKENS, "r", BLOCKS) is True
        assert second.lookup(TOKENS, "s") == 8


def test_a_client_that_is_killed_in_the_middle_of_a_load_leaves_nothing(served: Served, url: str, version: str) -> None:
    with LmcacheClient(url, version) as first, LmcacheClient(url, version) as second:
        first.attach(1)
        second.attach(2)
        second.store(2, TOKENS, "cold", BLOCKS)
        assert first.lookup(TOKENS, "r") == 8
        assert first.begin_retrieve(1, TOKENS, "r") == 8
        assert served.num_leased() == 8

        first.process.kill()

        served.until_no_lease()
        assert second.lookup(TOKENS, "s") == 8
        assert second.retrieve(2, TOKENS, "s", OTHER_BLOCKS, "cold") == [True, True]


def test_a_worker_that_is_stopped_in_a_store_and_registers_anew_writes_to_no_chunk_of_another(
    served: Served, url: str, version: str
) -> None:
    def fill(number: int) -> None:  # host memory, with chunks of the second client
        for document in range(8):
            assert second.store(2, [number, document, *TOKENS[2:]], f"fill {number} {document}", BLOCKS) is True

    with LmcacheClient(url, version) as first, LmcacheClient(url, version) as second:
        first.attach(1)
        second.attach(2)
        second.keep("all", BLOCKS)
        assert first.begin_copy(1, TOKENS, "r") == 8
        first.process.send_signal(signal.SIGSTOP)
        fill(1)
        first.process.send_signal(signal.SIGCONT)
        first.attach(1)  # as its connector does once answers have come too late
        fill(2)

        first.finish_copy("r")

        found = [second.load_found(2, [2, document, *TOKENS[2:]], f"look {document}", "all") for document in range(8)]
        assert sum(num_loaded for _, num_loaded, _ in found) > 8
        assert [num_wrong for _, _, num_wrong in found] == [0] * 8
        assert served.ask(served.endpoint.statistics).promised.num_corrupt == 0
        first.process.kill()
        served.until_no_lease()


def test_a_load_without_a_hit_fails_without_a_hang(client: LmcacheClient) -> None:
    client.attach(1)
    client.store(1, TOKENS, "cold", BLOCKS)

    assert client.retrieve(1, [9] * 8 * CHUNK, "none", OTHER_BLOCKS, "cold")[0] is False
    client.clear()
    assert client.lookup(TOKENS, "cleared") == 0


def test_each_rank_has_its_own_bytes_and_a_hit_is_what_all_have(served: Served, client: LmcacheClient) -> None:
    for rank in (0, 1):
        client.attach(10 + rank, 2)
    assert client.lookup(TOKENS, "cold", "", 2) == 0
    assert client.store_as_rank(10, 0, 2, TOKENS, "cold", BLOCKS) is True
    assert client.lookup(TOKENS, "half", "", 2) == 0
    assert client.store_as_rank(11, 1, 2, TOKENS, "cold", OTHER_BLOCKS) is True
    for request in ("cold", "half"):
        client.end_session(request)

    assert client.lookup(TOKENS, "warm", "", 2) == 8
    for rank, blocks in ((0, OTHER_BLOCKS), (1, BLOCKS)):
        assert client.retrieve_as_rank(10 + rank, rank, 2, TOKENS, "warm", blocks, "cold") == [True, True]
    client.end_session("warm")
    assert client.lookup(TOKENS, "as one") == 0
    assert served.num_leased() == 0


def test_prompts_with_other_images_share_what_comes_before_them(client: LmcacheClient) -> None:
    one, other = (client.with_image(TOKENS, 3 * CHUNK + 100, 2 * CHUNK, image) for image in ("a cat", "a dog"))
    client.attach(1)
    client.store(1, one, "cold", BLOCKS)
    client.end_session("cold")

    assert client.lookup(one, "same") == 8
    assert client.lookup(other, "other") == 3
    assert client.lookup(TOKENS, "placeholders") == 3


def test_a_sidecar_that_is_started_again_gets_its_workers_back(url: str, version: str) -> None:
    served = Served(url)
    with LmcacheClient(url, version) as client:
        client.attach(1)
        client.store(1, TOKENS, "cold", BLOCKS)
        served.close()
        served = Served(url)

        assert client.lookup(TOKENS, "r") == 0
        assert [client.ping(1), client.ping(1)] == [False, True]  # upon which the connector registers again
        client.attach(1)
        assert client.store(1, TOKENS, "cold", BLOCKS) is True
        assert client.lookup(TOKENS, "s") == 8
        assert client.retrieve(1, TOKENS, "s", OTHER_BLOCKS, "cold") == [True, True]
    served.close()
