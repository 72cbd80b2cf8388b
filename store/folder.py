"""A folder that belongs to this program's user alone, accessed through a descriptor that stays open.

Another user who could write to the folder, or place links in it, could choose which files are overwritten and read. So
the folder must belong to this user and must not be writable by other users. Neither the folder nor a file in it may be
a link. The descriptor always refers to the same folder. If another process removes the path and creates it again,
nothing is written to the new folder.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self


class Folder:
    """An open folder that belongs to this user alone. Whoever opens it must `close` it.

    *name* is the path by which the folder was opened. *here* is a path that leads to the folder as long as it is open,
    even if *name* has been removed or leads to another folder. Raises OSError if the folder cannot be trusted. The
    message is one line that says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.name = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:
            what = "is a symbolic link" if path.is_symlink() else "is not a folder"
            raise NotADirectoryError(error.errno, f"{what}; give the folder itself", str(path)) from error
        try:
            self._refuse_foreign()
        except BaseException:
            self.close()
            raise
        self.here = Path(f"/proc/self/fd/{self._descriptor}")

    @classmethod
    def make(cls, path: Path) -> Self:
        """Open the folder at *path*. A missing folder is created with access for its owner only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return cls(path)

    @property
    def mode(self) -> int:
        """Permission bits of the folder."""
        return stat.S_IMODE(os.fstat(self._descriptor).st_mode)

    def close(self) -> None:
        """Close the descriptor. After that, *here* is not a valid path. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_foreign(self) -> None:
        owner, why = os.fstat(self._descriptor).st_uid, ""
        if owner != os.geteuid():
            why = f"belongs to user {owner}, but this process runs as user {os.geteuid()}; run it as the folder's owner"
        elif self.mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"other users may write in it (mode {self.mode:04o}); chmod 700 it"
        if why:
            raise PermissionError(errno.EPERM, why, str(self.name))


def open_private(path: "Path | str", flags: int) -> int:
    """Open a file of this user and return its descriptor. May be passed as *opener* to `open`.

    With O_CREAT in *flags*, a missing file is created with access for its owner only. Raises OSError unless *path* is a
    regular file of this user with a single hard link. Writing through a symbolic or hard link would change another
    file.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        why = "is not a regular file of this user, or it has several hard links; remove it"
        raise PermissionError(errno.EPERM, why, str(path))
    return file


def open_or_make(path: str, flags: int) -> int:
    """Open a file like `open_private`, but create it if it is missing. May be passed as *opener* to `open`."""
    return open_private(path, flags | os.O_CREAT)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
