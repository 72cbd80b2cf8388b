"""A store on a file system that cannot reserve disk space: fallocate(2) fails there with EOPNOTSUPP.

A seccomp filter (seccomp(2)) makes the kernel refuse the call, in a process of its own because a filter stays for good.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import ctypes, errno, mmap, os, struct, sys
from pathlib import Path

from kvtier.store.blob_store import Blob
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import digest

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # <linux/prctl.h>, <linux/seccomp.h>
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>
FALLOCATE = {"x86_64": 285, "aarch64": 47}.get(os.uname().machine)
SKIP = 77


def refuse_fallocate():
    if FALLOCATE is None:
        sys.exit(SKIP)
    steps = [
        (LOAD, 0, 0, 0),  # the number of the call
        (JUMP_IF_EQUAL, 0, 1, FALLOCATE),
        (RETURN, 0, 0, RET_ERRNO | errno.EOPNOTSUPP),
        (RETURN, 0, 0, RET_ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0):
        sys.exit(SKIP)  # a sandbox may forbid it
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with open(sys.argv[1] + ".probe", "w") as file:
        assert libc.fallocate(file.fileno(), 0, 0, 4096) == -1 and ctypes.get_errno() == errno.EOPNOTSUPP


def blobs(first):
    raws = [memoryview(bytes([number % 251]) * 50_000) for number in range(first, first + 16)]
    return [Blob(b"n" * 16 + first.to_bytes(4, "big") + bytes([i]), digest(raw), raw) for i, raw in enumerate(raws)]


refuse_fallocate()
with LmdbStore(Path(sys.argv[1]), 4 << 20, writes=DiskWrites(sys.argv[2])) as store:
    for first in range(0, 128, 16):  # more than the capacity
        new = blobs(first)
        store.put_many(new)
        outs = [memoryview(bytearray(50_000)) for _ in new]
        assert store.read_many([blob.key for blob in new], outs) == [blob.digest for blob in new]
    assert store.statistics().evicted_total > 0
    store.check()
with LmdbStore(Path(sys.argv[1])) as store:
    assert all(fault is None for _, fault in store.verify())
    assert store.contains(new[0].key)
"""


@pytest.mark.parametrize("writes", ["buffered", "direct"])
def test_a_store_works_where_disk_space_cannot_be_reserved(tmp_path: Path, writes: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), writes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("seccomp filters are not permitted here")
    assert done.returncode == 0, done.stderr
