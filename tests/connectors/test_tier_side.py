"""vLLM's jobs on kvtier's disk: right rows, jobs told once, prefixes that leave from their end, no hole that stays."""

import mmap
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from chaos import FakeClock
from waiting import stop, wait_for

from kvtier.connectors.disk_below.disk_below import DiskBelow, InlineQueue
from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.vllm_offloading.request_chain import RequestChain
from kvtier.connectors.vllm_offloading.row_jobs import EndedRows
from kvtier.connectors.vllm_offloading.tier_side import MAX_AT_ONCE, PAUSE_S, Holes, TierSide
from kvtier.engine.config import DiskConfig, parse_bytes
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.transfer.lane import Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route

ROW_BYTES, NUM_ROWS = 64 << 10, 40
NAMESPACE = b"n" * 16
LONGEST_JOB_S = 60.0  # reached by defects only
BLOCK_TOKENS = 16


def key_of(number: int, group_id: int = 0) -> bytes:
    """As vLLM makes them: a hash, and the group."""
    return sha256(b"%d" % number).digest() + group_id.to_bytes(4, "big")


def bytes_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(ROW_BYTES)


class Prompt:
    """The keys of a request, as vLLM knows them: where the block of each ends."""

    def __init__(self, numbers: Sequence[int], groups: Sequence[int] = (0,)) -> None:
        self.end_tokens = {
            key_of(number, group_id): BLOCK_TOKENS * (place + 1)
            for group_id in groups
            for place, number in enumerate(numbers)
        }
        self.chain = RequestChain()
        self.chain.see(self.end_tokens)

    @property
    def keys(self) -> list[bytes]:
        return list(self.end_tokens)


