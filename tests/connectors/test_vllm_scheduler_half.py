"""The scheduler's half of the vLLM connector: it stores nothing while it rests, and a reset begins anew."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm_connector_bed import ConnectorBed
from waiting import DEADLINE_S

from kvtier.connectors.vllm_connector.scheduler_half import SchedulerHalf
from kvtier.transfer.lane import Finished
from kvtier.transfer.transfer_engine import TransferEngine


@pytest.fixture
def bed() -> Iterator[ConnectorBed]:
    bed = ConnectorBed()
    yield bed
    bed.check()
    bed.close()


@pytest.fixture
def half(bed: ConnectorBed) -> Iterator[SchedulerHalf]:
    half = SchedulerHalf()
    half.attach(bed.side, bed.tiers, TransferEngine({}, Finished()), lambda: None)
    with half.guard.lock:  # which the thread that listens needs: the test has the bed to itself
        yield half
    half.close()


def test_what_is_computed_while_it_rests_is_not_stored(bed: ConnectorBed, half: SchedulerHalf) -> None:
    bed.run(bed.request(bed.prompt(8)))
    request = bed.request(bed.prompt(40))
    bed.match(request)
    bed.allocate(request, 0)
    pages = {request.request_id: request.pages}.get

    half.step({request.request_id: 40}, pages)
    half.guard.run_always(lambda: 1 / 0, None)

    assert half.guard.is_resting
    assert not half.step({request.request_id: 0}, pages).stores


def test_what_is_computed_after_a_reset_is_apart_from_what_other_engines_share(
    bed: ConnectorBed, half: SchedulerHalf
) -> None:
    prompt = bed.prompt(40)
    assert half.reset()
    bed.listen()
    assert bed.run(bed.request([*prompt, 1])) == 0
    assert bed.run(bed.request([*prompt, 2])) == 40
    bed.listen()

    other = bed.tiers
    bed.start_engine()

    assert bed.run(bed.request([*prompt, 3])) == 0
    other.close()


@contextmanager
def digests_under_way(bed: ConnectorBed, half: SchedulerHalf) -> Iterator[list[int]]:
    """A prompt whose blocks have been copied. The thread that takes their digests waits for the lock, which the test
    gives up only where it waits itself."""
    prompt = bed.prompt(40)
    bed.threads.is_held = True
    bed.run(bed.request([*prompt, 1]))
    assert bed.side.is_digesting
    thread = threading.Thread(target=half.on_digests, args=(bed.threads.go_on,))
    thread.start()
    yield prompt
    assert not bed.side.is_digesting
    thread.join(DEADLINE_S)
    bed.threads.is_held = False


def test_a_reset_waits_until_what_was_copied_is_let_go(bed: ConnectorBed, half: SchedulerHalf) -> None:
    with digests_under_way(bed, half):
        assert half.reset(), "blocks were leased"


def test_what_was_copied_is_published_before_the_end(bed: ConnectorBed, half: SchedulerHalf) -> None:
    with digests_under_way(bed, half) as prompt:
        half.close()

    bed.start_engine()
    assert bed.run(bed.request([*prompt, 2])) == 40
