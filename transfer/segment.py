"""Segment: host memory with a name, which other processes of the same user open and map."""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.transfer.pages import back_file, map_pages

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # where shm_open has its files
PREFIX = "kvtier"
PIECE_BYTES = 32 << 20  # that are backed at a time


class Segment:
    """*num_bytes* of shared memory, mode 0600, under a name of its own that begins with `kvtier-UID-`.

    The name goes when the segment is closed. A process that is killed leaves it, and the next segment of the same user
    removes it: each is locked for as long as its process lives, and has its name only once it is locked, so what can
    be locked has no owner. The bytes stay for as long as any process maps them.

    Memory is backed from the front, piece by piece, by a thread of its own. A process that writes where nothing is
    backed is killed if the machine has no memory left, so only `backed_bytes` may be given to others.

    A process may leave its segment to the one that comes after it, under the same name, by passing on `lock_file`:
    where both are as large nothing changes for those that map it.
    """

    def __init__(
        self, num_bytes: int, folder: Path = SHARED_MEMORY, num_beside: int = 0, left: int | None = None
    ) -> None:
        """*num_beside* bytes follow in the same file, in `beside`, for this process and its successors. *left* is the
        `lock_file` of a segment of that size that was left to this process, whose it is from now on: see
        `why_not_left`. OSError, with what to do, if *folder* has no room for that much."""
        self.num_bytes = num_bytes
        self.backed_bytes = 0
        self.name = (
            f"{PREFIX}-{os.geteuid()}-{os.getpid()}-{secrets.token_hex(4)}" if left is None else name_of(left, folder)
        )
        self._num_file_bytes = num_bytes + num_beside
        self._is_left = False
        self._is_taken_over = left is not None
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._closing = threading.Event()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._folder)
            for name in leftovers(folder):
                log.warning("host: removed the shared memory %s/%s of a process that was killed", folder, name)
            self._lock = self._new_file(folder) if left is None else left
            undo.callback(os.close, self._lock)
            # Others get this one: a lock lasts as long as any descriptor made from the one that took it.
            self.file = os.open(f"/proc/self/fd/{self._lock}", os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, self.file)
            if num_beside:
                try:
                    back_file(self._lock, num_bytes, num_beside)
                except OSError as error:
                    raise self._no_room(folder) from error
            mapped = np.frombuffer(mmap.mmap(self.file, self._num_file_bytes), np.uint8)
            self.memory: npt.NDArray[np.uint8] = mapped[:num_bytes]  # [num_bytes]
            self.beside: npt.NDArray[np.uint8] = mapped[num_bytes:]  # [num_beside]
            if left is None:
                # linkat follows the link in /proc only if it is told to, and Python tells it so with folders alone.
                os.link(f"/proc/self/fd/{self._lock}", self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._thread = threading.Thread(target=self._back, name="kvtier-segment", daemon=True)
            self._thread.start()
            undo.pop_all()

    @property
    def span(self) -> tuple[int, int, int]:
        """File descriptor, address in this process, and bytes: for a process that maps the same memory."""
        return self.file, self.memory.ctypes.data, self.num_bytes

    @property
    def lock_file(self) -> int:
        """What a process needs to take this segment over. The descriptor stays the segment's."""
        return self._lock

    @property
    def is_taken_over(self) -> bool:
        """Whether another process had left it to this one."""
        return self._is_taken_over

    def leave(self) -> None:
        """Leave the segment to a process that has, or will be given, its `lock_file`: `close` keeps the name."""
        self._is_left = True

    def wait_backed(self, timeout_s: float) -> bool:
        """Wait until all of it is backed or cannot be, *timeout_s* at most; whether all of it is backed."""
        self._thread.join(timeout_s)
        return self.backed_bytes == self.num_bytes

    def close(self) -> None:
        """Take the name away and end the thread. This process's memory goes with the last view of `memory`."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if not self._is_left:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.name, dir_fd=self._folder)
        for file in (self.file, self._lock, self._folder):
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _new_file(self, folder: Path) -> int:
        """A file without a name, of the segment's size, and locked."""
        room = os.fstatvfs(self._folder)
        if room.f_bavail * room.f_frsize < self._num_file_bytes:
            raise self._no_room(folder)
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, self._num_file_bytes)
            fcntl.flock(file, fcntl.LOCK_EX)
        except BaseException:
            os.close(file)
            raise
        return file

    def _no_room(self, folder: Path) -> OSError:
        room = os.fstatvfs(self._folder)
        return OSError(
            f"host: {folder} has room for {room.f_bavail * room.f_frsize >> 20} MiB, {self.num_bytes >> 20} MiB are "
            f"asked for; lower --host, or raise it: mount -o remount,size={(self.num_bytes >> 30) + 1}G {folder} "
            "(docker run --shm-size)"
        )

    def _back(self) -> None:
        base = self.memory.ctypes.data
        try:
            while self.backed_bytes < self.num_bytes and not self._closing.is_set():
                length = min(PIECE_BYTES, self.num_bytes - self.backed_bytes)
                back_file(self._lock, self.backed_bytes, length)
                map_pages(base + self.backed_bytes, length)
                self.backed_bytes += length
        except Exception as error:  # a thread's top: what is backed is used
            used, asked = self.backed_bytes >> 20, self.num_bytes >> 20
            log.warning("host: %d of %d MiB are used: %s; free memory, or lower --host", used, asked, error)


def name_of(file: int, folder: Path = SHARED_MEMORY) -> str:
    """The name in the folder of this user's segment in that open file, which was made without one; empty if none."""
    found = os.fstat(file)
    for path in folder.glob(f"{PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):  # another process has removed it meanwhile
            if os.path.samestat(path.stat(follow_symlinks=False), found):
                return path.name
    return ""


def why_not_left(file: int, folder: Path = SHARED_MEMORY) -> str:
    """Why this descriptor is no segment of this user that was left to this process; empty if it is."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return "it is no file of this user"
    if not name_of(file, folder):
        return f"it has no name in {folder}"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the same lock, if it was left
    except OSError:
        return "another process has it"
    return ""


def drop_left(file: int, folder: Path = SHARED_MEMORY) -> None:
    """Close a descriptor that was left to this process, and remove its name if it is a segment's."""
    if not why_not_left(file, folder):
        (folder / name_of(file, folder)).unlink()
    os.close(file)


def leftovers(folder: Path) -> Iterator[str]:
    """Remove the segments of this user whose process has ended; the name of each, once it is gone."""
    for path in folder.glob(f"{PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):  # another start removed it, its owner lives, or it is no segment
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
            yield path.name
