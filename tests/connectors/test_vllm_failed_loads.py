"""Loads that fail in a worker, or are given up: what vLLM computes from pages that were not loaded is never stored."""

from collections.abc import Iterator, Sequence

import pytest
from vllm_connector_bed import BLOCK, FULL, HYBRID, STATES, ConnectorBed, FakeRequest
from vllm_play import VllmPlay

from kvtier.connectors.vllm_connector.scheduler_half import SchedulerHalf
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport
from kvtier.tiers.naming.groups import AttentionGroup, SlidingWindow

NUM_DOCUMENT = 40  # tokens: ten blocks


@pytest.fixture(params=[FULL, HYBRID, STATES], ids=["full", "hybrid", "states"])
def bed(request: pytest.FixtureRequest) -> Iterator[ConnectorBed]:
    bed = ConnectorBed(request.param)
    yield bed
    bed.check()
    bed.close()


@pytest.fixture
def full() -> Iterator[ConnectorBed]:
    bed = ConnectorBed(FULL)
    yield bed
    bed.check()
    bed.close()


def stored(bed: ConnectorBed) -> list[int]:
    """A document whose ten blocks are below."""
    document = bed.prompt(NUM_DOCUMENT)
    bed.run(bed.request(document + bed.prompt(2)))
    return document


def promised(bed: ConnectorBed, tokens: list[int]) -> FakeRequest:
    """A request that vLLM was told to load a document for."""
    request = bed.request(tokens)
    assert bed.match(request) == NUM_DOCUMENT
    bed.allocate(request, NUM_DOCUMENT)
    return request


def recompute(bed: ConnectorBed, request: FakeRequest, num_good: int, chunk: int = 64) -> None:
    """As vLLM does with the policy "recompute": go back to the last good token, in the same pages."""
    request.num_computed_tokens = num_good
    while request.num_computed_tokens < request.num_tokens:
        num_tokens = min(chunk, request.num_tokens - request.num_computed_tokens)
        bed.step({request.request_id: num_tokens}, request)
        request.num_computed_tokens += num_tokens
        bed.side.poll()
        bed.clock.now += 0.03


def is_told(bed: ConnectorBed, work: StepWork, request: FakeRequest, pages: set[int]) -> bool:
    """Return whether the connector reports these pages as not loaded or, with several groups, the request as failed."""
    told = bed.worker.ended_loads(work), bed.worker.pop_failed_pages()
    name = {request.request_id}
    return told == ((name, name), set()) if bed.side.loads_ahead else told == ((set(), set()), pages)


def found_by_another_engine(bed: ConnectorBed, tokens: list[int]) -> int:
    """How many tokens a new engine loads of the prompt; it raises if any page is then wrong."""
    bed.check()
    bed.tiers.close()
    bed.start_engine()
    return bed.run(bed.request([*tokens, 1, 2]))


def test_what_a_step_computed_from_pages_that_were_not_loaded_is_never_found(bed: ConnectorBed) -> None:
    document = stored(bed)
    tokens = document + bed.prompt(20)
    request = promised(bed, tokens)
    bed.segment.fail_after(0)

    bed.step({request.request_id: 20}, request)
    request.num_computed_tokens = 60
    bed.side.on_finished(request)

    assert not bed.step().stores
    assert bed.leased() == 0
    assert not any(bed.side.counts.unstored_blocks.values()), "what is not to be stored has not missed a slot"
    assert found_by_another_engine(bed, tokens) == NUM_DOCUMENT


def test_what_is_computed_again_from_the_last_good_token_on_is_stored(bed: ConnectorBed) -> None:
    document = stored(bed)
    tokens = document + bed.prompt(20)
    request = promised(bed, tokens)
    bed.segment.fail_after(0)
    bed.step({request.request_id: 20}, request)

    bed.clock.now += 0.03
    recompute(bed, request, 0, chunk=6)
    bed.finish(request)

    assert not any(bed.side.counts.unstored_blocks.values())
    assert found_by_another_engine(bed, tokens) == (56 if bed.groups == STATES else 60)  # no state at a prompt's end


