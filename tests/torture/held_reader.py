"""A process that reads the store's file with LMDB itself, to be killed meanwhile; run by `fork_server.py`."""

import time

import lmdb
from fork_server import Say


def run(say: Say, folder: str) -> None:
    """Hold a read transaction for ever."""
    env = lmdb.open(folder, readonly=True, max_dbs=8, max_readers=256)
    with env.begin() as txn:
        say(holding=txn.id())
        time.sleep(3600)


def readers_of(folder: str) -> list[str]:
    """The reader slots in use, as LMDB lists them: a process, a thread and a transaction each."""
    with lmdb.open(folder, readonly=True, max_dbs=8, max_readers=256) as env:
        return [line.strip() for line in env.readers().splitlines()[1:]]
