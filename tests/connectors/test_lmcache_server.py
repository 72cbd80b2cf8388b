"""LMCache's real server with our store below it, and LMCache's real client above."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign.lmcache_server import LmcacheServer, our_l2
from foreign.told_script import ToldScript

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
CHUNK = 256
TOKENS = list(range(1000, 1000 + 8 * CHUNK + 2))
BLOCKS = list(range(16))

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with lmcache"),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store into which a server wrote a prompt of eight chunks, before it was killed."""
    folder = tmp_path_factory.mktemp("l2") / "store"
    with LmcacheServer(PYTHON, "--l2-adapter", our_l2(folder)) as server, client_of(server) as client:
        client.attach(1)
        assert client.store(1, TOKENS, "cold", BLOCKS) is True
        server.wait_stored()
        assert server.status()["storage_manager"]["l2_adapters"][0]["stored_objects_total"] == 8
    return folder


@pytest.fixture
def server(stored: Path) -> Iterator[LmcacheServer]:
    with LmcacheServer(PYTHON, "--l2-adapter", our_l2(stored)) as server:
        yield server


def client_of(server: LmcacheServer) -> ToldScript:
    return ToldScript(PYTHON, "lmcache_client.py", server.url)


def test_a_server_that_was_killed_and_started_again_gives_back_what_it_had(server: LmcacheServer) -> None:
    with client_of(server) as client:
        client.attach(1)
        client.keep("cold", BLOCKS)

        assert client.load_found(1, TOKENS, "warm", "cold") == [8, 8, 0]
        assert client.load_found(1, [*TOKENS[: 3 * CHUNK], *range(2 * CHUNK)], "half", "cold") == [3, 3, 0]
        assert client.lookup(TOKENS, "salted", "ann") == 0
        seen = server.status()["storage_manager"]["l2_adapters"][0]
        assert (seen["loaded_objects_total"], seen["failed_loads_total"]) == (8 + 3, 0)  # it keeps no copy


def test_a_flipped_byte_is_a_shorter_prefix_and_is_stored_anew(stored: Path, server: LmcacheServer) -> None:
    (slab,) = stored.glob("slab-*")
    with open(slab, "r+b") as file:  # under the open store, as a disk does it
        file.seek(slab.stat().st_size // 2 + 2051)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 64]))

    with client_of(server) as client:
        client.attach(1)
        client.keep("cold", BLOCKS)
        found, loaded, wrong = client.load_found(1, TOKENS, "warm", "cold")
        assert loaded == found < 8
        assert wrong == 0
        assert server.status()["storage_manager"]["l2_adapters"][0]["corrupt_total"] == {"corrupt": 1}

        assert client.store(1, TOKENS, "again", BLOCKS) is True
        assert client.load_found(1, TOKENS, "healed", "again") == [8, 8, 0]
        server.wait_stored()  # for other tests