class Tier:
    """A tier below a host pool, whose jobs are waited for."""

    def __init__(self, disk: DiskBelow, pool: memoryview, clock: FakeClock, longest_job_s: float) -> None:
        self.pool = pool
        self.side = TierSide(disk, pool, ROW_BYTES, longest_job_s, clock)
        self.job_id = 0

    def begin_store(self, prompt: Prompt, keys: Sequence[bytes]) -> None:
        """Have the blocks stored out of rows that are not in the order of the prompt, as vLLM does it."""
        self.job_id += 1
        rows = random.Random(self.job_id).sample(range(NUM_ROWS), len(keys))
        for key, row in zip(keys, rows, strict=True):
            self.row(row)[:] = bytes_of(key)
        shuffled = random.Random(self.job_id).sample(list(zip(keys, rows, strict=True)), len(keys))
        self.side.store(
            self.job_id,
            [key for key, _ in shuffled],
            [row for _, row in shuffled],
            {key: prompt.chain.parent(key) for key in keys},
            prompt.end_tokens,
        )

    def store(self, prompt: Prompt, keys: Sequence[bytes] | None = None) -> EndedRows:
        self.begin_store(prompt, prompt.keys if keys is None else keys)
        return self.ended()

    def load(self, keys: Sequence[bytes]) -> EndedRows:
        self.job_id += 1
        for row in range(len(keys)):
            self.row(row)[:] = bytes(ROW_BYTES)
        self.side.load(self.job_id, keys, range(len(keys)))
        return self.ended()

    def ended(self) -> EndedRows:
        """The job that has ended next, which is the last one that was begun."""
        ended: list[EndedRows] = []
        wait_for(lambda: bool(ended.extend(self.side.take_ended()) or ended))
        (job,) = ended
        assert job.job_id == self.job_id
        return job

    def row(self, number: int) -> memoryview:
        return self.pool[number * ROW_BYTES : (number + 1) * ROW_BYTES]

    def loaded(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys whose bytes are in the rows that the last load filled."""
        return [key for row, key in enumerate(keys) if self.row(row) == bytes_of(key)]

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.side.holds(key) for key in keys]


def tier_at(
    folder: Path, capacity: str = "64MiB", longest_job_s: float = LONGEST_JOB_S, read_timeout_s: float = 10.0
) -> Tier:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(NUM_ROWS * ROW_BYTES)
        pool = memoryview(mmap.mmap(file.fileno(), NUM_ROWS * ROW_BYTES))
    config = DiskConfig(path=str(folder), capacity=parse_bytes(capacity), read_timeout_s=read_timeout_s)
    disk = open_disk_below(config, NAMESPACE, lambda group_id: ROW_BYTES, [pool], num_groups=2)
    assert disk.wait_indexed(LONGEST_JOB_S)
    return Tier(disk, pool, FakeClock(), longest_job_s)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    opened = tier_at(tmp_path / "store")
    yield opened
    opened.side.close()


def test_blocks_come_back_right_also_in_the_next_process_and_groups_are_apart(tmp_path: Path) -> None:
    prompt = Prompt(range(10), groups=[0, 1])
    tier = tier_at(tmp_path / "store")
    first_group = prompt.keys[:10]

    stored = tier.store(prompt, first_group)
    assert sorted(stored.good) == sorted(stored.keys) == sorted(first_group)
    assert tier.held(prompt.keys) == [True] * 10 + [False] * 10
    tier.store(prompt, prompt.keys[10:])
    tier.side.close()
    tier = tier_at(tmp_path / "store")
    wanted = [prompt.keys[3], prompt.keys[13], prompt.keys[7]]
    loaded = tier.load(wanted)
    right = tier.loaded(wanted)
    tier.side.close()

    assert right == wanted
    assert (loaded.is_load, sorted(loaded.good)) == (True, sorted(wanted))


def test_a_load_fills_the_rows_that_were_meant_and_is_told_once(tier: Tier) -> None:
    prompt = Prompt(range(30))
    tier.store(prompt)
    beside = bytes(tier.row(3))

    wanted = [prompt.keys[place] for place in (29, 0, 14)]
    tier.load(wanted)

    assert tier.loaded(wanted) == wanted
    assert tier.side.take_ended() == []
    assert tier.row(3) == beside
    assert tier.side.counts.take() == {"loaded_blocks": 3, "stored_blocks": 30}


def test_a_block_that_is_damaged_is_not_good_is_counted_and_not_found_again(tmp_path: Path) -> None:
    prompt = Prompt(range(8))
    tier = tier_at(tmp_path / "store")
    tier.store(prompt)
    tier.side.close()
    (file,) = [f for f in (tmp_path / "store").rglob("*") if f.is_file() and bytes_of(prompt.keys[5]) in f.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(bytes_of(prompt.keys[5])) + 1000] ^= 1
    file.write_bytes(content)

    tier = tier_at(tmp_path / "store")
    loaded = tier.load(prompt.keys)
    held, counts = tier.held(prompt.keys), tier.side.counts.take()
    tier.load(prompt.keys[5:6])
    again = tier.side.counts.take()
    tier.side.close()

    assert again == {"failed_loads": 1}, "it is counted as damaged once"
    expected = [key for place, key in enumerate(prompt.keys) if place != 5]
    assert list(loaded.good) == expected
    assert held == [place != 5 for place in range(8)]
    assert counts == {"loaded_blocks": 7, "failed_loads": 1, "corrupt_blocks": 1}


def test_a_block_is_found_from_its_store_until_the_tier_is_closed(tier: Tier) -> None:
    prompt = Prompt(range(10))
    before = tier.held(prompt.keys)

    tier.store(prompt)
    stored = tier.held(prompt.keys)
    tier.side.close()

    assert (before, stored, tier.held(prompt.keys)) == ([False] * 10, [True] * 10, [False] * 10)


def test_what_leaves_a_full_disk_is_the_end_of_prefixes_although_vllm_gives_keys_in_no_order(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "store", "16MiB")
    prompts = [Prompt(range(first, first + 40)) for first in range(0, 20 * 40, 40)]
    for prompt in prompts:
        for start in (0, 20):  # a prompt that is computed in two steps is offered in two jobs
            tier.store(prompt, prompt.keys[start : start + 20])
    held = [tier.held(prompt.keys) for prompt in prompts]
    tier.side.close()

    assert 40 < sum(map(sum, held)) < 256
    for of_prompt in held:
        assert of_prompt == sorted(of_prompt, reverse=True)


def test_a_prompt_that_is_used_again_outlives_others_whichever_tier_it_came_from(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "store", "16MiB")
    used, prompts = Prompt(range(10_000, 10_020)), [Prompt(range(first, first + 20)) for first in range(0, 400, 20)]
    tier.store(used)
    for prompt in prompts:
        tier.store(prompt)
        tier.side.on_request_finished(used.chain, "used")
    held, other = tier.held(used.keys), tier.held(prompts[0].keys)
    tier.side.close()

    assert all(held)
    assert not any(other)


def test_a_disk_that_keeps_rows_for_too_long_is_closed_and_the_wait_ends(tmp_path: Path) -> None:
    prompt, other = Prompt(range(8)), Prompt(range(10, 18))
    tier = tier_at(tmp_path / "store", longest_job_s=0.2, read_timeout_s=1.0)
    tier.store(prompt)
    tier.store(other)
    assert tier.side.drain()
    stop(store_pid())
    tier.job_id += 1
    tier.side.load(tier.job_id, prompt.keys, range(8))

    has_drained = tier.side.drain()
    ended, held = tier.ended(), tier.held(other.keys)
    stored = tier.store(prompt)
    tier.side.close()

    assert not has_drained
    assert ended.good == stored.good == []
    assert not any(held), "what cannot be loaded is not found, or vLLM asks for it again and again"


def store_pid() -> int:
    """Pid of the store's process, a child of this one."""
    tasks = Path("/proc/self/task").iterdir()
    children = {child for task in tasks for child in (task / "children").read_text().split()}
    (pid,) = [int(pid) for pid in children if b"store_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def test_closing_lets_the_pool_go(tier: Tier) -> None:
    tier.store(Prompt(range(3)))

    tier.side.close()

    with pytest.raises(ValueError, match="released"):
        tier.pool[0]


class Refusing:
    """A tier on a disk that takes nothing while it `is_full`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.is_full = False
        pool = memoryview(bytearray(NUM_ROWS * ROW_BYTES))
        disk_tier = DiskTier(MemoryStore(64 << 20), NAMESPACE, self.clock)
        may_write = disk_tier.may_write
        disk_tier.may_write = lambda: not self.is_full and may_write()  # type: ignore[method-assign]
        disk = DiskBelow(disk_tier, self._lanes, 1, 1 << 30, lambda group_id: ROW_BYTES, lambda: None, self.clock)
        self.tier = Tier(disk, pool, self.clock, LONGEST_JOB_S)

    def _lanes(self, finished: InlineQueue) -> Mapping[Route, Lane]:
        return {route: ThreadLane(finished, route) for route in (Route.DISK_TO_HOST, Route.HOST_TO_DISK)}


def test_what_the_disk_did_not_take_is_offered_again_after_a_pause_with_its_parents() -> None:
    refusing, prompt = Refusing(), Prompt(range(10))
    tier, side = refusing.tier, refusing.tier.side
    refusing.is_full = True
    refused = tier.store(prompt)
    refusing.is_full = False

    too_soon = side.take_unstored()
    refusing.clock.now += PAUSE_S
    holes = side.take_unstored()
    tier.store(prompt, list(holes))
    refusing.clock.now += PAUSE_S

    assert refused.good == []
    assert too_soon == {}
    assert holes == {key: prompt.chain.parent(key) for key in prompt.keys}
    assert all(tier.held(prompt.keys))
    assert side.take_unstored() == {}
    assert side.counts.take() == {"stored_blocks": 10, "unstored_blocks": 10}


def test_holes_that_were_filled_meanwhile_or_stay_are_offered_as_such() -> None:
    refusing, prompt = Refusing(), Prompt(range(4))
    tier, side = refusing.tier, refusing.tier.side
    refusing.is_full = True
    tier.store(prompt)
    refusing.is_full = False
    tier.store(prompt, prompt.keys[:2])  # another request has computed them
    refusing.clock.now += PAUSE_S

    holes = side.take_unstored()
    side.put_back(holes)
    refusing.clock.now += PAUSE_S

    assert list(holes) == prompt.keys[2:]
    assert side.take_unstored() == holes


def test_holes_of_a_group_are_filled_by_blocks_of_that_group_alone() -> None:
    refusing, prompt = Refusing(), Prompt(range(3), groups=[0, 1])
    tier, side = refusing.tier, refusing.tier.side
    refusing.is_full = True
    tier.store(prompt)
    refusing.is_full = False
    tier.store(prompt, [prompt.keys[0], prompt.keys[4], prompt.keys[5]])  # one of the first group, two of the second
    refusing.clock.now += PAUSE_S

    assert set(side.take_unstored()) == {prompt.keys[1], prompt.keys[2], prompt.keys[3]}


def test_the_holes_that_were_noted_first_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm_offloading.tier_side.MAX_HOLES", 3)
    clock = FakeClock()
    holes = Holes(clock)
    for number in range(5):
        holes.add(key_of(number), None)
    clock.now += PAUSE_S

    assert len(holes) == 3
    assert list(holes.take()) == [key_of(number) for number in (2, 3, 4)]


def test_holes_are_offered_a_few_at_a_time() -> None:
    refusing, prompts = Refusing(), [Prompt(range(first, first + 40)) for first in (0, 40)]
    refusing.is_full = True
    for prompt in prompts:
        refusing.tier.store(prompt)
    refusing.clock.now += PAUSE_S

    num_offered = [len(refusing.tier.side.take_unstored())]
    refusing.clock.now += PAUSE_S
    num_offered.append(len(refusing.tier.side.take_unstored()))

    assert num_offered == [MAX_AT_ONCE, 80 - MAX_AT_ONCE]


def test_a_job_that_could_not_be_begun_is_told_as_failed() -> None:
    tier = Refusing().tier
    with pytest.raises(IndexError, match="chunk 40"):
        tier.side.load(1, [key_of(1)], [NUM_ROWS])

    tier.side.fail(1, [key_of(1)], is_load=True)

    (ended,) = tier.side.take_ended()
    assert (ended.job_id, ended.good) == (1, ())
    assert tier.side.counts.take() == {"failed_loads": 1}


def test_a_chain_takes_in_what_vllm_adds_while_a_request_runs() -> None:
    prompt, chain = Prompt(range(6), groups=[0, 1]), RequestChain()
    by_place = sorted(prompt.end_tokens, key=prompt.end_tokens.__getitem__)  # group by group, as the prompt goes on

    for num_known in (4, 4, 12):
        chain.see({key: prompt.end_tokens[key] for key in by_place[:num_known]})

    for group_id in (0, 1):
        keys = [key_of(number, group_id) for number in range(6)]
        assert [chain.parent(key) for key in keys] == [None, *keys[:-1]]
    assert chain.parent(key_of(99)) is None
