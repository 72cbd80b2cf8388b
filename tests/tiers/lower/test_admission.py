"""Admission: which blocks are let in to the disk, under and over the budget; never a block behind a hole."""

import hashlib
import random
from collections.abc import Sequence

import pytest
from chaos import FakeClock

from kvtier.tiers.lower.admission import DAY_S, MAX_PROMISED, RESERVE, Admission, WriteBudget
from kvtier.tiers.naming.block_hash import BlockName

DAYS_BYTES = 1000
HOUR_S = DAY_S / 24


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def budget(clock: FakeClock) -> WriteBudget:
    return WriteBudget(DAYS_BYTES, clock)


def names_of(text: str, start: int, end: int) -> list[BlockName]:
    """The chained names of blocks *start* to *end* of a document that is called *text*."""
    return [BlockName(hashlib.sha256(f"{text} {i}".encode()).digest()) for i in range(start, end)]


BLOCK_BYTES = 5
RESERVE_BYTES = round(RESERVE * DAYS_BYTES)


class Disk:
    """A disk of names and an admission to it; an admitted block is there at once, and paid for."""

    def __init__(self, budget: WriteBudget, num_blocks: int = 10_000) -> None:
        self.budget = budget
        self.blocks: set[tuple[int, BlockName]] = set()
        self.admission = Admission(budget, num_blocks, lambda group_id, name: (group_id, name) in self.blocks)

    def ask(
        self,
        names: Sequence[BlockName],
        parents: Sequence[BlockName | None],
        group_id: int = 0,
    ) -> list[bool]:
        """Ask for blocks; those that are admitted are on the disk now. One answer for each."""
        admitted = self.admission.admit(group_id, names, parents, BLOCK_BYTES)
        self.admission.check()
        self.blocks.update((group_id, name) for name, is_admitted in zip(names, admitted, strict=True) if is_admitted)
        self.budget.spend(sum(admitted) * BLOCK_BYTES)
        return admitted

    def ask_document(self, text: str, start: int, end: int, step: int = 1) -> list[bool]:
        """Ask for blocks *start* to *end* in one call, in chain order or (-1) tail first; answers in chain order."""
        names, parents = names_of(text, start, end), [None, *names_of(text, 0, end)][start:end]
        return self.ask(names[::step], parents[::step])[::step]


@pytest.fixture
def disk(budget: WriteBudget) -> Disk:
    return Disk(budget)


@pytest.fixture
def disk_over_budget(disk: Disk) -> Disk:
    """A disk of whose budget only the reserve is left."""
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES)
    return disk


def test_under_the_budget_everything_is_admitted(disk: Disk) -> None:
    assert disk.ask_document("a", 0, 50) == [True] * 50
    assert disk.ask_document("b", 20, 50, -1) == [True] * 30


def test_without_a_limit_everything_is_admitted_always(clock: FakeClock) -> None:
    disk = Disk(WriteBudget(None, clock))

    assert disk.ask_document("a", 0, 5000) == [True] * 5000
    assert disk.admission.statistics().num_admitted == 5000


def test_over_the_budget_nothing_is_admitted_the_first_time(disk_over_budget: Disk) -> None:
    assert disk_over_budget.ask_document("a", 0, 20) == [False] * 20


@pytest.mark.parametrize("step", [1, -1])
def test_over_the_budget_what_was_refused_is_admitted_when_it_is_used_again(disk_over_budget: Disk, step: int) -> None:
    disk_over_budget.ask_document("a", 0, 20, step)

    assert disk_over_budget.ask_document("a", 0, 20, step) == [True] * 20


@pytest.mark.parametrize("step", [1, -1])
def test_when_a_document_goes_on_only_the_part_that_was_used_before_is_admitted(
    disk_over_budget: Disk, step: int
) -> None:
    disk_over_budget.ask_document("a", 0, 20)

    assert disk_over_budget.ask_document("a", 0, 30, step) == [True] * 20 + [False] * 10


def test_a_block_behind_one_that_is_refused_in_the_same_call_is_refused(disk_over_budget: Disk) -> None:
    disk_over_budget.ask_document("a", 0, 5)
    disk_over_budget.ask_document("a", 6, 10)  # block 5 was never asked for

    assert disk_over_budget.ask_document("a", 0, 10) == [True] * 5 + [False] * 5


def test_the_budget_s_last_bytes_go_to_the_front_of_a_document(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - 7 * BLOCK_BYTES)

    assert disk.ask_document("a", 0, 20, -1) == [True] * 7 + [False] * 13


