"""Memory pages: allocation and mapping before the first use, and placement on a NUMA node."""

import ctypes
import errno
import functools
import mmap
import os
import platform
from pathlib import Path

# Numbers from <asm/unistd.h>; the C library exports no mbind.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # <linux/mempolicy.h>; MPOL_BIND would get the process killed when the node is full
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
_LONG_BITS = 64


def node_of_device(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """Return the NUMA node closest to a PCI device such as `0000:1b:00.0`.

    Returns None if the node is unknown or if the machine has only one node.
    """
    if not (sysfs / "devices/system/node/node1").exists():
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the firmware does not say


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to allocate the future pages of a mapping on a NUMA node; return whether the kernel accepted.

    *address* must be page-aligned. If the node is full, the pages come from another node. For shared memory,
    `posix_fallocate` uses the preferred node too. A sandbox may forbid the system call.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    num_bits = len(mask) * _LONG_BITS + 1  # the kernel reads one bit less than this
    arguments = (address, num_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), num_bits, 0)
    return bool(_libc().syscall(number, *map(ctypes.c_ulong, arguments)) == 0)


def back_file(file: int, start: int, num_bytes: int) -> None:
    """Allocate the pages of a range of a memory file, keeping its content.

    Call this before the mapping is used. Otherwise, if memory runs out, the first use of a page kills the process with
    SIGBUS. If the file system has no `fallocate`, one byte of each page is written instead.

    Raises:
        OSError: The file system has no room for the pages.
    """
    try:
        os.posix_fallocate(file, start, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        for place in range(start, start + num_bytes, mmap.PAGESIZE):
            os.pwrite(file, os.pread(file, 1, place) or b"\0", place)


def reserves_all(setting: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    """Return whether the kernel forbids memory overcommit.

    Then the first use of a page of a memory file may fail although memory is free. To prevent this, allocate the pages
    with `back_file` first.
    """
    try:
        return setting.read_text().strip() == "2"
    except OSError:
        return False


def map_pages(address: int, num_bytes: int) -> bool:
    """Map pages before their first use, so that the first copy is not 6 times slower than later copies.

    Returns whether the kernel did so. Before Linux 5.14 it cannot. Python's `mmap.madvise` is not used, because it
    would hold the GIL, for example 16 s for 32 GiB.
    """
    advice = ctypes.c_int(_MADV_POPULATE_WRITE)
    return bool(_libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
