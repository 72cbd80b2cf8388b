"""The index of a store that is closed, changed behind its back."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvtier.store.durability import Durability
from kvtier.store.lmdb.tables import Tables

MAP_BYTES = 64 << 20  # enough for the index of any test's store


@contextmanager
def changed_index(folder: Path) -> Iterator[tuple[Any, Tables]]:
    """A transaction that writes, and the tables of the store in *folder*; it is committed at the end."""
    with closing(Tables(folder, MAP_BYTES, Durability.COMMIT)) as tables, tables.env.begin(write=True) as txn:
        yield txn, tables
