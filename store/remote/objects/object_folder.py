"""ObjectFolder: keeps the objects of a `file://` store from other users of the machine."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

_PRIVATE = 0o700
_SHARED = 0o770  # with the group, if the folder is writable for it: members of the group share the store


class ObjectFolder:
    """The folder of a `file://` store. Keys and values in it are the prompts, so no other user may read them.

    Folders have the mode 0700 and objects 0600. If the operator has made the store's folder writable for its group,
    they have 0770 and 0660. Any thread may call everything.
    """

    def __init__(self, root: Path) -> None:
        """Make the folder if there is none. OSError."""
        root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        self._root = root
        self._mode = _SHARED if root.stat().st_mode & stat.S_IWGRP else _PRIVATE

    @classmethod
    def at(cls, url: str) -> Self:
        """Return the folder of a URL such as `file:///mnt/kv`. ValueError, with what to do, if it cannot be made."""
        path = Path(unquote(urlsplit(url).path))
        try:
            return cls(path)
        except OSError as error:
            raise ValueError(f"object store: {url}: {error.strerror}; give a folder that can be written to") from error

    def make_parents(self, path: str) -> None:
        """Make the folders of an object before it is put, so that nobody sees it before its own mode is set."""
        folder = self._root
        for name in Path(path).parts[:-1]:
            folder /= name
            with suppress(FileExistsError):
                folder.mkdir(mode=self._mode)
            self._set_mode(folder, self._mode)

    def make_private(self, path: str) -> None:
        """Set the mode of an object that was put."""
        with suppress(FileNotFoundError):  # another process has evicted it
            self._set_mode(self._root / path, self._mode & 0o660)

    def _set_mode(self, path: Path, mode: int) -> None:
        """Set the mode, unless another user has made the file: that one has set it."""
        found = path.stat(follow_symlinks=False)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o777 != mode:
            path.chmod(mode)
