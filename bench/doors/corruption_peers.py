"""What do stores of KV serve once a byte on disk has flipped, a file was cut short, or the index is of an earlier time?

Each is below LMCache's own server, to which LMCache's own client stores a prompt; then the server is killed, the damage
done, and another server loads the prompt for the client, which compares every byte.
"""

import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign.lmcache_server import LmcacheServer, our_l2
from foreign.told_script import ToldScript

from bench.report import Row
from bench.rounds import at_least, at_most

CHUNK = 256  # tokens; 1 MiB
NUM_CHUNKS = 8  # of a prompt
NUM_OTHERS = 6  # prompts that fill the store after the first
CAPACITY = "40MiB"  # holds the first prompt, and not the others too


class Peer(ABC):
    """A store below LMCache, and how it is damaged while no server runs. Only the bytes at rest are changed."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def spec(self) -> str:
        """What `--l2-adapter` is given."""

    @abstractmethod
    def payloads(self) -> list[Path]:
        """The files with the bytes of chunks."""

    @abstractmethod
    def keep_index(self) -> None:
        """Keep what says which chunk is where, as it is now."""

    @abstractmethod
    def put_index_back(self) -> None:
        """Put what was kept in its place, and leave the bytes of chunks alone."""

    def flip(self) -> None:
        """Change one bit of one chunk."""
        path = self.payloads()[0]
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2 + 2051)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 64]))

    def truncate(self) -> None:
        """Cut one file short in its middle."""
        path = self.payloads()[0]
        os.truncate(path, path.stat().st_size // 2)


class FilePerChunk(Peer):
    """LMCache's `fs` and `fs_native`: a chunk is a file, and its name is the index. So an index of an earlier time is a
    name of then with the bytes of a later file, as after a crash in which names and bytes were not written in order."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(folder)
        self.name = name

    def spec(self) -> str:
        return json.dumps({"type": self.name, "base_path": str(self.folder)})

    def payloads(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def keep_index(self) -> None:
        self._names = self.payloads()

    def put_index_back(self) -> None:
        later = [path for path in self.payloads() if path not in self._names]
        for name, bytes_of in zip(self._names, later, strict=False):
            bytes_of.replace(name)


class OurStore(Peer):
    """kvtier's: an index beside files with the bytes of many chunks."""

    name = "kvtier"

    def spec(self) -> str:
        return our_l2(self.folder, CAPACITY)

    def payloads(self) -> list[Path]:
        return sorted(self.folder.glob("slab-*"))

    def keep_index(self) -> None:
        self._kept = self.folder.with_name("kept index")
        shutil.copytree(self.folder, self._kept, ignore=shutil.ignore_patterns("slab-*"))

    def put_index_back(self) -> None:
        shutil.copytree(self._kept, self.folder, dirs_exist_ok=True)


@dataclass(frozen=True)
class Served:
    """What a client was given of the first prompt after a fault."""

    promised: int  # chunks
    loaded: int
    wrong: int  # of these, chunks with other bytes than were stored
    counted: int  # chunks that the store says were damaged


FAULTS: Mapping[str, str] = {
    "a flipped byte": "flip",
    "a truncated file": "truncate",
    "an index of before": "put_index_back",
}


def corruption_rows(python: str, folder: Path) -> list[Row]:
    """What each store serves after each fault: theirs as seen; ours never a wrong byte, and the fault counted."""
    rows: list[Row] = []
    makers: list[Callable[[Path], Peer]] = [
        lambda place: FilePerChunk("fs", place),
        lambda place: FilePerChunk("fs_native", place),
        OurStore,
    ]
    for number, (fault, damage) in enumerate(FAULTS.items()):
        for place, make in enumerate(makers):
            peer = make(folder / f"{number} {place}" / "store")
            seen = served(python, peer, damage)
            print(f"{peer.name}, {fault}: {seen}", file=sys.stderr)
            rows += _rows(f"{fault}: LMCache on {peer.name}", seen, isinstance(peer, OurStore))
    return rows


def _rows(name: str, seen: Served, is_ours: bool) -> list[Row]:
    wrong = f"{name}: wrong chunks served"
    rows = [Row(f"{name}: chunks of {NUM_CHUNKS} served", seen.loaded, "")]
    if not is_ours:
        return [*rows, Row(wrong, seen.wrong, "")]
    return [*rows, at_most(wrong, seen.wrong, "", 0), at_least(f"{name}: faults counted", seen.counted, 1)]


def served(python: str, peer: Peer, damage: str) -> Served:
    """Store, damage, and load."""
    peer.folder.mkdir(parents=True)
    with _engine(python, peer) as (server, client):
        client.store(1, _prompt(0), "0", _blocks(0))
        server.wait_stored()
    if damage == "put_index_back":
        peer.keep_index()
        with _engine(python, peer) as (server, client):
            for number in range(1, NUM_OTHERS + 1):
                client.store(1, _prompt(number), str(number), _blocks(1 + number % 2))
                server.wait_stored()
    getattr(peer, damage)()
    with _engine(python, peer) as (server, client):
        client.keep("0", _blocks(0))
        promised, loaded, wrong = client.load_found(1, _prompt(0), "again", "0")
        (adapter,) = server.status()["storage_manager"]["l2_adapters"]
        return Served(promised, loaded, wrong, sum(adapter.get("corrupt_total", {}).values()))


@contextmanager
def _engine(python: str, peer: Peer) -> Iterator[tuple[LmcacheServer, Any]]:
    """A server above the store, killed at the end, and a client with a registration of its worker."""
    with (
        LmcacheServer(python, "--l1-size-gb", "0.25", "--l2-adapter", peer.spec()) as server,
        ToldScript(python, "lmcache_client.py", server.url) as client,
    ):
        client.attach(1)
        yield server, client


def _prompt(number: int) -> list[int]:
    return [number, *range(1000, 1000 + NUM_CHUNKS * CHUNK)]


def _blocks(number: int) -> list[int]:
    """Blocks of the client's, with other bytes for another *number*, 0 to 2."""
    return list(range(2 * NUM_CHUNKS * number, 2 * NUM_CHUNKS * (number + 1)))
