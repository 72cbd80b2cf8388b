"""Where runs are cut, and that a name says what is in a segment, whoever writes it."""

import random

import pytest
from chains import chain_keys, records_of

from kvtier.store.remote.objects.segment_names import MAX_BYTES, TOP, SegmentName, cut, level_of
from kvtier.store.remote_store import RemoteRecord


def keys_in(records: list[RemoteRecord]) -> list[bytes]:
    return [record.key for segment in cut(records) for record in segment.records]


def held(records: list[RemoteRecord]) -> dict[SegmentName, list[bytes]]:
    return {segment.name: [record.key for record in segment.records] for segment in cut(records)}


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 60, 3000])
def test_each_record_is_in_one_segment_in_the_order_of_its_run(num_blocks: int) -> None:
    records = records_of(chain_keys(num_blocks))

    assert keys_in(records) == [record.key for record in records]
    assert all(segment.name.last == segment.records[-1].key for segment in cut(records))


@pytest.mark.parametrize("seed", range(20))
def test_a_name_means_the_same_keys_however_a_chain_was_divided(seed: int) -> None:
    rng = random.Random(seed)
    stem = records_of(chain_keys(rng.randrange(1, 700)))
    branch = records_of([r.key for r in stem] + chain_keys(300, "branch", after=stem[-1].key[16:48]))
    whole = held(stem) | held(branch)

    for records in (stem, branch):
        places = sorted(rng.sample(range(len(records) + 1), min(6, len(records))))
        for start, end in zip([0, *places], [*places, len(records)], strict=True):
            for name, keys in held(records[start:end]).items():
                assert whole.setdefault(name, keys) == keys


def test_a_long_run_takes_few_segments() -> None:
    num_segments = [len(cut(records_of(chain_keys(4000, str(seed))))) for seed in range(10)]

    assert sum(num_segments) / len(num_segments) < 4000 / 100


def test_a_segment_has_no_more_than_its_bytes_but_for_a_block_alone() -> None:
    block_bytes = 5 << 20
    records = records_of(chain_keys(500), block_bytes)
    huge = records_of(chain_keys(3), MAX_BYTES + 1)

    sizes = [len(segment.records) * block_bytes for segment in cut(records)]
    assert max(sizes) <= MAX_BYTES
    assert sum(sizes) / len(sizes) >= 8 << 20
    assert [len(segment.records) for segment in cut(huge)] == [1, 1, 1]


def test_runs_that_alternate_are_cut_as_if_they_came_one_after_the_other() -> None:
    one, other = records_of(chain_keys(300, "one")), records_of(chain_keys(300, "other"))

    mixed = held([record for pair in zip(one, other, strict=True) for record in pair])

    assert mixed == held(one) | held(other)


def test_levels_halve() -> None:
    levels = [level_of(key) for key in chain_keys(40_000)]

    for level in range(6):
        assert sum(found == level for found in levels) == pytest.approx(40_000 / 2 ** (level + 1), rel=0.1)
    assert max(levels) == TOP


def test_a_name_is_one_folder_and_one_short_word() -> None:
    name = SegmentName(3, chain_keys(1)[0])

    folder, word = name.path.split("/")
    assert folder == name.namespace.hex()
    assert word.startswith("3-")
    assert len(word) < 50
