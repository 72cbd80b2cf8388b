"""Recurrent states below vLLM: a state is stored from the page that vLLM names, never by position, and loaded whole."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm_connector_bed import BLOCK, STATES, ConnectorBed, FakeRequest

from kvtier.connectors.vllm_connector.counts import Unstored
from kvtier.connectors.vllm_connector.step_work import StepWork
from kvtier.connectors.vllm_connector.vllm_request import NULL_PAGE, StatePage, state_pages
from kvtier.tiers.naming.groups import RecurrentState

NUM_TOKENS = 42  # ten blocks and two tokens
STATE = 0  # the group of states
LAST = 9  # the block at whose end vLLM keeps the prompt's state


@pytest.fixture
def bed() -> Iterator[ConnectorBed]:
    bed = ConnectorBed(STATES)
    bed.run(bed.request(bed.prompt(8)))  # its workers map the memory
    yield bed
    bed.check()
    bed.close()


def scheduled(bed: ConnectorBed, num_tokens: int = NUM_TOKENS) -> FakeRequest:
    """A request with pages, whose prompt is still to be computed."""
    request = bed.request(bed.prompt(num_tokens))
    assert bed.match(request) == 0
    bed.allocate(request, 0)
    return request


def computed_with(bed: ConnectorBed, request: FakeRequest, *states: StatePage) -> None:
    """The step that computes the prompt, with the pages that vLLM names for its states."""
    name, num_tokens = request.request_id, request.num_tokens
    work = bed.side.step({name: num_tokens}, {name: request.pages}.get, states={name: states})
    bed.work(work, lambda: bed.compute_tokens(request, 0, num_tokens))
    request.num_computed_tokens = num_tokens


def stored_states(work: StepWork) -> list[int]:
    """The pages from which the step's workers store states."""
    return [page for copies in work.stores if copies.group_id == STATE for page in copies.pages]


def num_found(bed: ConnectorBed, request: FakeRequest) -> int:
    """How many tokens a new engine loads of the prompt; it raises if any page is then wrong."""
    bed.tiers.close()
    bed.start_engine()
    return bed.run(bed.request(request.tokens))