def test_pages_of_a_load_that_fails_half_way_are_told(full: ConnectorBed) -> None:
    first, second = (full.request(stored(full) + full.prompt(20)) for _ in range(2))
    assert [full.match(request) for request in (first, second)] == [NUM_DOCUMENT, NUM_DOCUMENT]
    for request in (first, second):
        full.allocate(request, NUM_DOCUMENT)
    full.segment.fail_after(1)

    full.step({first.request_id: 20, second.request_id: 20}, first, second)

    assert full.worker.pop_failed_pages() == set(second.pages[0][:10])
    assert not full.worker.pop_failed_pages()
    for request in (first, second):
        full.finish(request)
    assert found_by_another_engine(full, list(first.tokens)) == 60
    assert found_by_another_engine(full, list(second.tokens)) == NUM_DOCUMENT


@pytest.mark.parametrize("groups", [HYBRID, STATES], ids=["hybrid", "states"])
def test_a_load_of_several_groups_that_fails_half_way_is_told_by_its_request(groups: Sequence[AttentionGroup]) -> None:
    """vLLM ends if it is told of the pages of one of several groups."""
    bed = ConnectorBed(groups)
    tokens = stored(bed) + bed.prompt(20)
    request, other = promised(bed, tokens), bed.request(tokens)
    bed.segment.fail_after(1)

    work = bed.step()
    is_told_of_it = is_told(bed, work, request, set())
    bed.match(other)
    bed.allocate(other, NUM_DOCUMENT)
    bed.load_ahead(other)

    assert is_told_of_it
    bed.end(request, other)
    assert found_by_another_engine(bed, tokens) == NUM_DOCUMENT
    bed.close()


def test_a_request_that_shares_pages_with_the_failed_one_stores_nothing_behind_them(full: ConnectorBed) -> None:
    document = stored(full)
    request = promised(full, document + full.prompt(20))
    other = full.request(document + full.prompt(20))
    full.match(other, num_computed=NUM_DOCUMENT)
    full.allocate(other, 0, num_local=NUM_DOCUMENT, like=request)
    full.segment.fail_after(0)

    full.step({request.request_id: 20, other.request_id: 20}, request, other)
    recompute(full, other, NUM_DOCUMENT)  # vLLM takes the pages for good: the first request computes them again
    full.end(request, other)

    assert found_by_another_engine(full, list(other.tokens)) == NUM_DOCUMENT


def test_what_was_computed_behind_shared_pages_stays_untrusted_in_vllms_own_cache(full: ConnectorBed) -> None:
    """With the policy "fail" vLLM forgets the failed request's pages, and not those of the one that shared them."""
    document = stored(full)
    request = promised(full, document + full.prompt(20))
    other = full.request(document + full.prompt(20))
    full.match(other, num_computed=NUM_DOCUMENT)
    full.allocate(other, 0, num_local=NUM_DOCUMENT, like=request)
    full.segment.fail_after(0)
    full.step({request.request_id: 20, other.request_id: 20}, request, other)
    for each in (request, other):
        full.side.on_finished(each)

    third = full.request(list(other.tokens) + full.prompt(20))
    full.match(third, num_computed=60)
    full.allocate(third, 0, num_local=60, like=other)
    full.compute_tokens(third, 0, NUM_DOCUMENT)
    full.step({third.request_id: 20}, third)
    full.finish(third)

    assert full.first_wrong(third, 80) == 10
    assert found_by_another_engine(full, list(third.tokens)) == NUM_DOCUMENT


def test_a_request_that_shares_only_what_the_failed_one_computed_stores_nothing_behind_it() -> None:
    """Where all layers forget, no page that was to be loaded is among its own."""
    bed = ConnectorBed((SlidingWindow(BLOCK, 9),))
    document = stored(bed)
    request = promised(bed, document + bed.prompt(20))
    other = bed.request(list(request.tokens) + bed.prompt(20))
    bed.match(other, num_computed=60)
    bed.allocate(other, 0, num_local=60, like=request)
    bed.segment.fail_after(0)

    bed.step({request.request_id: 20, other.request_id: 20}, request, other)
    bed.end(request, other)

    assert found_by_another_engine(bed, list(other.tokens)) == NUM_DOCUMENT
    bed.close()


