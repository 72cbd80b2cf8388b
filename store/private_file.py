"""Files that contain a secret, such as a key or a password: reading them and checking which other users can."""

import os
import shlex
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_ROOT = 0


@dataclass(frozen=True)
class PrivateFile:
    """Content of a secret file. *exposure* is a message if other users may use the file, else None."""

    content: bytes
    exposure: str | None


def read_private(path: Path, max_bytes: int = -1) -> PrivateFile:
    """Read the file at *path*, at most *max_bytes* of it (-1: all). Raises OSError if it cannot be read.

    The permissions are checked on the opened file, so the check also holds if *path* is replaced meanwhile.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        exposure = None
        if not is_private(found, os.geteuid(), {os.getegid(), *os.getgroups()}):
            mode = stat.S_IMODE(found.st_mode)
            exposure = f"other users may use it (mode {mode:04o}); run: chmod 600 {shlex.quote(str(path))}"
        return PrivateFile(file.read(max_bytes), exposure)


def is_private(found: os.stat_result, user: int, groups: Collection[int]) -> bool:
    """Return whether only *user*, who runs this process, and root can use the file with the stat result *found*.

    A file is private if only its owner has permissions. A file that root owns also counts as private if one of the
    process's *groups* may read it, unless *user* is root. Kubernetes mounts secrets like this, for the group of the pod
    (`fsGroup`).
    """
    of_others = stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    if not of_others:
        return True
    return of_others == stat.S_IRGRP and found.st_uid == _ROOT != user and found.st_gid in groups
