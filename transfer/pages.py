"""Pages of memory: has them allocated and mapped before they are needed, and placed on a memory node."""

import ctypes
import errno
import functools
import mmap
import os
import platform
from pathlib import Path

# Numbers from <asm/unistd.h>; the C library exports no mbind.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # <linux/mempolicy.h>; MPOL_BIND would end the process when the node is full
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
_LONG_BITS = 64


def node_of_device(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The memory node next to a PCI device (such as `0000:1b:00.0`); None if it is unknown or there is only one."""
    if not (sysfs / "devices/system/node/node1").exists():
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the firmware does not say


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to take the pages of a mapping that it does not back yet from *node*; whether it agreed.

    *address* is page-aligned. For shared memory the wish stays with the file, so `posix_fallocate` follows it too. When
    the node is full the pages come from another: slower, as without the wish. Sandboxes may forbid the call.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    num_bits = len(mask) * _LONG_BITS + 1  # the kernel takes one less than it is told
    arguments = (address, num_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), num_bits, 0)
    return bool(_libc().syscall(number, *map(ctypes.c_ulong, arguments)) == 0)


def back_file(file: int, start: int, num_bytes: int) -> None:
    """Have the file system give a file in memory its pages. OSError if it has no room for them.

    A process that touches a page of a mapping for which there is no room is ended by SIGBUS, so this comes first. What
    is in the file stays. Where the file system cannot allocate, each page is written with what it begins with.
    """
    try:
        os.posix_fallocate(file, start, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        for place in range(start, start + num_bytes, mmap.PAGESIZE):
            os.pwrite(file, os.pread(file, 1, place) or b"\0", place)


def reserves_all(setting: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    """Return whether the kernel promises no memory that it does not have. Then a page of a memory file may be refused
    when it is touched, however much memory is free, unless it was allocated before."""
    try:
        return setting.read_text().strip() == "2"
    except OSError:
        return False


def map_pages(address: int, num_bytes: int) -> bool:
    """Enter pages in the page table, so that a first copy is as fast as a later one (else 6 times slower).

    False before Linux 5.14. Through ctypes, since Python's `mmap.madvise` keeps the interpreter's lock: 2 ms for
    4 MiB, so 16 s of it for 32 GiB.
    """
    advice = ctypes.c_int(_MADV_POPULATE_WRITE)
    return bool(_libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
