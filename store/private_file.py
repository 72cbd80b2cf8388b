"""Files with a secret in them, such as a key or a password: how they are read, and which other users may read them."""

import os
import shlex
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_ROOT = 0


@dataclass(frozen=True)
class PrivateFile:
    """The content of a file, and why it is not private: a phrase that says what to do, or None."""

    content: bytes
    exposure: str | None


def read_private(path: Path, max_bytes: int = -1) -> PrivateFile:
    """Read *max_bytes* of the file at *path* at most, -1: all of it. OSError if it cannot be read.

    The permissions are those of the file that was opened, whatever is at *path* by then.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        exposure = None
        if not is_private(found, os.geteuid(), {os.getegid(), *os.getgroups()}):
            mode = stat.S_IMODE(found.st_mode)
            exposure = f"other users may use it (mode {mode:04o}); run: chmod 600 {shlex.quote(str(path))}"
        return PrivateFile(file.read(max_bytes), exposure)


def is_private(found: os.stat_result, user: int, groups: Collection[int]) -> bool:
    """Whether a process of *user* in *groups* is alone, root aside, with a file that has the properties *found*.

    Either the owner alone may use it. Or it is root's, the process is not, and one of the process's groups may read it
    and do nothing else: so Kubernetes mounts secrets, for the group of the pod (`fsGroup`).
    """
    of_others = stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    if not of_others:
        return True
    return of_others == stat.S_IRGRP and found.st_uid == _ROOT != user and found.st_gid in groups
