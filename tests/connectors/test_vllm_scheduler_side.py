"""The connector's two halves on a sidecar's connector, without vLLM: what is found, loaded and stored, and what goes
wrong."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from vllm_connector_bed import (
    BLOCK,
    DEADLINE_S,
    FULL,
    HYBRID,
    PAGE_BYTES,
    STATES,
    ConnectorBed,
    FakeAdapter,
    FakeRequest,
    blocks_aligned,
)
from waiting import wait_for

from kvtier.connectors.vllm_connector.counts import COUNT_NAMES, Unstored
from kvtier.connectors.vllm_connector.scheduler_side import MAX_LOADS
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import tenant_of, tenant_with

NUM_TOKENS = 42  # ten blocks and two tokens


@pytest.fixture(params=[FULL, HYBRID], ids=["full", "hybrid"])
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


def test_what_one_request_has_computed_the_next_one_loads_into_its_own_pages(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    other = bed.prompt(20)

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == blocks_aligned(bed.groups, NUM_TOKENS) == 40
    assert bed.run(bed.request(prompt[:20] + other)) == 20
    assert bed.side.counts.host_tokens == 60
    assert bed.leased() == 0


def test_another_engine_loads_what_the_first_has_stored(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    bed.tiers.close()

    bed.start_engine()

    assert bed.run(bed.request(prompt)) == 40


def test_what_a_step_computes_the_next_one_stores(bed: ConnectorBed) -> None:
    request = bed.request(bed.prompt(NUM_TOKENS))
    assert bed.match(request) == 0
    bed.allocate(request, 0)

    assert not bed.step({request.request_id: NUM_TOKENS}, request).stores
    work = bed.step()

    assert [len(copies.slots) for copies in work.stores] == [10 for _ in bed.groups]


def test_workers_that_cannot_map_the_memory_are_waited_for_once(full: ConnectorBed) -> None:
    began_at = full.clock.now
    for _ in range(3):
        request = full.request(full.prompt(NUM_TOKENS))
        while full.side.num_matched(request, 0) is None:
            full.side.on_report(WorkerReport(full.side.step({}, lambda request_id: None).number, None))
            full.clock.now += 0.01
            assert full.clock.now - began_at <= DEADLINE_S + 0.1

    assert full.clock.now - began_at >= DEADLINE_S
    full.allocate(request, 0)
    work = full.side.step({request.request_id: NUM_TOKENS}, {request.request_id: request.pages}.get)
    assert not work.stores, "no worker could copy it"


def test_nothing_is_promised_that_no_worker_could_copy(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))
    full.tiers.close()
    full.start_engine()

    for _ in range(2):
        request, matched = full.request(prompt), None
        for _ in range(2 * round(DEADLINE_S / 0.01)):
            if (matched := full.side.num_matched(request, 0)) is not None:
                break
            full.side.on_report(WorkerReport(full.side.step({}, lambda request_id: None).number, None))
            full.listen()
            full.clock.now += 0.01
        assert matched == 0

    assert full.side.counts.late_loads == 2


def test_so_many_loads_are_under_way_at_a_time(full: ConnectorBed) -> None:
    prompt = full.prompt(2 * BLOCK)
    full.run(full.request(prompt))
    full.listen()
    before = full.sidecar.endpoint.counts().num_asked
    full.threads.is_held = True

    requests = [full.request(prompt + full.prompt(2)) for _ in range(MAX_LOADS + 2)]
    assert {full.side.num_matched(request, 0) for request in requests} == {None}
    full.listen()

    assert full.sidecar.endpoint.counts().num_asked - before == 2 * MAX_LOADS
    full.threads.is_held = False
    full.threads.go_on()
    assert [full.match(request) for request in requests] == [2 * BLOCK] * len(requests)
    for request in requests:
        full.side.on_finished(request)
    assert full.leased() == 0


def test_a_lookup_asks_the_sidecar_nothing(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(NUM_TOKENS)))
    full.listen()
    before = full.sidecar.endpoint.counts().operations

    assert full.side.num_matched(full.request(full.prompt(NUM_TOKENS)), 0) == 0
    full.listen()

    assert full.sidecar.endpoint.counts().operations == before


def test_the_last_token_is_computed(full: ConnectorBed) -> None:
    prompt = full.prompt(40)
    full.run(full.request(prompt))

    assert full.run(full.request(prompt)) == 36


def test_only_what_vllm_lacks_is_loaded(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))

    assert full.match(full.request(prompt), num_computed=16) == 24
    assert full.match(full.request(prompt), num_computed=40) == 0


def test_what_vllm_has_lost_since_it_asked_is_loaded_too(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))
    request = full.request(prompt)
    assert full.side.num_matched(request, 20) is None

    assert full.match(request) == 40
    full.allocate(request, 40)
    full.compute(request)
    full.finish(request)


def test_salts_are_apart(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt, cache_salt="ann"))

    assert full.run(full.request(prompt, cache_salt="bob")) == 0
    assert full.run(full.request(prompt, cache_salt="ann")) == 40


def test_blocks_are_their_salts_tenants(full: ConnectorBed) -> None:
    for salt in ("ann", "bob", None):
        full.run(full.request(full.prompt(NUM_TOKENS), cache_salt=salt))

    index = full.sidecar.tiers.tiers.index
    pool = index.host[0].pool
    slots = np.array([slot for slot in range(pool.num_slots) if pool.name(slot) is not None], np.intp)
    owners = [tenant_with(number) for number in index.host_blocks[0].tenants(slots).tolist()]
    assert Counter(owners) == {tenant_of(salt): NUM_TOKENS // BLOCK for salt in ("ann", "bob", None)}


def adapter(path: Path, number: int, weights: bytes) -> FakeAdapter:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text("{}")
    return FakeAdapter("legal", number, str(path))


def test_two_adapters_of_one_name_and_place_are_apart(full: ConnectorBed, tmp_path: Path) -> None:
    prompt = full.prompt(NUM_TOKENS)
    first = adapter(tmp_path / "a", 1, b"weights")
    full.run(full.request(prompt, lora_request=first))
    full.tiers.close()
    full.start_engine()

    again = full.run(full.request(prompt, lora_request=first))
    full.tiers.close()
    full.start_engine()
    adapter(tmp_path / "a", 1, b"others.")
    other = full.run(full.request(prompt, lora_request=first))

    assert (again, other) == (40, 0)


def test_an_adapter_whose_files_change_under_a_running_engine_is_not_kept_any_more(
    full: ConnectorBed, tmp_path: Path
) -> None:
    prompt = full.prompt(NUM_TOKENS)
    one = adapter(tmp_path / "a", 1, b"weights")
    full.run(full.request(prompt, lora_request=one))
    adapter(tmp_path / "a", 1, b"other weights")

    assert full.run(full.request(prompt, lora_request=one)) == 0
    assert full.side.counts.stored_blocks == 10


def test_an_adapter_that_is_no_folder_is_served_and_not_kept(full: ConnectorBed) -> None:
    hub = FakeAdapter("legal", 1, "someone/legal")
    prompt = full.prompt(NUM_TOKENS)

    assert [full.run(full.request(prompt, lora_request=hub)) for _ in range(2)] == [0, 0]
    assert full.side.counts.stored_blocks == 0


def test_without_a_sidecar_nothing_is_waited_for(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    bed.sidecar.die()
    bed.listen()

    assert bed.side.num_matched(bed.request(prompt), 0) == 0
    assert bed.run(bed.request(prompt)) == 0


def test_the_next_sidecar_is_used_as_the_first_was(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    bed.sidecar.die()
    bed.listen()
    bed.sidecar.start()
    bed.listen()

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 40


def test_a_stopped_sidecar_is_waited_for_until_the_deadline_and_leases_nothing_then(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    began_at = bed.clock.now
    bed.sidecar.is_stopped = True

    request = bed.request(prompt)

    assert bed.match(request) == 0
    assert DEADLINE_S <= bed.clock.now - began_at <= DEADLINE_S + 0.1
    assert bed.side.counts.late_loads == 1
    bed.allocate(request, 0)
    bed.compute(request)
    bed.finish_without_listening(request)
    bed.sidecar.is_stopped = False
    bed.listen()
    assert bed.leased() == 0


def test_what_was_promised_is_right_although_the_sidecar_is_killed(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    request = bed.request(prompt)
    num_matched = bed.match(request)

    bed.sidecar.die()
    bed.listen()
    bed.allocate(request, num_matched)
    bed.compute(request)

    assert num_matched == 40
    assert not bed.worker.pop_failed_pages()


def test_a_flipped_byte_is_found_counted_and_computed_again(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))
    slots = full.sidecar.tiers.tiers.index.host[0].pool
    names = [slots.name(slot) for slot in range(slots.num_slots)]
    (slot,) = [i for i, name in enumerate(names) if name is not None][4:5]
    position = slot * full.layouts[0].block_bytes
    full.sidecar.segment.memory[position] ^= 64

    num_matched = full.run(full.request(prompt))

    assert num_matched < 40
    assert full.side.counts.corrupt_blocks == 1
    full.run(full.request(prompt))
    assert full.run(full.request(prompt)) == 40, "it was stored again"


def test_digests_that_are_late_make_the_prefix_shorter(full: ConnectorBed) -> None:
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))
    full.threads.is_held = True

    request = full.request(prompt)

    assert full.match(request) == 0
    full.threads.go_on()
    full.threads.is_held = False
    full.listen()
    assert full.leased() == 0


def test_slots_that_the_worker_could_not_fill_are_never_found(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(NUM_TOKENS)))
    prompt = full.prompt(NUM_TOKENS)
    request = full.request(prompt)
    full.match(request)
    full.allocate(request, 0)
    full.compute_unstored(request)
    full.finish(request)

    assert full.side.counts.stored_blocks == 10
    assert unstored(full) == {Unstored.FAILED: 10}
    assert full.leased() == 0
    assert full.run(full.request(prompt)) == 0


def test_reports_of_workers_are_good_together_or_not_at_all() -> None:
    one, two = WorkerReport(3, b"boot", stored=(2, 3)), WorkerReport(3, b"boot", stored=(2,), unstored=(3,))

    both = one.aggregate(two)

    assert (both.num_workers, both.boot, both.stored, both.unstored) == (2, b"boot", (2, 3, 2), (3,))
    assert one.aggregate(WorkerReport(3, None)).boot is None


@pytest.mark.parametrize(("num_workers", "num_replicas"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("groups", [FULL, HYBRID, STATES], ids=["full", "hybrid", "states"])
def test_pages_that_several_ranks_hold_alike_are_stored_once_and_loaded_by_each(
    groups: Sequence[AttentionGroup], num_workers: int, num_replicas: int
) -> None:
    """A rank that loads the pages of another one would fail the bed's look at every page of every rank."""
    bed = ConnectorBed(groups, num_workers=num_workers, num_replicas=num_replicas)
    prompt = bed.prompt(NUM_TOKENS)

    assert bed.run(bed.request(prompt)) == 0
    assert bed.run(bed.request(prompt)) == 40
    assert [memory.block_bytes for memory in bed.memories] == [2 * PAGE_BYTES * num_workers // num_replicas] * len(
        groups
    )
    bed.close()


