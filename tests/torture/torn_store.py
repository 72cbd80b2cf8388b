"""Opens a store on a damaged file and calls all its methods; run by `fork_server.py`."""

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from faulty_store import Watch
from fork_server import Say
from torture_blocks import blob_of, chain, key_of, number_of, open_store, read_numbers

from kvtier.store.lmdb.lmdb_store import LmdbStore

_T = TypeVar("_T")


def run(say: Say, folder: str, capacity_bytes: int, durability: str, numbers: list[int], first_chain: int) -> None:
    """Use the store twice, as a process and its successor do. AssertionError for wrong bytes."""
    watch = Watch()
    logging.getLogger("kvtier").addHandler(watch)
    for _ in range(2):
        watch.reason = ""
        look = Look(Counter(), [])
        opened = look.attempt("open", lambda: open_store(folder, capacity_bytes, "none", durability))
        if opened is not None:
            look.do_everything(opened, numbers, first_chain)
            look.attempt("close", opened.close)
        say(counts=look.counts, strange=look.strange, emptied=watch.reason)


@dataclass
class Look:
    """Results of the calls: counts, and exceptions that no store may raise."""

    counts: Counter[str]
    strange: list[str]

    def attempt(self, what: str, act: Callable[[], _T]) -> _T | None:
        """Make a call. OSError is fine, wrong bytes end the process, and other errors are told with their place."""
        try:
            return act()
        except OSError:
            self.counts[f"{what} raises"] += 1
        except AssertionError as error:
            if what != "check":
                raise
            self.counts[f"check: {error}"] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.strange.append(f"{what}: {type(error).__name__} in {where.name}: {error}")
        return None

    def do_everything(self, store: LmdbStore, numbers: list[int], first_chain: int) -> None:
        """Call every method, and put enough new blocks to evict all that were there."""
        self.attempt("read", lambda: self._read(store, numbers))
        self.attempt("verify", lambda: self._verify(store))
        self.attempt("keys", lambda: self._read_what_is_listed(store, numbers))
        self.attempt("check", store.check)
        self.attempt("statistics", store.statistics)
        self.attempt("touch", lambda: store.touch([key_of(number) for number in numbers[::3]]))
        self.attempt("delete", lambda: store.delete([key_of(number) for number in numbers[::7]]))
        self.attempt("put", lambda: store.put_many([blob_of(number) for number in numbers[::7]]))
        for chain_id in range(first_chain, first_chain + 25):
            new = chain("mixed", chain_id)
            self.attempt("put", partial(store.put_many, [blob_of(number) for number in new[::-1]]))
            self.attempt("read", partial(self._read, store, new))
        self.attempt("read", lambda: self._read(store, numbers))
        self.attempt("check", store.check)
        self.attempt("sync", store.sync)

    def _read(self, store: LmdbStore, numbers: list[int]) -> None:
        good, faults = read_numbers(store, numbers)
        self.counts["right"] += len(good)
        self.counts.update(f"read: {fault}" for fault in faults.values())

    def _verify(self, store: LmdbStore) -> None:
        self.counts.update(f"verify: {fault or 'right'}" for _, fault in store.verify())

    def _read_what_is_listed(self, store: LmdbStore, numbers: list[int]) -> None:
        known = {key_of(number) for number in numbers}
        others = [key for key in list(store.keys()) if key not in known]
        self.counts["other keys"] += len(others)
        self._read(store, [number_of(key) for key in others[:50] if key == key_of(number_of(key) % (1 << 40))])
