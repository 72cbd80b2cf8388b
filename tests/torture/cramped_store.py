"""A store on a file system that fills up or becomes read-only under it; run by `fork_server.py`."""

import logging
import os
import random
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from faulty_store import Watch
from fork_server import Say
from model_store import ModelStore

CAPACITY_BYTES = 200 << 20  # more than the file system has


def run(say: Say, act: str, **arguments: Any) -> None:
    """Run the function that *act* names."""
    acts = {"fill": fill, "abort": abort, "look": look}
    acts[act](say, **arguments)


def fill(say: Say, mount_point: str, codec: str, durability: str, seed: int) -> None:
    """Put until the disk is full, and go on with what fits; then another file takes the rest, and gives it back."""
    model = ModelStore(Path(mount_point) / "store", CAPACITY_BYTES, codec, durability, random.Random(seed))
    hog = Path(mount_point) / "hog"
    model.open()
    num_puts = 0
    while model.capacity == CAPACITY_BYTES:
        model.put()
        num_puts += 1
    say(full_after=num_puts)
    model.assert_whole()

    capacities = [model.capacity]
    num_errors = _go_on(model, 60)
    capacities.append(model.capacity)
    take_the_rest(hog)
    num_errors += _go_on(model, 100)
    capacities.append(model.capacity)
    assert num_errors == 0, "a full disk stopped it"
    assert len(model.there) > 20, "hardly anything is left"
    say(capacities=capacities)
    while model.there:  # blocks can be deleted although there is no room
        model.delete()
        model.delete_one()
    model.assert_whole()
    hog.unlink()
    subprocess.run(["mount", "-o", "remount,size=400m", mount_point], check=True)
    for _ in range(20):
        model.put()
    model.assert_whole()
    assert model.capacity == CAPACITY_BYTES, "there is room again"
    model.close()
    model.open()
    model.assert_whole()
    model.close()
    say(num_errors=num_errors)


def abort(say: Say, mount_point: str, durability: str, seed: int) -> None:
    """The kernel makes the file system read-only under an open store, as it does after an I/O error of its own."""
    model = ModelStore(Path(mount_point) / "store", 8 << 20, "none", durability, random.Random(seed))
    model.open()
    for place in range(80):
        model.put("mixed")
        if place == 40:
            model.sync()
    stored = set(model.there)
    subprocess.run(["mount", "-o", "remount,abort", mount_point], check=True)
    say(stored=sorted(stored))
    num_errors = 0
    for _ in range(60):
        num_errors += model.try_anything() is not None
    say(num_errors=num_errors)
    with suppress(OSError):
        model.close()
    say(closed=True)


def look(say: Say, mount_point: str, durability: str, numbers: list[int]) -> None:
    """Open the store, read *numbers* and use it on; blocks that come back must be right, and the others are told."""
    watch = Watch()
    logging.getLogger("kvtier").addHandler(watch)
    model = ModelStore(Path(mount_point) / "store", 8 << 20, "none", durability, random.Random(0))
    try:
        model.open()
        good, faults = model.read_any(numbers)
        say(num_good=len(good), num_faults=len(faults), reason=watch.reason)
        model.put()
        model.close()
    except OSError as error:
        say(refused=str(error))


def _go_on(model: ModelStore, num_calls: int) -> int:
    num_errors = 0
    for _ in range(num_calls):
        num_errors += model.try_anything() is not None
        model.assert_as_expected()
    model.assert_whole()
    return num_errors


def take_the_rest(hog: Path) -> None:
    """Fill the file system to the last byte."""
    with hog.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(b"\xff" * size)
    assert os.statvfs(hog.parent).f_bavail == 0