def test_slots_that_a_worker_has_filled_in_part_are_never_found() -> None:
    bed = ConnectorBed(HYBRID, num_workers=2)
    bed.run(bed.request(bed.prompt(8)))
    request = bed.request(bed.prompt(40))
    bed.match(request)
    bed.allocate(request, 0)
    bed.step({request.request_id: 40}, request)
    request.num_computed_tokens = 40
    bed.segments[1].fail_after(1)
    work = bed.step({request.request_id: 0}, request)
    bed.finish(request)

    assert len(work.stores) == 3
    assert bed.side.counts.stored_blocks == 6
    assert bed.match(bed.request(list(request.tokens))) == 0
    bed.check()
    bed.close()


def test_a_worker_tells_at_once_that_it_maps_what_it_was_to_map(full: ConnectorBed) -> None:
    segment = full.side.step({}, lambda request_id: None).wanted
    assert segment is not None
    work = StepWork(1, segment)
    full.clock.now += 10.0
    full.worker.begin(work)
    wait_for(lambda: not full.segment.is_mapping)

    report = full.worker.report(work)

    assert report == WorkerReport(1, segment.boot)


def test_blocks_whose_digests_could_not_be_taken_are_never_found(
    full: ConnectorBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.run(full.request(full.prompt(8)))
    request = full.request(full.prompt(40))
    full.match(request)
    full.allocate(request, 0)
    with monkeypatch.context() as patched:
        patched.setattr(full.memories[0], "host_block", lambda slot: 1 / 0)
        full.compute(request)
        full.finish(request)

    assert full.side.counts.stored_blocks == 2
    assert unstored(full) == {Unstored.FAILED: 10}
    assert full.leased() == 0
    assert full.match(full.request(list(request.tokens))) == 0


def test_what_two_requests_compute_in_one_step_is_copied_once(bed: ConnectorBed) -> None:
    bed.run(bed.request(bed.prompt(8)))
    prompt = bed.prompt(40)
    requests = [bed.request(prompt), bed.request(prompt)]
    for request in requests:
        bed.match(request)
        bed.allocate(request, 0)

    bed.step({request.request_id: 40 for request in requests}, *requests)
    work = bed.step()

    assert sum(len(copies.slots) for copies in work.stores) == 10 * len(bed.groups)


def test_a_page_that_a_window_has_passed_is_not_stored() -> None:
    bed = ConnectorBed(HYBRID)
    first = bed.request(bed.prompt(40))
    bed.match(first)
    bed.allocate(first, 0)
    bed.compute(first)
    bed.sidecar.die()
    bed.make_well()
    bed.run(bed.request(bed.prompt(8)))  # the workers map the next one's memory
    request = bed.request(list(first.tokens) + bed.prompt(4))
    bed.match(request, num_computed=40)
    bed.allocate(request, 0, num_local=40, like=first)

    bed.step({request.request_id: 4}, request)
    bed.listen()
    work = bed.step()

    of_windows = {copies.group_id: copies.pages for copies in work.stores if copies.group_id}
    assert of_windows == {group_id: [page for page in request.pages[group_id] if page] for group_id in (1, 2)}
    bed.check()
    bed.close()


def test_a_request_that_has_no_pages_yet_stores_nothing(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    request = full.request(full.prompt(40))
    full.match(request)
    full.side.on_allocated(request, [[]], 0)

    full.side.step({request.request_id: 40}, lambda request_id: [[]])
    assert not full.side.step({}, lambda request_id: [[]]).stores


def test_a_report_of_some_workers_only_is_of_no_mapping_and_of_no_copy() -> None:
    bed = ConnectorBed(FULL, num_workers=2)
    bed.side.on_report(WorkerReport(0, bed.tiers.boot))
    assert not bed.side.is_mapped

    request = bed.request(bed.prompt(40))
    bed.match(request)
    bed.allocate(request, 0)
    bed.step({request.request_id: 40}, request)
    request.num_computed_tokens = 40
    work = bed.side.step({request.request_id: 0}, {request.request_id: request.pages}.get)
    bed.side.on_report(WorkerReport(work.number, bed.tiers.boot))
    bed.finish(request)

    assert work.stores
    assert bed.side.counts.stored_blocks == 0
    assert bed.match(bed.request(list(request.tokens))) == 0
    bed.check()
    bed.close()


def test_slots_stay_leased_until_the_workers_have_copied_them(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    request = bed.request(prompt)
    bed.allocate(request, bed.match(request))

    work = bed.side.step({request.request_id: 2}, {request.request_id: request.pages}.get)
    assert bed.leased() == sum(len(copies.slots) for copies in work.loads) > 0

    bed.work(work)
    assert bed.leased() == 0


def test_an_aborted_request_leases_nothing(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))
    asking, promised = bed.request(prompt), bed.request(prompt)
    assert bed.side.num_matched(asking, 0) is None
    assert bed.match(promised) == 40

    for request in (asking, promised):
        bed.side.on_finished(request)
    bed.listen()

    assert bed.leased() == 0


def test_a_request_that_was_preempted_looks_again(bed: ConnectorBed) -> None:
    bed.run(bed.request(bed.prompt(NUM_TOKENS)))
    prompt = bed.prompt(NUM_TOKENS)
    request = bed.request(prompt)
    assert bed.match(request) == 0
    bed.allocate(request, 0)
    bed.compute(request)
    bed.listen()

    request.num_computed_tokens = 0
    bed.step()
    bed.listen()
    assert bed.match(request) == 40
    bed.allocate(request, 40)
    bed.compute(request)
    bed.finish(request)


def test_a_prompt_that_is_computed_in_one_step_finds_slots_that_lie_ready(bed: ConnectorBed) -> None:
    bed.run(bed.request(bed.prompt(8)))
    bed.clock.now += 5.0  # what was reserved for it only has gone back
    bed.listen()
    request = bed.request(bed.prompt(NUM_TOKENS))
    bed.match(request)
    bed.allocate(request, 0)

    bed.step({request.request_id: NUM_TOKENS}, request)
    work = bed.step()

    assert [len(copies.slots) for copies in work.stores] == [10 for _ in bed.groups]


def test_what_several_requests_complete_in_a_step_is_published_in_one_message(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    requests = [full.request(full.prompt(8)) for _ in range(2)]
    for request in requests:
        full.match(request)
        full.allocate(request, 0)
    full.clock.now += 1.0  # all slots that are kept lie ready again
    full.listen()
    before = full.sidecar.endpoint.counts().operations

    full.step({request.request_id: 8 for request in requests}, *requests)
    work = full.step()
    full.listen()

    told = full.sidecar.endpoint.counts().operations
    assert sum(len(copies.slots) for copies in work.stores) == 4
    assert {kind: num - before.get(kind, 0) for kind, num in told.items() if num > before.get(kind, 0)} == {
        "publish": 1
    }


def test_what_has_found_no_slot_when_its_request_ends_is_counted(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    full.sidecar.is_stopped = True
    for _ in range(2):  # the first one takes the slots that lie ready
        request = full.request(full.prompt(NUM_TOKENS))
        full.match(request)
        full.allocate(request, 0)
        full.compute(request)
        full.finish_without_listening(request)
        full.step()

    assert unstored(full) == {Unstored.LATE: 10}
    full.sidecar.is_stopped = False


def unstored(bed: ConnectorBed) -> dict[Unstored, int]:
    """How many blocks were not stored, less the reasons that there were not."""
    return {why: number for why, number in bed.side.counts.unstored_blocks.items() if number}


def run_unmatched(bed: ConnectorBed, request: FakeRequest) -> None:
    """Serve a request of which nothing is looked for."""
    bed.allocate(request, 0)
    bed.compute(request)
    bed.finish(request)


def test_what_a_full_sidecar_has_no_slot_for_is_counted_as_that() -> None:
    bed = ConnectorBed(FULL, num_bytes=64 * 2 * PAGE_BYTES)
    request = bed.request(bed.prompt(100 * BLOCK))

    bed.run(bed.request(bed.prompt(8)))  # its worker maps the memory
    bed.threads.is_held = True  # what is copied stays leased
    bed.allocate(request, 0)
    bed.step({request.request_id: request.num_tokens}, request)
    request.num_computed_tokens = request.num_tokens
    for _ in range(6):
        bed.listen()
        bed.clock.now += 0.6
        bed.step({request.request_id: 0}, request)
    bed.finish(request)
    bed.threads.go_on()

    assert unstored(bed).keys() == {Unstored.NO_ROOM}
    assert bed.side.counts.unstored_blocks[Unstored.NO_ROOM] + bed.side.counts.stored_blocks == 2 + 100
    bed.close()


def test_what_is_computed_before_the_workers_map_the_memory_is_counted_as_that(full: ConnectorBed) -> None:
    request = full.request(full.prompt(NUM_TOKENS))
    full.allocate(request, 0)

    full.side.step({request.request_id: NUM_TOKENS}, {request.request_id: request.pages}.get)
    request.num_computed_tokens = NUM_TOKENS
    full.side.on_finished(request)
    full.side.step({}, {}.get)

    assert unstored(full) == {Unstored.UNMAPPED: 10}


def test_what_is_computed_without_a_sidecar_is_counted_as_that(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    full.sidecar.die()
    full.listen()

    run_unmatched(full, full.request(full.prompt(NUM_TOKENS)))

    assert unstored(full) == {Unstored.NO_SIDECAR: 10}


def test_what_is_computed_while_the_connector_rests_is_counted_as_that(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    request = full.request(full.prompt(NUM_TOKENS))
    full.allocate(request, 0)

    full.side.step({request.request_id: NUM_TOKENS}, {request.request_id: request.pages}.get)
    request.num_computed_tokens = NUM_TOKENS
    full.side.on_finished(request)
    full.side.step({}, {}.get, is_storing=False)

    assert unstored(full) == {Unstored.RESTING: 10}


def test_what_found_its_slots_in_a_later_step_is_not_counted(full: ConnectorBed) -> None:
    full.run(full.request(full.prompt(8)))
    request = full.request(full.prompt(30 * BLOCK))

    run_unmatched(full, request)

    assert full.side.counts.stored_blocks == 2 + 30
    assert unstored(full) == {}


def test_slots_lie_ready_at_once_after_a_reset(bed: ConnectorBed) -> None:
    """A reset gives back what lay ready."""
    bed.run(bed.request(bed.prompt(8)))
    bed.side.start_new_lineage()
    assert bed.side.clear()
    bed.listen()
    request = bed.request(bed.prompt(NUM_TOKENS))
    bed.match(request)
    bed.allocate(request, 0)

    bed.step({request.request_id: NUM_TOKENS}, request)
    work = bed.step()

    assert [len(copies.slots) for copies in work.stores] == [10 for _ in bed.groups]


def test_what_was_counted_is_handed_over_once_with_its_reasons(full: ConnectorBed) -> None:
    counts = full.side.counts
    counts.stored_blocks += 3
    counts.unstored_blocks[Unstored.LATE] += 2

    first, second = counts.take(), counts.take()

    assert set(first) == set(second) == set(COUNT_NAMES)
    assert {name: number for name, number in first.items() if number} == {
        "stored_blocks": 3,
        "unstored_blocks late": 2,
    }
    assert not any(second.values())


def test_what_vllm_was_told_of_is_told_to_be_missing_if_a_step_fails(full: ConnectorBed) -> None:
    """Nothing that is known makes a step fail: it is the last line before wrong tokens."""
    prompt = full.prompt(NUM_TOKENS)
    full.run(full.request(prompt))
    full.sidecar.turn()
    request = full.request(prompt)
    full.allocate(request, full.match(request))

    def failing(request_id: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        full.side.step({request.request_id: 2}, failing)
    full.work(full.side.salvaged())

    assert full.worker.pop_failed_pages() == set(request.pages[0][:10])
    assert full.leased() == 0


def test_reset_forgets_all_of_it(bed: ConnectorBed) -> None:
    prompt = bed.prompt(NUM_TOKENS)
    bed.run(bed.request(prompt))

    bed.side.start_new_lineage()
    assert bed.side.clear()

    bed.listen()
    assert bed.run(bed.request(prompt)) == 0


@pytest.mark.parametrize("groups", [FULL, HYBRID, STATES], ids=["full", "hybrid", "states"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_becomes_of_the_sidecar_no_page_is_wrong(groups: Sequence[AttentionGroup], seed: int) -> None:
    bed = ConnectorBed(groups, seed=seed)
    bed.state_interval = 1
    documents = [bed.prompt(32) for _ in range(4)]
    num_loaded = 0
    for _ in range(60):
        bed.meet_fate()
        request: FakeRequest = bed.request(bed.rng.choice(documents)[: bed.rng.randrange(1, 9) * BLOCK] + bed.prompt(6))
        num_matched = bed.match(request)
        bed.meet_fate()
        bed.allocate(request, num_matched)
        num_loaded += num_matched
        bed.compute(request, bed.meet_fate)
        bed.meet_fate()
        bed.finish_without_listening(request)
        bed.check()
    bed.make_well()
    bed.step()

    assert num_loaded
    assert not bed.worker.pop_failed_pages()
    assert bed.leased() == 0
    bed.close()