def test_what_is_admitted_in_a_call_counts_against_the_budget_before_it_is_spent(disk: Disk) -> None:
    assert sum(disk.ask_document("a", 0, 300)) == (DAYS_BYTES - RESERVE_BYTES) // BLOCK_BYTES


def test_a_new_block_behind_a_refused_one_is_refused_though_there_is_budget_again(
    disk_over_budget: Disk, clock: FakeClock
) -> None:
    disk_over_budget.ask_document("a", 0, 10)
    clock.now += DAY_S

    assert disk_over_budget.ask_document("a", 10, 20) == [False] * 10


def test_a_block_behind_one_on_disk_is_admitted(disk: Disk, clock: FakeClock) -> None:
    disk.ask_document("a", 0, 10)
    disk.budget.spend(700)
    disk.ask_document("a", 10, 20)

    assert disk.ask_document("a", 10, 20) == [True] * 10


def test_a_new_block_behind_one_that_was_refused_and_is_on_disk_now_is_admitted(
    disk_over_budget: Disk, clock: FakeClock
) -> None:
    disk_over_budget.ask_document("a", 0, 10)
    disk_over_budget.ask_document("a", 0, 10)
    clock.now += DAY_S

    assert disk_over_budget.ask_document("a", 10, 20) == [True] * 10


def test_a_new_block_behind_one_that_was_refused_and_is_promised_now_is_admitted(
    disk_over_budget: Disk, clock: FakeClock
) -> None:
    (trunk,), (one,), (other,) = names_of("trunk", 0, 1), names_of("one", 0, 1), names_of("other", 0, 1)
    disk_over_budget.ask([one, trunk], [trunk, None])
    clock.now += DAY_S

    assert disk_over_budget.ask([one], [trunk]) == [True]
    assert disk_over_budget.ask([other], [trunk]) == [True]


def test_a_document_that_was_begun_at_its_tail_is_written_to_its_front(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - 5 * BLOCK_BYTES)

    answers = [disk.ask_document("a", start, start + 5) for start in range(45, -1, -5)]

    assert answers == [[True] * 5] * 10


def test_a_document_whose_tail_was_refused_may_be_written_in_its_front_part(
    disk_over_budget: Disk, clock: FakeClock
) -> None:
    disk_over_budget.ask_document("a", 10, 20)
    clock.now += DAY_S / 10

    assert disk_over_budget.ask_document("a", 0, 10) == [True] * 10


def test_a_promise_reaches_back_over_blocks_of_the_same_call_never_asked_for_before(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - BLOCK_BYTES)
    disk.ask_document("a", 9, 10)

    assert disk.ask_document("a", 5, 10, -1)[:4] == [True] * 4
    assert disk.ask_document("a", 0, 5) == [True] * 5


def test_a_promise_is_kept_once(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - BLOCK_BYTES)
    disk.ask_document("a", 1, 2)
    disk.ask_document("a", 0, 1)
    disk.blocks.clear()  # dropped, and long ago

    assert disk.ask_document("a", 0, 1) == [False]


def test_promises_to_one_group_do_not_bind_another(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - BLOCK_BYTES)
    first, second = names_of("a", 0, 2)
    disk.ask([second], [first], group_id=1)

    assert disk.ask([first], [None], group_id=0) == [False]
    assert disk.ask([first], [None], group_id=1) == [True]


def test_a_use_in_one_group_is_none_in_another(disk_over_budget: Disk) -> None:
    (name,) = names_of("a", 0, 1)
    disk_over_budget.ask([name], [None], group_id=0)

    assert disk_over_budget.ask([name], [None], group_id=1) == [False]


def test_a_block_that_needs_none_before_it_is_admitted_by_itself(disk_over_budget: Disk) -> None:
    names = names_of("a", 0, 5)
    disk_over_budget.ask(names, [None] * 5)

    assert disk_over_budget.ask(names[3:], [None] * 2) == [True] * 2


def test_chains_of_one_call_do_not_disturb_each_other(disk_over_budget: Disk) -> None:
    disk_over_budget.ask_document("a", 0, 3)
    a, b = names_of("a", 0, 3), names_of("b", 0, 3)

    answers = disk_over_budget.ask([b[2], a[2], a[0], b[0], b[1], a[1]], [b[1], a[1], None, None, b[0], a[0]])

    assert answers == [False, True, True, False, False, True]


