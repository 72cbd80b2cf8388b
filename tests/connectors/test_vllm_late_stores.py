"""What a step of vLLM's computed is stored at the start of the next one: whatever becomes of its request and its pages
in between, no wrong byte is stored."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm_connector_bed import BLOCK, FULL, HYBRID, MAX_STORED, ConnectorBed, FakeRequest, blocks_aligned

from kvtier.connectors.vllm_connector.counts import Unstored
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport
from kvtier.connectors.vllm_connector.vllm_request import overwritten_pages

NUM_TOKENS = 42  # ten blocks and two tokens


@pytest.fixture(params=[FULL, HYBRID], ids=["full", "hybrid"])
def bed(request: pytest.FixtureRequest) -> Iterator[ConnectorBed]:
    bed = ConnectorBed(request.param)
    bed.run(bed.request(bed.prompt(8)))  # its workers map the memory
    yield bed
    bed.check()
    bed.close()


@pytest.fixture
def full() -> Iterator[ConnectorBed]:
    bed = ConnectorBed(FULL)
    bed.run(bed.request(bed.prompt(8)))
    yield bed
    bed.check()
    bed.close()


def computed(bed: ConnectorBed, num_tokens: int = NUM_TOKENS) -> FakeRequest:
    """A request whose prompt a step has just computed."""
    request = bed.request(bed.prompt(num_tokens))
    bed.match(request)
    bed.allocate(request, 0)
    bed.step({request.request_id: num_tokens}, request)
    request.num_computed_tokens = num_tokens
    return request


def in_the_pages_of(bed: ConnectorBed, request: FakeRequest, num_matched: int, tokens: list[int]) -> FakeRequest:
    """A request that vLLM has given the pages of another one."""
    other = bed.request(tokens)
    other.pages = [list(ids) for ids in request.pages]
    bed.side.on_allocated(other, other.pages, num_matched)
    other.num_computed_tokens = num_matched
    return other


def with_a_hit(bed: ConnectorBed) -> FakeRequest:
    """A request for a prompt of which 40 tokens are stored and found."""
    document = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(document))
    other = bed.request(document)
    assert bed.match(other) == 40
    return other


def load_into_pages_of(bed: ConnectorBed, request: FakeRequest, other: FakeRequest) -> None:
    """End *request*, and give its pages to *other*, which loads its 40 tokens into them."""
    bed.side.on_finished(request)
    other.pages = [list(ids) for ids in request.pages]
    bed.side.on_allocated(other, other.pages, 40)
    other.num_computed_tokens = 40


def num_found(bed: ConnectorBed, request: FakeRequest) -> int:
    """How many tokens a new engine loads of the prompt; it raises if any page is then wrong."""
    bed.tiers.close()
    bed.start_engine()
    return bed.run(bed.request(request.tokens))


def num_stored(work: StepWork) -> int:
    """How many blocks of the first group the step's workers store."""
    return sum(len(copies.pages) for copies in work.stores if copies.group_id == 0)


def test_a_request_that_ends_in_the_step_that_computes_it_is_stored_in_the_next(bed: ConnectorBed) -> None:
    request = computed(bed)
    bed.side.on_finished(request)

    bed.step()
    bed.listen()

    assert num_found(bed, request) == 40


def test_pages_that_are_computed_anew_in_the_next_step_are_stored_before(bed: ConnectorBed) -> None:
    request = computed(bed)
    bed.side.on_finished(request)
    other = in_the_pages_of(bed, request, 0, bed.prompt(NUM_TOKENS))

    bed.step({other.request_id: NUM_TOKENS}, other)
    other.num_computed_tokens = NUM_TOKENS
    bed.end(other)

    assert num_found(bed, request) == 40
    assert num_found(bed, other) == 40


def test_pages_that_are_loaded_anew_in_the_next_step_are_stored_before(full: ConnectorBed) -> None:
    other = with_a_hit(full)
    request = computed(full)
    load_into_pages_of(full, request, other)

    work = full.step({other.request_id: 2}, other)
    full.check_pages(other)
    full.end(other)

    assert work.stores
    assert work.loads
    assert num_found(full, request) == 40


def test_pages_that_a_preempted_request_had_are_stored_before_others_write_to_them(bed: ConnectorBed) -> None:
    request = computed(bed)
    request.num_computed_tokens = 0  # and it waits for pages again
    other = in_the_pages_of(bed, request, 0, bed.prompt(NUM_TOKENS))

    bed.step({other.request_id: NUM_TOKENS}, other)
    other.num_computed_tokens = NUM_TOKENS
    bed.end(other)

    assert num_found(bed, request) == 40
    bed.side.on_finished(request)


