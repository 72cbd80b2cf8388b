"""What do stores of KV serve once a bit on disk has flipped, a file was cut short, or the index is of an earlier time?

LMCache's stores and ours are below LMCache's own server, to which LMCache's own client stores a prompt; then the server
is killed, the damage done, and another server loads the prompt for the client, which compares every byte. vLLM's store
and ours are below vLLM's own offloading; answers are compared with those that were computed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign.lmcache_server import LmcacheServer, our_l2
from foreign.told_script import ToldScript

from bench.connectors.corruption_in_vllm import vllm_rows
from bench.connectors.damaged_stores import FAULTS, QUICK_FAULTS, FilePerBlock, OurStore, Store
from bench.report import Effort, Row
from bench.rounds import at_least, never

CHUNK = 256  # tokens; 1 MiB
NUM_CHUNKS = 8  # of a prompt
NUM_OTHERS = 6  # prompts that fill the store after the first
CAPACITY = "40MiB"  # holds the first prompt, and not the others too
OURS = "kvtier"


def _file_per_chunk(name: str) -> Callable[[Path], str]:
    return lambda folder: json.dumps({"type": name, "base_path": str(folder)})


SPECS: Mapping[str, Callable[[Path], str]] = {
    "fs": _file_per_chunk("fs"),
    "fs_native": _file_per_chunk("fs_native"),
    OURS: lambda folder: our_l2(folder, CAPACITY),
}
"""What `--l2-adapter` is given for a store in a folder."""


@dataclass(frozen=True)
class Served:
    """What a client was given of the first prompt after a fault."""

    promised: int  # chunks
    loaded: int
    wrong: int  # of these, chunks with other bytes than were stored
    counted: int  # chunks that the store says were damaged


def corruption_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """What each store serves after each fault: theirs as seen; ours never a wrong byte, and the fault counted."""
    rows: list[Row] = []
    for fault, damage in effort.of(FAULTS, quick=QUICK_FAULTS).items():
        for name in effort.of(tuple(SPECS), quick=(OURS,)):
            seen = served(python, name, folder / f"{damage} {name}" / "store", damage)
            print(f"LMCache on {name}, {fault}: {seen}", file=sys.stderr)
            rows += _rows(f"{fault}: LMCache on {name}", seen, name == OURS)
    return rows + vllm_rows(effort, python, folder)


def _rows(name: str, seen: Served, is_ours: bool) -> list[Row]:
    wrong = f"{name}: wrong chunks served"
    rows = [Row(f"{name}: chunks of {NUM_CHUNKS} served", seen.loaded, "")]
    if not is_ours:
        return [*rows, Row(wrong, seen.wrong, "")]
    return [*rows, never(wrong, seen.wrong), at_least(f"{name}: faults counted", seen.counted, 1, varies=False)]


def served(python: str, name: str, folder: Path, damage: str) -> Served:
    """Store, damage, and load."""
    folder.mkdir(parents=True)
    spec = SPECS[name](folder)
    store: Store = OurStore(folder) if name == OURS else FilePerBlock(folder)
    with _engine(python, spec) as (server, client):
        client.store(1, _prompt(0), "0", _blocks(0))
        server.wait_stored()
    if damage == "put_index_back":
        store.keep_index()
        with _engine(python, spec) as (server, client):
            for number in range(1, NUM_OTHERS + 1):
                client.store(1, _prompt(number), str(number), _blocks(1 + number % 2))
                server.wait_stored()
    getattr(store, damage)()
    with _engine(python, spec) as (server, client):
        client.keep("0", _blocks(0))
        promised, loaded, wrong = client.load_found(1, _prompt(0), "again", "0")
        (adapter,) = server.status()["storage_manager"]["l2_adapters"]
        return Served(promised, loaded, wrong, sum(adapter.get("corrupt_total", {}).values()))


@contextmanager
def _engine(python: str, spec: str) -> Iterator[tuple[LmcacheServer, Any]]:
    """A server above the store, killed at the end, and a client with a registration of its worker."""
    with (
        LmcacheServer(python, "--l1-size-gb", "0.25", "--l2-adapter", spec) as server,
        ToldScript(python, "lmcache_client.py", server.url) as client,
    ):
        client.attach(1)
        yield server, client


def _prompt(number: int) -> list[int]:
    return [number, *range(1000, 1000 + NUM_CHUNKS * CHUNK)]


def _blocks(number: int) -> list[int]:
    """Blocks of the client's, with other bytes for another *number*, 0 to 2."""
    return list(range(2 * NUM_CHUNKS * number, 2 * NUM_CHUNKS * (number + 1)))