def test_pages_that_a_tainted_request_is_given_later_are_tainted_too(full: ConnectorBed) -> None:
    document = stored(full)
    request = promised(full, document + full.prompt(2))
    other = full.request(document + full.prompt(20))
    full.match(other, num_computed=NUM_DOCUMENT)
    full.allocate(other, 0, num_local=NUM_DOCUMENT, like=request)
    full.side.on_allocated(other, [other.pages[0][:11]], 0)  # for its first chunk only
    full.segment.fail_after(0)
    full.step({request.request_id: 2, other.request_id: 4}, request, other)
    other.num_computed_tokens = 44
    full.clock.now += 0.03
    full.step({other.request_id: 16}, other)
    recompute(full, request, 0)

    third = full.request(list(other.tokens) + full.prompt(20))
    full.match(third, num_computed=60)
    full.allocate(third, 0, num_local=NUM_DOCUMENT, like=other)
    third.pages[0][11:15] = other.pages[0][11:15]
    full.side.on_allocated(third, third.pages, 0)
    full.compute_tokens(third, 40, 44)  # as another request has computed this block again
    third.num_computed_tokens = 60
    full.step({third.request_id: 20}, third)
    full.end(third)

    assert full.first_wrong(third, 80) == 11
    assert found_by_another_engine(full, list(third.tokens)) == 44


def test_pages_that_are_given_before_the_failure_is_heard_of_are_tainted_too(full: ConnectorBed) -> None:
    """The request has them in a step in which nothing of it is stored, and is preempted in the next one."""
    request = promised(full, stored(full) + full.prompt(20))
    pages = request.pages[0]
    full.side.on_allocated(request, [pages[:11]], 0)  # for its first chunk only
    full.segment.fail_after(0)
    first = full.side.step({request.request_id: 4}, lambda name: [pages[:11]])
    request.num_computed_tokens = 44
    second = full.side.step({request.request_id: 16}, lambda name: [pages], is_storing=False)
    full.work(first, lambda: full.compute_tokens(request, 40, 44))
    full.work(second, lambda: full.compute_tokens(request, 44, 60))
    full.allocate(request, 0)

    other = full.request(list(request.tokens) + full.prompt(20))
    full.match(other, num_computed=60)
    full.allocate(other, 0)
    full.compute_tokens(other, 0, 44)
    other.pages[0][11:15] = pages[11:15]  # vLLM's own cache has them still
    full.side.on_allocated(other, other.pages, 0)
    other.num_computed_tokens = 60
    full.step({other.request_id: 20}, other)
    full.end(other)

    assert full.first_wrong(other, 80) == 11
    assert found_by_another_engine(full, list(other.tokens)) == 44


def test_pages_that_are_good_again_are_trusted_again(full: ConnectorBed) -> None:
    document = stored(full)
    request = promised(full, document + full.prompt(20))
    full.segment.fail_after(0)
    full.step({request.request_id: 20}, request)
    full.clock.now += 0.03

    early, late = (full.request(list(request.tokens) + full.prompt(20)) for _ in range(2))
    request.num_computed_tokens = 0
    full.step({request.request_id: 30}, request)
    request.num_computed_tokens = 30
    full.match(early, num_computed=60)
    full.allocate(early, 0, num_local=60, like=request)
    full.step({early.request_id: 20}, early)  # vLLM takes pages that are not computed again yet
    recompute(full, request, 30)
    full.match(late, num_computed=60)
    full.allocate(late, 0, num_local=60, like=request)
    full.step({late.request_id: 20}, late)
    full.end(request, early, late)

    assert found_by_another_engine(full, list(late.tokens)) == 80
    assert found_by_another_engine(full, list(early.tokens)) == 60


def test_pages_that_are_used_anew_are_trusted_again(full: ConnectorBed) -> None:
    document = stored(full)
    failed = promised(full, document + full.prompt(20))
    full.segment.fail_after(0)
    full.step({failed.request_id: 20}, failed)
    full.side.on_finished(failed)

    for num_loaded in (NUM_DOCUMENT, 0):
        request = full.request(document + full.prompt(20) if num_loaded else full.prompt(60))
        assert full.match(request) == num_loaded
        request.pages = [list(failed.pages[0])]
        full.side.on_allocated(request, request.pages, num_loaded)
        request.num_computed_tokens = num_loaded
        full.compute(request)
        full.end(request)
        assert found_by_another_engine(full, list(request.tokens)) == 60