def test_a_request_that_is_aborted_while_its_step_is_computed_is_stored_as_it_was_computed(full: ConnectorBed) -> None:
    request = full.request(full.prompt(NUM_TOKENS))
    full.match(request)
    full.allocate(request, 0)
    work = full.side.step({request.request_id: NUM_TOKENS}, {request.request_id: request.pages}.get)
    full.side.on_finished(request)

    full.work(work, lambda: full.compute_tokens(request, 0, NUM_TOKENS))
    full.step()
    full.listen()

    assert num_found(full, request) == 40


def test_pages_that_vllm_changes_first_are_not_stored(full: ConnectorBed) -> None:
    request = computed(full)
    full.side.on_finished(request)
    lost = request.pages[0][4:6]

    work = full.step(overwritten=lost)
    full.listen()

    assert num_stored(work) == 8
    assert full.side.counts.unstored_blocks[Unstored.FAILED] == 2
    assert num_found(full, request) == 16


def test_pages_that_vllm_changes_first_are_those_it_zeroes_and_those_it_copies_to() -> None:
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=4)]

    assert overwritten_pages(SimpleNamespace(new_block_ids_to_zero=[1, 2], kv_cache_block_copies=copies)) == {1, 2, 4}
    assert overwritten_pages(SimpleNamespace(new_block_ids_to_zero=None, kv_cache_block_copies=None)) == set()


def test_a_step_stores_a_bounded_number_of_blocks_and_the_next_ones_the_others(bed: ConnectorBed) -> None:
    request = computed(bed, 3 * MAX_STORED * BLOCK)

    works = []
    for _ in range(8):
        bed.listen()
        bed.clock.now += 0.03
        works.append(bed.step({request.request_id: 0}, request))
    bed.end(request)

    assert sum(map(num_stored, works)) == 3 * MAX_STORED
    for group_id in range(len(bed.groups)):
        stored = [sum(len(each.pages) for each in work.stores if each.group_id == group_id) for work in works]
        assert max(stored) == MAX_STORED
    assert num_found(bed, request) == blocks_aligned(bed.groups, request.num_tokens)


def test_what_found_too_few_slots_is_offered_once_more_when_its_request_ends(full: ConnectorBed) -> None:
    request = computed(full, MAX_STORED * BLOCK)
    first = full.step({request.request_id: 0}, request)

    full.side.on_finished(request)  # at once
    full.listen()
    last = full.step()
    full.listen()

    assert 0 < num_stored(first) < MAX_STORED
    assert num_stored(first) + num_stored(last) == MAX_STORED
    assert not any(full.side.counts.unstored_blocks.values())


def test_several_requests_of_a_step_share_its_bound(full: ConnectorBed) -> None:
    requests = [full.request(full.prompt(MAX_STORED * BLOCK)) for _ in range(2)]
    for request in requests:
        full.match(request)
        full.allocate(request, 0)
    full.reserve_ahead(2 * MAX_STORED)

    full.step({request.request_id: MAX_STORED * BLOCK for request in requests}, *requests)

    assert num_stored(full.step()) == MAX_STORED


def test_a_worker_that_was_not_called_first_has_stored_nothing(full: ConnectorBed) -> None:
    request = computed(full)
    work = full.side.step({}, {}.get)

    full.worker.begin(work)
    report = full.worker.report(work)
    assert report is not None
    full.side.on_report(report)
    full.finish(request)

    assert work.stores
    assert (report.stored, report.unstored) == ((), (work.number,))
    assert num_found(full, request) == 0


def copied_late(bed: ConnectorBed, num_tokens: int = NUM_TOKENS) -> FakeRequest:
    """A request that runs on, while the workers still have to copy what is late of its prompt's blocks."""
    request = computed(bed, num_tokens)
    bed.step({request.request_id: 0}, request)
    return request


def test_pages_that_a_running_request_keeps_are_copied_after_the_step(full: ConnectorBed) -> None:
    request = computed(full)
    num_before = full.side.counts.stored_blocks

    first = full.step({request.request_id: 0}, request)
    num_after_first = full.side.counts.stored_blocks
    second = full.step({request.request_id: 0}, request)
    num_after_second = full.side.counts.stored_blocks
    full.side.on_finished(request)
    third = full.step()

    assert [copies.is_late for copies in first.stores] == [True]
    assert [work.ends_late_stores for work in (first, second, third)] == [False, False, True]
    assert num_after_first == num_after_second == num_before, "no worker had to copy yet"
    assert full.side.counts.stored_blocks == num_before + 10


def test_pages_of_groups_that_forget_are_copied_before_the_step(bed: ConnectorBed) -> None:
    request = computed(bed)

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert {copies.group_id: copies.is_late for copies in work.stores} == {
        group_id: not group.forgets for group_id, group in enumerate(bed.groups)
    }
    assert num_found(bed, request) == 40


