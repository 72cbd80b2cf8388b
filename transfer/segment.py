"""Segment: named shared host memory that other processes of the same user can open and map."""

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

SHARED_MEMORY = Path("/dev/shm")  # where shm_open creates its files
PREFIX = "kvtier"
PIECE_BYTES = 32 << 20  # allocated at a time


class Segment:
    """*num_bytes* of shared memory with mode 0600 and a unique name that begins with `kvtier-UID-`.

    `close` removes the name, but the memory stays as long as any process maps it. If a process is killed, the name of
    its segment stays until the same user creates another segment. A live process keeps its segment locked, so a
    segment without a lock was left by a process that has ended.

    A background thread allocates ("backs") the memory from the front. Other processes may use only the first
    `backed_bytes` bytes. A process that writes to later bytes is killed if memory has run out.

    A process can hand its segment over to the process that replaces it (its successor) by passing on `lock_file`. Other
    processes that map the segment do not notice, if the successor keeps the size.
    """

    def __init__(
        self, num_bytes: int, folder: Path = SHARED_MEMORY, num_beside: int = 0, left: int | None = None
    ) -> None:
        """Create a segment, or take over the segment of a previous process.

        Args:
            num_bytes: Size of the shared memory.
            folder: Folder of the segment's file.
            num_beside: Number of bytes after the shared memory (`beside`) for use by this process and its successors.
            left: `lock_file` of a segment to take over, if any. The sizes must be the same, and `handover_error` must
                return no error. The new segment owns the descriptor.

        Raises:
            OSError: *folder* has too little free space.
        """
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
            # Other processes get a descriptor that was opened anew: with a duplicate they would keep the lock alive.
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
                # linkat must follow the link in /proc, and Python asks for that only if folder descriptors are given.
                os.link(f"/proc/self/fd/{self._lock}", self.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._thread = threading.Thread(target=self._back, name="kvtier-segment", daemon=True)
            self._thread.start()
            undo.pop_all()

    @property
    def span(self) -> tuple[int, int, int]:
        """File descriptor, address in this process, and number of bytes, which other processes need to map it."""
        return self.file, self.memory.ctypes.data, self.num_bytes

    @property
    def lock_file(self) -> int:
        """Descriptor that a successor needs to take this segment over. The segment still owns the descriptor."""
        return self._lock

    @property
    def is_taken_over(self) -> bool:
        """True if this segment was taken over from a previous process."""
        return self._is_taken_over

    def leave(self) -> None:
        """Make `close` keep the segment's name in its folder, because another process takes the segment over."""
        self._is_left = True

    def wait_backed(self, timeout_s: float) -> bool:
        """Wait up to *timeout_s* for the background thread, and return whether it has allocated all memory."""
        self._thread.join(timeout_s)
        return self.backed_bytes == self.num_bytes

    def close(self) -> None:
        """End the background thread, and remove the segment's name from its folder. Idempotent.

        After `leave`, the name stays. The memory stays mapped until the last view of `memory` is gone.
        """
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
        """Create an unnamed file of the segment's size and lock it."""
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
            f"host: {folder} has {room.f_bavail * room.f_frsize >> 20} MiB free, but {self.num_bytes >> 20} MiB are "
            f"needed; lower --host-memory, or enlarge it: mount -o remount,size={(self.num_bytes >> 30) + 1}G {folder} "
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
        except Exception as error:  # last handler of the thread; the backed part stays in use
            used, asked = self.backed_bytes >> 20, self.num_bytes >> 20
            advice = "free memory, or lower --host-memory"
            log.warning("host: allocated only %d of %d MiB: %s; %s", used, asked, error, advice)


def name_of(file: int, folder: Path = SHARED_MEMORY) -> str:
    """Return the name in *folder* of the segment with the descriptor *file*; empty if it is no segment of this user."""
    found = os.fstat(file)
    for path in folder.glob(f"{PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):  # another process has removed it meanwhile
            if os.path.samestat(path.stat(follow_symlinks=False), found):
                return path.name
    return ""


def handover_error(file: int, folder: Path = SHARED_MEMORY) -> str:
    """Return why this process cannot take over the segment with the descriptor *file*; empty if it can."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return "it is not a file of this user"
    if not name_of(file, folder):
        return f"it has no name in {folder}"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds if the descriptor holds this lock already
    except OSError:
        return "another process has locked it"
    return ""


def discard_handover(file: int, folder: Path = SHARED_MEMORY) -> None:
    """Close *file*, which a previous process handed over, instead of taking its segment over.

    Also remove the segment's name from *folder*. If `handover_error` returns an error, the name stays, because *file*
    may not be a segment, or another process may use it.
    """
    if not handover_error(file, folder):
        (folder / name_of(file, folder)).unlink()
    os.close(file)


def leftovers(folder: Path) -> Iterator[str]:
    """Remove the segments that processes of this user left behind when they ended, and yield the names."""
    for path in folder.glob(f"{PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):  # another process removed it, its owner lives, or it is not a segment
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
