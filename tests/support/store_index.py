"""The index of a store that is closed, changed behind its back."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvtier.store.durability import Durability
from kvtier.store.lmdb.tables import Tables, open_tables

MAP_BYTES = 64 << 20  # enough for the index of any test's store


@contextmanager
def changed_index(folder: Path) -> Iterator[tuple[Any, Tables]]:
    """A transaction that writes, and the tables of the store in *folder*; it is committed at the end."""
    tables = open_tables(folder, MAP_BYTES, Durability.COMMIT)
    with closing(tables.file), tables.env.begin(write=True) as txn:
        yield txn, tables
