"""A real file system that is full, read-only, or gone read-only under an open store."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cramped_store import take_the_rest
from forks import ForkServer, describe
from mounts import Mount
from torture_blocks import blob_of, chain, open_store, read_numbers

from kvtier.store.durability import Durability

pytestmark = pytest.mark.long


@pytest.mark.parametrize("durability", list(Durability))
def test_a_full_disk_costs_blocks_but_never_the_state(
    forks: ForkServer, mount: Mount, durability: str, seed: int
) -> None:
    point = mount("-t", "tmpfs", "-o", "size=48m", "torture")

    ended = forks.run(
        "cramped_store", act="fill", mount_point=str(point), codec="none", durability=durability, seed=seed
    )

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}")


def test_a_disk_that_is_full_from_the_start_is_an_error(mount: Mount, seed: int) -> None:
    point = mount("-t", "tmpfs", "-o", "size=64k", "torture")

    with pytest.raises(OSError, match="No space left"):
        open_store(point / "store", 1 << 20, "none", Durability.PROCESS)

    subprocess.run(["mount", "-o", "remount,size=64m", str(point)], check=True)
    with open_store(point / "store", 1 << 20, "none", Durability.PROCESS) as store:
        store.put_many([blob_of(0)])
        store.check()


@pytest.mark.parametrize("durability", list(Durability))
def test_a_store_opens_warm_on_a_disk_that_somebody_else_has_filled(mount: Mount, durability: str) -> None:
    point = mount("-t", "tmpfs", "-o", "size=64m", "torture")
    numbers = chain("mixed", 1)
    with open_store(point / "store", 1 << 20, "none", durability) as store:
        store.put_many([blob_of(number) for number in numbers])
    take_the_rest(point / "hog")

    for _ in range(3):
        with open_store(point / "store", 1 << 20, "none", durability) as store:
            assert read_numbers(store, numbers) == (numbers, {})
            store.check()
    with open_store(point / "store", 512 << 10, "none", durability) as store:
        store.check()


@pytest.mark.parametrize("durability", list(Durability))
def test_a_read_only_disk_is_an_error_and_the_store_is_whole_when_it_is_writable_again(
    mount: Mount, durability: str
) -> None:
    point = mount("-t", "tmpfs", "-o", "size=64m", "torture")
    numbers = chain("mixed", 1)
    with open_store(point / "store", 1 << 20, "none", durability) as store:
        store.put_many([blob_of(number) for number in numbers])
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)

    with pytest.raises(OSError, match="Read-only"):
        open_store(point / "store", 1 << 20, "none", durability)

    subprocess.run(["mount", "-o", "remount,rw", str(point)], check=True)
    with open_store(point / "store", 1 << 20, "none", durability) as store:
        assert read_numbers(store, numbers) == (numbers, {})
        store.put_many([blob_of(number) for number in chain("mixed", 2)])
        store.check()


@pytest.mark.parametrize("durability", list(Durability))
def test_a_file_system_that_gives_up_under_an_open_store_never_makes_wrong_bytes(
    forks: ForkServer, mount: Mount, tmp_path: Path, durability: str, seed: int
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    point = mount("-o", "loop", str(image))

    ended = forks.run("cramped_store", act="abort", mount_point=str(point), durability=durability, seed=seed)
    subprocess.run(["umount", str(point)], check=True)
    mount("-o", "loop", str(image))
    (stored,) = ended.of("stored")
    looked = forks.run("cramped_store", act="look", mount_point=str(point), durability=durability, numbers=stored)

    print(f"{durability}: {describe(ended.status)}, then {describe(looked.status)}, {looked.lines}")
    assert ended.of("error") + looked.of("error") == [], f"TORTURE_SEED={seed} {durability}"
    if durability is Durability.COMMIT:
        ended.assert_fine(f"TORTURE_SEED={seed}")
        looked.assert_fine(f"TORTURE_SEED={seed}")
        assert looked.of("num_good") == [len(stored)]
