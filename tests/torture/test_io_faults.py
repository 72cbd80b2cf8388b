"""While the medium fails, is full or slow, every call works or raises OSError; afterwards the store works again."""

import random
from pathlib import Path

import pytest
from forks import ForkServer

from kvtier.store.durability import Durability

pytestmark = pytest.mark.long


def survive_faults(
    forks: ForkServer, folder: Path, durability: str, seed: int, num_stores: int, num_rounds: int
) -> None:
    """Many rounds of faults, a new store each *num_rounds* of them."""
    rng = random.Random(f"{seed} {durability}")
    num_hits, num_errors, unusable, emptied = 0, 0, list[str](), list[str]()
    for store_id in range(num_stores):
        child = forks.start(
            "faulty_store",
            act="rounds",
            folder=str(folder / str(store_id)),
            codec=rng.choice(["none", "zstd-plane-2"]),
            durability=durability,
            seed=rng.randrange(1 << 32),
            num_rounds=num_rounds,
        )
        ended = child.wait()
        ended.assert_fine(f"TORTURE_SEED={seed} {durability} store {store_id}, {ended.of('round')[-1:]}")
        num_hits += ended.of("hits")[0]
        num_errors += ended.of("num_errors")[0]
        unusable += ended.of("unusable")
        emptied += ended.of("emptied")
    print(
        f"{durability}: {num_stores * num_rounds} rounds, {num_hits} faults, {num_errors} errors, "
        f"{len(unusable)} times unusable until opened again, {len(emptied)} times emptied",
        flush=True,
    )
    assert num_hits > num_stores  # else no fault was met
    assert unusable == []
    assert emptied == []


@pytest.mark.parametrize("durability", list(Durability))
def test_every_call_works_or_raises_while_io_fails(
    shimmed_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    survive_faults(shimmed_forks, tmp_path, durability, seed, num_stores=1, num_rounds=12)


@pytest.mark.slow
@pytest.mark.parametrize("durability", list(Durability))
def test_every_call_works_or_raises_while_io_fails_hundreds_of_times(
    shimmed_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    survive_faults(shimmed_forks, tmp_path, durability, seed, num_stores=15, num_rounds=25)


@pytest.mark.parametrize("durability", list(Durability))
def test_an_io_error_while_opening_costs_no_record(
    shimmed_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    ended = shimmed_forks.run(
        "faulty_store", act="open", folder=str(tmp_path / "store"), durability=durability, seed=seed
    )

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}, {ended.of('failed')[-1:]}")
    assert len(ended.of("failed")) > 10


@pytest.mark.parametrize("durability", list(Durability))
def test_a_change_that_fails_at_any_write_leaves_the_store_as_it_was_and_usable(
    shimmed_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    folder = tmp_path / "store"

    ended = shimmed_forks.run("faulty_store", act="change", folder=str(folder), durability=durability, seed=seed)

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}, {ended.of('failed')[-1:]}")
    if durability is Durability.COMMIT:
        assert len(ended.of("failed")) > 3


@pytest.mark.parametrize("codec", ["none", "zstd-plane-2"])
def test_a_medium_that_cannot_be_read_costs_only_those_reads(
    shimmed_forks: ForkServer, tmp_path: Path, codec: str, seed: int
) -> None:
    ended = shimmed_forks.run(
        "faulty_store", act="read", folder=str(tmp_path / "store"), codec=codec, durability="process", seed=seed
    )

    ended.assert_fine(f"TORTURE_SEED={seed} {codec}")
    assert ended.of("faults") == [{}, {}]  # short reads are continued, and a call that failed is repeated in pieces
    assert ended.of("hits")[0] > 0


@pytest.mark.parametrize("durability", list(Durability))
def test_reads_do_not_wait_for_a_medium_that_takes_long_to_sync(
    shimmed_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    ended = shimmed_forks.run(
        "faulty_store", act="slow", folder=str(tmp_path / "store"), durability=durability, seed=seed, sleep_s=0.5
    )

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}")
    (said,) = [line for line in ended.lines if "num_reads" in line]
    assert said["writing_s"] >= 0.5
    assert said["num_reads"] > 20  # one for each sync, had reads waited
