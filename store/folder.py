"""A folder that belongs to this program alone, used by its descriptor.

Who could write in it, or plant links there, would choose which files are overwritten and read. So the folder must be
the user's own, writable by no one else, and neither it nor a file in it a link. And it stays the same folder: one that
is removed, and made again by another process, gets nothing.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self


class Folder:
    """An open folder; `close` it. *name* is the path that people know, *here* one that leads to this folder as long as
    it is open, whatever *name* leads to then. OSError, one line that says what to do, if it cannot be trusted."""

    def __init__(self, path: Path) -> None:
        self.name = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:
            what = "is a symbolic link" if path.is_symlink() else "is no folder"
            raise NotADirectoryError(error.errno, f"{what}; give the folder itself", str(path)) from error
        try:
            self._refuse_foreign()
        except BaseException:
            self.close()
            raise
        self.here = Path(f"/proc/self/fd/{self._descriptor}")

    @classmethod
    def make(cls, path: Path) -> Self:
        """The folder, made if it is not there, for its owner alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return cls(path)

    @property
    def mode(self) -> int:
        """Who may do what with it."""
        return stat.S_IMODE(os.fstat(self._descriptor).st_mode)

    def close(self) -> None:
        """Let go of it; *here* leads nowhere any more. Once more does nothing."""
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
            why = f"belongs to user {owner}, this process to {os.geteuid()}; run it as that user"
        elif self.mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"others may write in it (mode {self.mode:04o}); chmod 700 it"
        if why:
            raise PermissionError(errno.EPERM, why, str(self.name))


def open_own(path: "Path | str", flags: int) -> int:
    """Descriptor of a file that only its owner may use, made with O_CREAT if it is not there; an opener for `open`.

    PermissionError if the file at *path* is not a plain one of this user's with this one name: a link, symbolic or
    hard, would have another file changed.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        why = "is not a plain file of this user's, or has more than one name; remove it"
        raise PermissionError(errno.EPERM, why, str(path))
    return file


def open_or_make(path: str, flags: int) -> int:
    """`open_own`, for `open`, of a file that may not be there yet."""
    return open_own(path, flags | os.O_CREAT)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