def test_only_the_state_that_vllm_names_is_stored(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    computed_with(bed, request, StatePage(STATE, request.pages[STATE][LAST], 40))

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert stored_states(work) == [request.pages[STATE][LAST]]
    assert num_found(bed, request) == 40


def test_a_state_is_stored_from_the_named_page_wherever_the_table_has_moved_to(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    named = request.pages[STATE][LAST]
    computed_with(bed, request, StatePage(STATE, named, 40))
    request.pages[STATE] = [NULL_PAGE] * 10 + [request.pages[STATE][3]]

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert stored_states(work) == [named]
    assert num_found(bed, request) == 40


def test_without_a_named_state_no_state_is_stored_and_nothing_is_found(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    computed_with(bed, request)

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert not stored_states(work)
    assert [len(copies.pages) for copies in work.stores] == [10]
    assert not any(bed.side.counts.unstored_blocks.values()), "vLLM offers few states, so the others are not missing"
    assert num_found(bed, request) == 0


def test_a_state_inside_a_block_is_not_stored(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    computed_with(bed, request, StatePage(STATE, request.pages[STATE][LAST], 39))

    assert not stored_states(bed.step({request.request_id: 0}, request))
    bed.end(request)


def test_a_prompt_continues_at_the_longest_state_that_all_its_blocks_reach(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    pages = request.pages[STATE]
    computed_with(bed, request, StatePage(STATE, pages[3], 16), StatePage(STATE, pages[LAST], 40))
    bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert bed.run(bed.request([*request.tokens[:30], *bed.prompt(12)])) == 16
    assert bed.run(bed.request([*request.tokens[:15], *bed.prompt(12)])) == 0
    assert num_found(bed, request) == 40


def test_a_document_has_a_state_at_its_end_once_a_second_question_about_it_was_asked(bed: ConnectorBed) -> None:
    """vLLM itself does so too, but knows only what its own cache has."""
    document = bed.prompt(30)
    questions = [bed.request([*document, *bed.prompt(12)]) for _ in range(3)]

    assert [bed.run(question) for question in questions] == [0, 0, 28]
    assert [question.shared_prefix_boundary for question in questions] == [0, 28, 0]


def test_vllms_own_place_for_a_state_is_kept_if_it_is_further(bed: ConnectorBed) -> None:
    document = bed.prompt(30)
    bed.run(bed.request([*document, *bed.prompt(12)]))
    question = bed.request([*document, *bed.prompt(12)], shared_prefix_boundary=32)

    assert bed.match(question) == 0
    assert question.shared_prefix_boundary == 32
    bed.allocate(question, 0)
    bed.end(question)


def test_each_of_two_requests_of_a_step_loads_its_own_state(bed: ConnectorBed) -> None:
    requests = [scheduled(bed) for _ in range(2)]
    bed.step({request.request_id: NUM_TOKENS for request in requests}, *requests)
    for request in requests:
        request.num_computed_tokens = NUM_TOKENS

    work = bed.step({request.request_id: 0 for request in requests}, *requests)
    bed.end(*requests)

    assert sorted(stored_states(work)) == sorted(request.pages[STATE][LAST] for request in requests)
    assert [num_found(bed, request) for request in requests] == [40, 40]


def test_a_hit_loads_one_state_of_each_group_and_the_request_waits_for_it(bed: ConnectorBed) -> None:
    first = scheduled(bed)
    bed.compute(first)
    bed.end(first)
    request = bed.request(first.tokens)
    assert bed.match(request) == 40
    bed.allocate(request, 40)

    work = bed.step()
    ended = bed.worker.ended_loads(work)
    bed.step()

    assert [(copies.group_id, len(copies.pages)) for copies in work.loads] == [(STATE, 1), (1, 10)]
    assert ended == ({request.request_id}, set())
    assert not bed.worker.pop_failed_pages()
    bed.end(request)


def test_a_request_that_waits_when_its_step_is_not_planned_is_told_that_its_load_failed(bed: ConnectorBed) -> None:
    first = scheduled(bed)
    bed.compute(first)
    bed.end(first)
    request = bed.request(first.tokens)
    name = {request.request_id}
    assert bed.match(request) == 40
    bed.allocate(request, 40)

    work = bed.side.salvaged()
    bed.work(work)

    assert bed.worker.ended_loads(work) == (name, name)
    assert not bed.worker.pop_failed_pages()
    bed.end(request)


def test_a_state_whose_page_vllm_changes_first_is_not_stored(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    named = request.pages[STATE][LAST]
    computed_with(bed, request, StatePage(STATE, named, 40))

    work = bed.step({request.request_id: 0}, request, overwritten=[named])
    bed.end(request)

    assert not stored_states(work)
    assert bed.side.counts.unstored_blocks[Unstored.FAILED] == 1
    assert num_found(bed, request) == 0


def test_a_state_without_a_sidecar_is_counted_and_not_stored_later(bed: ConnectorBed) -> None:
    request = scheduled(bed)
    computed_with(bed, request, StatePage(STATE, request.pages[STATE][LAST], 40))
    bed.sidecar.die()
    bed.listen()
    bed.step({request.request_id: 0}, request)
    bed.make_well()

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert not stored_states(work)
    assert bed.side.counts.unstored_blocks[Unstored.NO_SIDECAR] == 1


def test_states_behind_a_load_that_failed_are_not_stored(bed: ConnectorBed) -> None:
    first = scheduled(bed)
    bed.compute(first)
    bed.end(first)
    request = bed.request([*first.tokens[:40], *bed.prompt(20)])
    assert bed.match(request) == 40
    bed.allocate(request, 40)
    bed.segment.fail_after(0)
    bed.step({request.request_id: 20}, request)  # although vLLM runs it only after a load that has not failed
    request.num_computed_tokens = 60

    work = bed.step({request.request_id: 0}, request)
    bed.end(request)

    assert not work.stores


def test_a_model_of_states_alone_counts_all_tokens_of_a_hit() -> None:
    bed = ConnectorBed((RecurrentState(BLOCK),))
    prompt = bed.prompt(NUM_TOKENS)

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 40
    assert bed.side.counts.host_tokens == 40
    bed.close()


def step_with(offers: dict[str, list[tuple[int, int, int]]], preempted: set[str] | None = None) -> SimpleNamespace:
    """As much of vLLM's `SchedulerOutput` as is looked at; the requests "a" and "b" run."""
    block_state = SimpleNamespace(boundary_state_offloads=offers)
    return SimpleNamespace(
        num_scheduled_tokens={"a": 4, "b": 1}, preempted_req_ids=preempted, kv_connector_block_state=block_state
    )


def test_states_of_requests_that_do_not_run_are_left_out_as_their_pages_may_be_others() -> None:
    offers = {"a": [(0, 7, 16), (2, 9, 16)], "b": [(0, NULL_PAGE, 32)], "gone": [(0, 8, 16)]}

    assert state_pages(step_with(offers)) == {"a": [StatePage(0, 7, 16), StatePage(2, 9, 16)], "b": []}
    assert state_pages(step_with(offers, preempted={"a"})) == {"b": []}


def test_a_page_of_another_request_is_not_taken_for_a_state(bed: ConnectorBed) -> None:
    """vLLM preempts a request in the step that offers its state, and gives the page to another one."""
    request, other = scheduled(bed), scheduled(bed)
    name, page = other.request_id, request.pages[STATE][LAST]
    other.pages[STATE][LAST] = page
    offers = {request.request_id: [(STATE, page, 40)]}
    step = step_with(offers, preempted={request.request_id})
    step.num_scheduled_tokens = {name: NUM_TOKENS}

    pages = {name: other.pages, request.request_id: request.pages}
    work = bed.side.step(step.num_scheduled_tokens, pages.get, states=state_pages(step))
    bed.work(work, lambda: bed.compute_tokens(other, 0, NUM_TOKENS))
    other.num_computed_tokens = NUM_TOKENS

    assert not stored_states(bed.step({name: 0}, other))
    assert torch.equal(bed.kv_caches["g0.0"][page], bed.kv_caches["g0.0"][other.pages[STATE][LAST]])
    bed.end(other, request)
    assert num_found(bed, request) == 0
