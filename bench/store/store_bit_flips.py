"""What does one flipped bit cost, wherever in a store's files it is?

Stores of all three levels of durability, one of them encrypted, one left by a machine that went down, are written and
copied. In each copy one bit of one file is flipped, and the copy is judged as in tests/torture/flipped_store.py. One
flip in 64 is in marks, locks and checkpoints, one in 12 in used pages of the index, the rest in slabs, which would
otherwise get nearly all. Their places are drawn evenly, by the seed.
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flipped_store import MAX_RESTARTS, Table, flip_all, templates

from bench.report import Row, arguments, publish


def rows_of(tables: dict[str, Table]) -> list[Row]:
    """The rows of *tables*, and their sums."""
    rows = []
    for kind, table in tables.items():
        rows += [
            Row(f"{kind}: flips", table.num_flips, ""),
            Row(f"{kind}: flips that cost no block", table.num_harmless, ""),
            Row(f"{kind}: flips that cost the store", table.num_emptied, ""),
            *(
                Row(f"{kind}: works again after {restarts} restarts", count, "flips")
                for restarts, count in sorted({**dict.fromkeys(range(MAX_RESTARTS + 1), 0), **table.restarts}.items())
            ),
        ]
    for name, num in (
        ("wrong bytes or keys", sum(table.num_wrong for table in tables.values())),
        ("hangs", sum(table.num_hangs for table in tables.values())),
        (f"flips not survived with {MAX_RESTARTS} restarts", sum(table.num_lost for table in tables.values())),
    ):
        rows.append(Row(f"all: {name}", num, "", "0", num == 0))
    return rows


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, help="how many, of all stores (10,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the stores are made; a memory file system is fastest")
    chosen = parser.parse_args()
    num_flips = chosen.flips or chosen.effort.of(10_000, quick=20)
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    where = chosen.folder or (memory if os.access(memory, os.W_OK) else None)
    with tempfile.TemporaryDirectory(dir=where, prefix="kvtier-flips-") as folder, silent_children():
        tables = flip_all(templates(Path(folder)), num_flips, chosen.seed, say=True)
    for table in tables.values():
        print(*table.remarkable, sep="\n", end="\n" if table.remarkable else "", file=sys.stderr)
    publish(f"store_bit_flips, seed {chosen.seed}", rows_of(tables), chosen.json)


@contextlib.contextmanager
def silent_children() -> Iterator[None]:
    """Discard the standard error of the stores' processes, which would report damage thousands of times."""
    kept = os.dup(2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        for file in (kept, null):
            os.close(file)


if __name__ == "__main__":
    main()