def test_what_a_later_chunk_computes_behind_the_hole_is_not_stored(full: ConnectorBed) -> None:
    """With asynchronous scheduling the next step is scheduled before vLLM hears of the failure."""
    tokens = stored(full) + full.prompt(20)
    request = promised(full, tokens)
    pages = {request.request_id: request.pages}.get
    full.segment.fail_after(0)

    first = full.side.step({request.request_id: 8}, pages)
    request.num_computed_tokens += 8
    full.clock.now += 0.03
    second = full.side.step({request.request_id: 12}, pages)
    request.num_computed_tokens += 12
    full.work(first, lambda: full.compute_tokens(request, 40, 48))
    full.work(second, lambda: full.compute_tokens(request, 48, 60))
    full.finish(request)

    assert second.stores, "of the first step, whose failure vLLM has not heard of"
    assert full.leased() == 0
    assert found_by_another_engine(full, tokens) == NUM_DOCUMENT


def test_a_request_that_ends_before_its_failure_is_heard_of_stores_nothing(full: ConnectorBed) -> None:
    """With the policy "fail" vLLM ends the request first, and hands on the workers' report then."""
    tokens = stored(full) + full.prompt(20)
    request = promised(full, tokens)
    full.segment.fail_after(0)
    work = full.side.step({request.request_id: 20}, {request.request_id: request.pages}.get)
    report = full.work_unheard(work, lambda: full.compute_tokens(request, 40, 60))

    full.side.on_finished(request)
    assert report is not None
    full.side.on_report(report)
    full.listen()

    assert full.leased() == 0
    assert found_by_another_engine(full, tokens) == NUM_DOCUMENT


def test_a_request_that_has_ended_is_kept_in_mind_until_its_own_step_is_reported(full: ConnectorBed) -> None:
    tokens = stored(full) + full.prompt(20)
    earlier, request = full.request(full.prompt(20)), full.request(tokens)
    full.match(earlier)
    full.allocate(earlier, 0)
    assert full.match(request) == NUM_DOCUMENT
    full.step({earlier.request_id: 20}, earlier)
    earlier.num_computed_tokens = 20
    first = full.side.step({earlier.request_id: 0}, {earlier.request_id: earlier.pages}.get)
    full.allocate(request, NUM_DOCUMENT)
    second = full.side.step({request.request_id: 20}, {request.request_id: request.pages}.get)
    full.side.on_finished(request)

    full.work(first)
    full.segment.fail_after(0)
    full.work(second, lambda: full.compute_tokens(request, 40, 60))
    full.listen()

    assert first.stores
    assert second.loads
    assert not full.step().stores
    assert found_by_another_engine(full, tokens) == NUM_DOCUMENT


def test_a_request_that_is_preempted_before_its_failure_is_heard_of_stores_nothing(full: ConnectorBed) -> None:
    tokens = stored(full) + full.prompt(20)
    request = promised(full, tokens)
    full.segment.fail_after(0)
    work = full.side.step({request.request_id: 20}, {request.request_id: request.pages}.get)
    before = full.request(tokens)
    before.pages = request.pages
    request.num_computed_tokens = 0
    matched = full.side.num_matched(request, 60)
    full.allocate(request, 0, num_local=60, like=before)
    full.work(work, lambda: full.compute_tokens(before, 40, 60))
    full.finish(request)

    assert matched == 0
    assert full.leased() == 0
    assert found_by_another_engine(full, tokens) == NUM_DOCUMENT


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_that_fails_is_enough(rank: int) -> None:
    bed = ConnectorBed(FULL, num_workers=2)
    tokens = stored(bed) + bed.prompt(20)
    request = promised(bed, tokens)
    bed.segments[rank].fail_after(0)

    bed.step({request.request_id: 20}, request)
    bed.finish(request)

    assert bed.workers[rank].pop_failed_pages() == set(request.pages[0][:10])
    assert not bed.workers[1 - rank].pop_failed_pages()
    assert found_by_another_engine(bed, tokens) == NUM_DOCUMENT
    bed.check()
    bed.close()


def test_what_some_workers_have_not_loaded_counts_although_others_say_nothing() -> None:
    bed = ConnectorBed(FULL, num_workers=2)
    request = promised(bed, stored(bed) + bed.prompt(20))
    work = bed.side.step({request.request_id: 12}, {request.request_id: request.pages}.get)
    request.num_computed_tokens += 12

    bed.side.on_report(WorkerReport(work.number, None, unloaded=frozenset(request.pages[0][:10])))
    bed.clock.now += 0.03

    assert work.loads
    assert not bed.step({request.request_id: 8}, request).stores
    bed.check()
    bed.close()


