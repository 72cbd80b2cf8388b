"""Weights that are updated while an engine runs: its blocks before and after, and those of other engines, are apart."""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from chaos import FakeClock
from vllm_connector_bed import FULL, HYBRID, ConnectorBed, FakeRequest
from waiting import wait_for

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.vllm_offloading.tier_side import PAUSE_S, TierSide
from kvtier.connectors.weights_lineage import WeightsLineage
from kvtier.engine.config import DiskConfig, parse_bytes
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockName

NUM_TOKENS = 42  # ten blocks and two tokens
NAME = BlockName(bytes(32))


@pytest.fixture(params=[FULL, HYBRID], ids=["full", "hybrid"])
def bed(request: pytest.FixtureRequest) -> Iterator[ConnectorBed]:
    bed = ConnectorBed(request.param, MemoryStore(1 << 20))
    yield bed
    bed.check()
    bed.close()


def test_a_lineage_has_names_of_its_own_and_each_new_one_again() -> None:
    lineage, other = WeightsLineage(), WeightsLineage()
    assert lineage.name(NAME) == other.name(NAME) == NAME

    seen = {NAME}
    for each in (lineage, other, lineage):
        each.start_new_lineage()
        seen.add(each.name(NAME))

    assert len(seen) == 4
    assert lineage.name(NAME) == lineage.name(NAME)
    assert lineage.name(BlockName(b"x" * 32)) != lineage.name(NAME)


# The connector of vLLM.


def test_what_is_computed_after_a_reset_is_found_by_this_engine_and_by_no_other(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))

    bed.side.start_new_lineage()
    assert bed.side.clear()

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 40
    bed.tiers.close()
    bed.start_engine()  # with the old weights, or this one restarted
    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 40


def test_a_reset_while_the_sidecar_is_away_finds_nothing_of_before_once_it_is_back(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    bed.sidecar.die()
    bed.listen()

    bed.side.start_new_lineage()
    assert bed.side.clear(), "there is no sidecar to clear"
    bed.make_well()

    assert bed.run(bed.request(prompt)) == 0
    bed.tiers.close()
    bed.start_engine()
    assert bed.run(bed.request(prompt)) == 40, "another engine does not find what is on disk"


def begun(bed: ConnectorBed, prompt: Sequence[int]) -> FakeRequest:
    """A request that waits for the step which computes it."""
    request = bed.request(prompt)
    assert bed.match(request) == 0
    bed.allocate(request, 0)
    return request


def test_what_a_step_copies_while_the_cache_is_reset_is_never_published(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    request = begun(bed, prompt)

    bed.step({request.request_id: NUM_TOKENS}, request)
    request.num_computed_tokens = NUM_TOKENS
    assert bed.step({request.request_id: 0}, request, meet=bed.side.start_new_lineage).stores
    bed.listen()
    bed.finish(request)

    assert bed.side.counts.stored_blocks == 0
    assert bed.leased() == 0
    assert bed.side.clear()
    bed.tiers.close()
    bed.start_engine()
    assert bed.run(bed.request(prompt)) == 0


def test_what_is_being_digested_while_the_cache_is_reset_is_never_published(bed: ConnectorBed) -> None:
    request = begun(bed, bed.prompt(NUM_TOKENS))
    bed.threads.is_held = True
    bed.step({request.request_id: NUM_TOKENS}, request)
    request.num_computed_tokens = NUM_TOKENS
    bed.end(request)
    assert bed.side.is_digesting

    bed.side.start_new_lineage()
    bed.threads.is_held = False
    bed.threads.go_on()

    assert not bed.side.is_digesting
    assert bed.side.counts.stored_blocks == 0
    bed.finish(request)
    assert bed.leased() == 0


def test_a_request_that_waits_beyond_a_reset_finds_nothing_of_before(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    waiting = bed.request(prompt)
    bed.side.num_matched(waiting, 0)

    bed.side.start_new_lineage()

    assert bed.match(waiting) == 0
    bed.side.on_finished(waiting)
    assert bed.leased() == 0


def test_a_request_that_runs_beyond_a_reset_stores_nothing_more(bed: ConnectorBed) -> None:
    """What vLLM has of it was computed with other weights, in part or as a whole."""
    request = begun(bed, bed.prompt(NUM_TOKENS))
    bed.step({request.request_id: 20}, request)
    request.num_computed_tokens = 20
    num_stored = bed.side.counts.stored_blocks

    bed.side.start_new_lineage()
    bed.clock.now += 1.0
    bed.step({request.request_id: 22}, request)
    request.num_computed_tokens = NUM_TOKENS
    bed.finish(request)

    assert bed.side.counts.stored_blocks == num_stored


# The tier below vLLM's own offloading, whose disk outlives the engine.


ROW_BYTES = 4096
KEYS = [sha256(b"%d" % number).digest() + bytes(4) for number in range(5)]


class Tier:
    """A tier on one store, whose pool has a row for each of `KEYS`."""

    def __init__(self, folder: Path) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(len(KEYS) * ROW_BYTES)
            self.pool = memoryview(mmap.mmap(file.fileno(), len(KEYS) * ROW_BYTES))
        config = DiskConfig(path=str(folder), capacity=parse_bytes("16MiB"))
        disk = open_disk_below(config, b"n" * 16, lambda group_id: ROW_BYTES, [self.pool])
        assert disk.wait_indexed(60.0)
        self.clock = FakeClock()
        self.side = TierSide(disk, self.pool, ROW_BYTES, 60.0, self.clock)

    def store(self, weights: bytes) -> None:
        """Have blocks stored that these weights decide."""
        self.pool[:] = weights * (len(self.pool) // len(weights))
        parents = dict(zip(KEYS, [None, *KEYS], strict=False))
        self.side.store(1, KEYS, range(len(KEYS)), parents, {key: place for place, key in enumerate(KEYS)})
        self.wait_ended()

    def load(self) -> bytes:
        """The bytes that are loaded of the first block."""
        self.pool[:] = bytes(len(self.pool))
        self.side.load(2, KEYS[:1], [0])
        self.wait_ended()
        return bytes(self.pool[:3])

    def wait_ended(self) -> None:
        wait_for(lambda: bool(self.side.take_ended()))

    def num_held(self) -> int:
        return sum(self.side.holds(key) for key in KEYS)


def test_a_disk_below_vllms_offloading_keeps_blocks_before_and_after_a_reset_apart(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "store")
    tier.store(b"old\n")
    assert tier.num_held() == 5

    tier.side.start_new_lineage()
    assert tier.num_held() == 0
    tier.store(b"new\n")
    assert (tier.num_held(), tier.load()) == (5, b"new")
    tier.side.close()

    restarted = Tier(tmp_path / "store")  # it loads its weights from their files, which the namespace says
    assert (restarted.num_held(), restarted.load()) == (5, b"old")
    restarted.side.close()


def test_what_the_disk_did_not_take_before_a_reset_is_not_offered_again_after_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "store")
    tier.side.put_back(dict.fromkeys(KEYS, None))

    tier.side.start_new_lineage()
    tier.side.put_back({KEYS[0]: None})

    tier.clock.now += PAUSE_S
    assert list(tier.side.take_unstored()) == [KEYS[0]]
    tier.side.close()
