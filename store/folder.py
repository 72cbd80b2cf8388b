"""A folder that belongs to this program alone, used by its descriptor.

Another user that could write in it, or plant links there, would choose which files are overwritten and read. So the
folder must be the user's own, writable by no other user, and neither it nor a file in it may be a link. It also stays
the same folder: if its path is removed and made again by another process, nothing is written to the new one.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self


class Folder:
    """An open folder; its owner must `close` it.

    *name* is the path that it was opened by. *here* is a path that leads to this folder as long as it is open, whatever
    *name* leads to by then. OSError, one line that says what to do, if the folder cannot be trusted.
    """

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
        """Open the folder at *path*. If there is none, make one that only its owner may use."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return cls(path)

    @property
    def mode(self) -> int:
        """The permission bits of the folder."""
        return stat.S_IMODE(os.fstat(self._descriptor).st_mode)

    def close(self) -> None:
        """Close the descriptor: *here* leads nowhere any more. A second call does nothing."""
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
            why = f"other users may write in it (mode {self.mode:04o}); chmod 700 it"
        if why:
            raise PermissionError(errno.EPERM, why, str(self.name))


def open_own(path: "Path | str", flags: int) -> int:
    """Open a file that only its owner may use and return its descriptor; an opener for `open`.

    With O_CREAT in *flags* the file is made if there is none. PermissionError if the file at *path* is not a plain
    file of this user's with this one name: through a link, symbolic or hard, another file would be changed.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        why = "is not a plain file of this user's, or has more than one name; remove it"
        raise PermissionError(errno.EPERM, why, str(path))
    return file


def open_or_make(path: str, flags: int) -> int:
    """`open_own` of a file that is made if there is none; an opener for `open`."""
    return open_own(path, flags | os.O_CREAT)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