def test_a_load_that_is_given_up_stores_nothing_behind_it(bed: ConnectorBed) -> None:
    """Between what vLLM was told and the pages that it gives, another hook fails: all leases are let go."""
    tokens = stored(bed) + bed.prompt(20)
    request = bed.request(tokens)
    assert bed.match(request) == NUM_DOCUMENT
    bed.side.give_up()
    bed.allocate(request, NUM_DOCUMENT)

    work = bed.step({request.request_id: 20}, request)
    is_told_of_it = is_told(bed, work, request, {page for ids in request.pages for page in ids[:10] if page})
    bed.side.on_finished(request)

    assert not bed.step().stores
    assert is_told_of_it
    assert bed.leased() == 0
    assert found_by_another_engine(bed, tokens) == NUM_DOCUMENT


def test_a_request_whose_step_was_not_planned_stores_nothing_behind_it(full: ConnectorBed) -> None:
    tokens = stored(full) + full.prompt(20)
    request = promised(full, tokens)

    def failing(request_id: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        full.side.step({request.request_id: 12}, failing)
    full.work(full.side.salvaged(), lambda: full.compute_tokens(request, 40, 52))
    request.num_computed_tokens += 12
    full.step({request.request_id: 8}, request)  # vLLM may have scheduled it already
    full.finish(request)

    assert found_by_another_engine(full, tokens) == NUM_DOCUMENT


def test_an_allocation_that_could_not_be_taken_in_is_told_and_not_built_on(bed: ConnectorBed) -> None:
    """The hook has failed after all that it did, so the pages of the load are filled, and the others are not."""
    tokens = stored(bed) + bed.prompt(20)
    request = promised(bed, tokens)
    bed.side.on_plan_failed(request.request_id, request.pages)

    work = bed.step({request.request_id: 20}, request)
    is_told_of_it = is_told(bed, work, request, {page for ids in request.pages for page in ids[10:]})
    bed.side.on_finished(request)

    assert is_told_of_it
    assert not bed.step().stores
    assert found_by_another_engine(bed, tokens) == NUM_DOCUMENT


def test_what_a_step_that_failed_was_to_store_is_never_found(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))  # slots lie ready
    first, second = (full.request(full.prompt(40)) for _ in range(2))
    for request in (first, second):
        full.match(request)
        full.allocate(request, 0)
    full.work(full.side.step({first.request_id: 40}, lambda request_id: first.pages))

    def failing(request_id: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        full.side.step({second.request_id: 40}, failing)  # after it has begun to store what the first one computed
    assert full.leased() > 0
    full.work(full.side.salvaged())
    for request in (first, second):
        full.finish(request)

    assert full.leased() == 0
    assert found_by_another_engine(full, list(first.tokens)) == 0


def test_pages_of_a_load_that_was_given_up_are_told_if_the_step_fails_too(full: ConnectorBed) -> None:
    tokens = stored(full) + full.prompt(20)
    request = full.request(tokens)
    assert full.match(request) == NUM_DOCUMENT
    full.side.give_up()
    full.allocate(request, NUM_DOCUMENT)

    def failing(request_id: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        full.side.step({request.request_id: 20}, failing)
    full.work(full.side.salvaged())

    assert full.worker.pop_failed_pages() == set(request.pages[0][:10])


def test_pages_that_vllm_says_another_connector_has_not_loaded_are_not_built_on(full: ConnectorBed) -> None:
    tokens = full.prompt(60)
    full.run(full.request(full.prompt(8)))
    request = full.request(tokens)
    full.match(request)
    full.allocate(request, 0)
    pages, request.pages = request.pages, [[]]
    full.side.on_allocated(request, request.pages, 0)  # vLLM tells the other connector only
    request.pages = pages
    request.num_computed_tokens = 40
    for block in range(4):
        full.compute_tokens(request, block * BLOCK, (block + 1) * BLOCK)
    half = SchedulerHalf()
    half.side = full.side

    work = full.side.step({request.request_id: 20}, {request.request_id: request.pages}.get)
    report = full.work_unheard(work, lambda: full.compute_tokens(request, 40, 60))
    half.on_output(report, set(request.pages[0][4:10]))
    full.side.on_finished(request)
    stored = full.step()
    after = full.request(tokens + full.prompt(20))
    full.match(after, num_computed=60)
    full.allocate(after, 0, num_local=60, like=request)
    pages, after.pages = after.pages, [[]]
    full.side.on_allocated(after, after.pages, 0)
    after.pages = pages
    after.num_computed_tokens = 60
    full.step({after.request_id: 20}, after)
    full.finish(after)

    assert sum(len(copies.pages) for copies in stored.stores) == 4
    assert found_by_another_engine(full, list(after.tokens)) == 16


def test_blocks_before_the_hole_are_stored_all_the_same(full: ConnectorBed) -> None:
    tokens = full.prompt(60)
    full.run(full.request(full.prompt(8)))
    request = full.request(tokens)
    full.match(request)
    full.allocate(request, 0)
    pages = {request.request_id: request.pages}.get
    first = full.side.step({request.request_id: 40}, pages)
    request.num_computed_tokens = 40
    full.listen()
    full.clock.now += 0.03
    second = full.side.step({request.request_id: 20}, pages)

    full.side.on_unloaded({request.pages[0][12]})
    full.work(first, lambda: full.compute_tokens(request, 0, 40))
    full.work(second, lambda: full.compute_tokens(request, 40, 60))
    request.num_computed_tokens = 60
    full.finish(request)

    assert second.stores
    assert found_by_another_engine(full, tokens) == 48


def test_nothing_is_stored_while_the_connector_rests(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    request = full.request(full.prompt(20))
    full.match(request)
    full.allocate(request, 0)
    pages = {request.request_id: request.pages}.get

    full.side.step({request.request_id: 20}, pages)
    assert not full.side.step({request.request_id: 20}, pages, is_storing=False).stores
    assert full.side.step({request.request_id: 20}, pages).stores


def test_pages_are_followed_while_the_connector_rests(full: ConnectorBed) -> None:
    document = stored(full)
    request = promised(full, document + full.prompt(20))
    full.segment.fail_after(0)
    full.step({request.request_id: 8}, request)
    pages = {request.request_id: request.pages}.get
    request.num_computed_tokens = 48

    work = full.side.step({request.request_id: 12}, pages, is_storing=False)
    full.work(work, lambda: full.compute_tokens(request, 48, 60))
    full.side.on_finished(request)
    full.work(full.side.step({}, pages, is_storing=False))
    after = full.request(list(request.tokens) + full.prompt(20))
    full.match(after, num_computed=60)
    full.allocate(after, 0, num_local=60, like=request)
    full.compute_tokens(after, 0, 48)
    full.step({after.request_id: 20}, after)
    full.finish(after)

    assert not work.stores
    assert found_by_another_engine(full, list(after.tokens)) == NUM_DOCUMENT


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_loads_fail_no_engine_finds_a_wrong_block(recomputes: bool, max_in_flight: int, seed: int) -> None:
    bed = ConnectorBed(FULL, num_bytes=256 << 10, seed=seed, num_workers=1 + seed % 2)
    play = VllmPlay(bed, recomputes, max_in_flight)
    documents = [bed.prompt(32) for _ in range(3)]
    prompts = []
    for _ in range(40):
        tokens = bed.rng.choice(documents)[: bed.rng.randrange(4, 9) * BLOCK]
        if prompts and bed.rng.random() < 0.4:
            tokens = bed.rng.choice(prompts)
        prompts.append([*tokens, *bed.prompt(bed.rng.randrange(1, 14))][:60])
        play.add(prompts[-1])
        for _ in range(bed.rng.randrange(4)):
            play.step()
        fate = bed.rng.random()
        if fate < 0.15:
            play.preempt()
        elif fate < 0.25:
            play.abort()
        elif fate < 0.5:
            play.forget()
        bed.check()
    while not play.is_idle:
        play.step()
    bed.listen()

    bed.tiers.close()
    bed.start_engine()
    assert sum(bed.run(bed.request([*tokens, 1, 2])) for tokens in prompts[:20]) > 200
    assert play.num_failed_loads > 1
    bed.close()