def test_branches_share_the_fate_of_their_trunk_and_not_each_other_s(disk_over_budget: Disk) -> None:
    (trunk,), (one,), (other,) = names_of("trunk", 0, 1), names_of("one", 0, 1), names_of("other", 0, 1)
    disk_over_budget.ask([one, trunk], [trunk, None])

    assert disk_over_budget.ask([other, one, trunk], [trunk, trunk, None]) == [False, True, True]


def test_when_the_reserve_is_used_up_not_even_the_second_time_helps(disk_over_budget: Disk) -> None:
    disk_over_budget.ask_document("a", 0, 10)
    disk_over_budget.budget.spend(RESERVE_BYTES - 4 * BLOCK_BYTES)

    assert disk_over_budget.ask_document("a", 0, 10) == [True] * 4 + [False] * 6


def test_decisions_are_counted_in_blocks_and_bytes(disk: Disk) -> None:
    disk.budget.spend(DAYS_BYTES - RESERVE_BYTES - 7 * BLOCK_BYTES)
    disk.ask_document("a", 0, 20)

    statistics = disk.admission.statistics()

    assert (statistics.num_admitted, statistics.admitted_bytes) == (7, 35)
    assert (statistics.num_refused, statistics.refused_bytes) == (13, 65)


def test_asking_for_nothing_changes_nothing(disk: Disk) -> None:
    assert disk.ask([], []) == []


def test_a_block_twice_in_one_call_is_a_mistake(disk: Disk) -> None:
    (name,) = names_of("a", 0, 1)

    with pytest.raises(AssertionError, match="twice"):
        disk.ask([name, name], [None, None])


def test_promises_that_are_never_kept_do_not_pile_up(disk: Disk) -> None:
    names = names_of("a", 0, 2 * MAX_PROMISED + 2048)

    for start in range(0, len(names), 2048):  # each by itself, behind one that never comes
        batch = names[start : start + 2048]
        disk.admission.admit(0, batch[1::2], batch[0::2], block_bytes=0)

    disk.admission.check()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_what_is_on_disk_has_no_holes_and_stays_within_the_budget(seed: int, clock: FakeClock) -> None:
    """Documents with common beginnings, used at random; what is dirty comes in mixed batches, children first."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    disk = Disk(WriteBudget(DAYS_BYTES, clock), num_blocks=300)
    parent_of: dict[BlockName, BlockName | None] = {}
    documents: list[list[BlockName]] = []
    longest = 40
    num_asked = 0

    for step in range(400):
        clock.now += rng.choice([0, 60, HOUR_S, 3 * HOUR_S])
        if len(documents) < 5 or rng.random() < 0.3:
            trunk = rng.choice(documents)[: rng.randrange(longest)] if documents and rng.random() < 0.7 else []
            new = names_of(f"{seed} {step}", 0, rng.randrange(1, longest + 1 - len(trunk)))
            documents.append([*trunk, *new])
            parent_of.update(zip(documents[-1], [None, *documents[-1][:-1]], strict=True))

        group_id = rng.randrange(2)
        dirty = {name for document in rng.sample(documents, min(3, len(documents))) for name in document}
        dirty = {name for name in dirty if (group_id, name) not in disk.blocks}
        while dirty:
            leaves = sorted(dirty - {parent for name in dirty if (parent := parent_of[name]) is not None})
            batch: list[BlockName] = []
            for name in rng.sample(leaves, rng.randrange(1, len(leaves) + 1)):
                run: BlockName | None = name
                while run in dirty and len(batch) < 8 and not any(parent_of[other] == run for other in dirty - {run}):
                    dirty.remove(run)
                    batch.append(run)
                    run = parent_of[run]
            rng.shuffle(batch)
            disk.ask(batch, [parent_of[name] for name in batch], group_id)
            num_asked += len(batch)
            clock.now += rng.choice([0, 0, 0, 30])

        for group, name in disk.blocks:
            parent = parent_of[name]
            assert parent is None or (group, parent) in disk.blocks, "a hole"
        statistics = disk.admission.statistics()
        assert statistics.num_admitted + statistics.num_refused == num_asked
        overdrawn = 3 * longest * BLOCK_BYTES  # by documents that were begun
        assert statistics.admitted_bytes <= (clock.now / DAY_S + 1) * DAYS_BYTES + overdrawn

        inner = {(group, parent) for group, name in disk.blocks if (parent := parent_of[name]) is not None}
        tails = sorted(disk.blocks - inner)
        disk.blocks.difference_update(rng.sample(tails, rng.randrange(len(tails) // 4 + 1)))

    assert statistics.num_refused > 0
    assert statistics.num_admitted > 0