def test_late_copies_end_before_the_next_ones_of_the_request_are_taken_over(full: ConnectorBed) -> None:
    request = full.request(full.prompt(2 * NUM_TOKENS))
    full.match(request)
    full.allocate(request, 0)
    full.reserve_ahead(2 * NUM_TOKENS // BLOCK)
    for num_computed in (0, NUM_TOKENS):
        request.num_computed_tokens = num_computed
        full.step({request.request_id: NUM_TOKENS}, request)
    request.num_computed_tokens = 2 * NUM_TOKENS
    num_before = full.side.counts.stored_blocks

    full.step({request.request_id: 0}, request)
    num_after = full.side.counts.stored_blocks
    full.end(request)

    assert num_after == num_before + 10, "of the first step"
    assert num_found(full, request) == blocks_aligned(full.groups, 2 * NUM_TOKENS)


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "preempted"])
def test_pages_of_late_copies_are_copied_before_others_write_to_them(bed: ConnectorBed, ends: bool) -> None:
    request = copied_late(bed)
    if ends:
        bed.side.on_finished(request)
    other = in_the_pages_of(bed, request, 0, bed.prompt(NUM_TOKENS))

    work = bed.step({other.request_id: NUM_TOKENS}, other)
    other.num_computed_tokens = NUM_TOKENS
    bed.end(other, *([] if ends else [request]))

    assert work.ends_late_stores
    assert num_found(bed, request) == 40
    assert num_found(bed, other) == 40


def test_pages_of_late_copies_are_copied_before_a_load_writes_to_them(full: ConnectorBed) -> None:
    other = with_a_hit(full)
    request = copied_late(full)
    load_into_pages_of(full, request, other)

    full.step({other.request_id: 2}, other)
    full.check_pages(other)
    full.end(other)

    assert num_found(full, request) == 40


def test_a_request_that_runs_again_in_other_pages_does_not_keep_those_of_before(full: ConnectorBed) -> None:
    request = copied_late(full)
    before = [list(ids) for ids in request.pages]
    full.allocate(request, 0)  # preempted, and scheduled again at once
    other = full.request(full.prompt(NUM_TOKENS))
    other.pages = before
    full.side.on_allocated(other, other.pages, 0)

    full.step({request.request_id: NUM_TOKENS, other.request_id: NUM_TOKENS}, request, other)
    request.num_computed_tokens = other.num_computed_tokens = NUM_TOKENS
    full.end(request, other)

    assert num_found(full, request) == 40


def test_late_copies_from_pages_that_vllm_changes_first_are_discarded(full: ConnectorBed) -> None:
    request = copied_late(full)
    full.side.on_finished(request)

    full.step(overwritten=request.pages[0][4:6])
    full.listen()

    assert full.side.counts.unstored_blocks[Unstored.FAILED] == 10
    assert full.leased() == 0
    assert num_found(full, request) == 0


def test_a_block_is_found_once_all_workers_have_copied_their_parts() -> None:
    bed = ConnectorBed(FULL, num_workers=2)
    bed.run(bed.request(bed.prompt(8)))
    num_before = bed.side.counts.stored_blocks
    request = computed(bed)
    work = bed.step({request.request_id: 0}, request)

    bed.side.on_report(WorkerReport(work.number, bed.tiers.boot, stored=(work.number,)))
    num_of_one = bed.side.counts.stored_blocks
    bed.side.on_report(WorkerReport(work.number, bed.tiers.boot, stored=(work.number,)))

    assert num_of_one == num_before
    assert bed.side.counts.stored_blocks == num_before + 10
    bed.end(request)
    bed.check()
    bed.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_one_worker_fails_to_copy_is_never_found(rank: int) -> None:
    bed = ConnectorBed(FULL, num_workers=2)
    bed.run(bed.request(bed.prompt(8)))
    request = computed(bed)
    bed.segments[rank].fail_after(0)

    bed.finish(request)

    assert bed.side.counts.unstored_blocks[Unstored.FAILED] == 10
    assert num_found(bed, request) == 0
    bed.check()
    bed.close()


def test_what_was_computed_with_the_weights_before_an_update_is_not_stored_after_it(full: ConnectorBed) -> None:
    request = computed(full)
    full.side.start_new_lineage()

    assert not full.step().stores
    full.side.on_finished(request)


def test_what_was_computed_before_a_step_that_failed_is_not_stored_twice(full: ConnectorBed) -> None:
    request, other = computed(full), full.request(full.prompt(NUM_TOKENS))
    full.match(other)
    full.allocate(other, 0)

    def failing(request_id: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        full.side.step({other.request_id: NUM_TOKENS}, failing)
    full.work(full.side.salvaged())
    full.end(request, other)

    assert full.leased() == 0
    assert num_found(full, request) == 0
