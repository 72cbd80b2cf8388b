"""Engines that are stopped in the middle of a copy, as by SIGSTOP or a frozen cgroup, while others work."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm_connector_bed import FULL, NUM_PAGES, PAGE_BYTES, ConnectorBed, FakeRequest

from kvtier.connectors.vllm_connector.step_work import StepWork
from kvtier.sidecar.port import STUCK_S

OF_AN_ENGINE = (
    "tiers",
    "side",
    "workers",
    "worker",
    "segments",
    "segment",
    "memories",
    "adapters",
    "rank_caches",
    "kv_caches",
)


@pytest.fixture
def bed() -> Iterator[ConnectorBed]:
    bed = ConnectorBed(FULL, num_bytes=16 << 10)
    yield bed
    bed.close()


class Stopped:
    """The bed's engine, which has no turn until it `should_continue`; another one has taken its place."""

    def __init__(self, bed: ConnectorBed) -> None:
        self._bed = bed
        self._parts = {name: getattr(bed, name) for name in OF_AN_ENGINE}
        self._client = next(iter(bed.sidecar.port.clients))
        bed.kv_caches = {name: torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8) for name in bed.kv_caches}
        bed.rank_caches = [bed.kv_caches]
        bed.start_engine()

    def wait_let_go(self) -> None:
        """Have the other engine work until the sidecar has ended the session, and on."""
        num_requests = 0
        while self._client.is_open:
            self._bed.run(self._bed.request(self._bed.prompt(41)))
            num_requests += 1
            assert num_requests < 3000
            if self._client.unread:
                self._bed.clock.now += STUCK_S + 1
                self._bed.listen()
        for _ in range(40):
            self._bed.run(self._bed.request(self._bed.prompt(41)))

    def should_continue(self) -> dict[str, Any]:
        """Put the engine back in its place; the parts of the other one."""
        other = {name: getattr(self._bed, name) for name in OF_AN_ENGINE}
        for name, part in self._parts.items():
            setattr(self._bed, name, part)
        return other


def close(other: dict[str, Any]) -> None:
    other["tiers"].close()
    other["worker"].close()


def promised(bed: ConnectorBed) -> tuple[FakeRequest, StepWork]:
    """A request that vLLM was promised a prefix of, and the step in which it is copied."""
    document = bed.prompt(42)
    bed.run(bed.request(document))
    request = bed.request(document)
    num_matched = bed.match(request)
    assert num_matched == 40
    bed.allocate(request, num_matched)
    return request, bed.side.step({request.request_id: 2}, {request.request_id: request.pages}.get)


def test_an_engine_that_is_stopped_before_its_copy_loads_what_it_was_promised(bed: ConnectorBed) -> None:
    request, work = promised(bed)
    stopped = Stopped(bed)
    stopped.wait_let_go()

    other = stopped.should_continue()
    bed.work(work)

    bed.check_pages(request)
    assert bed.worker.pop_failed_pages() == set()
    close(other)


def test_an_engine_that_is_stopped_in_its_copy_writes_to_no_slot_of_another_one(bed: ConnectorBed) -> None:
    request = bed.request(bed.prompt(42))
    bed.match(request)
    bed.allocate(request, 0)
    bed.step({request.request_id: 42}, request)
    work = bed.side.step({}, {}.get)
    own = {slot for copies in work.stores for slot in copies.slots}
    assert own
    stopped = Stopped(bed)
    stopped.wait_let_go()

    given = set[int]()
    while slots := bed.tiers.reserve(0, 8):
        given.update(slots)
        bed.listen()
    assert len(given) > 20
    assert not given & own

    bed.tiers.abandon(0, np.array(sorted(given), np.intp))
    other = stopped.should_continue()
    bed.work(work)
    bed.listen()
    assert bed.match(bed.request(request.tokens)) == 0, "what it published too late was found"
    close(other)


def test_slots_are_free_again_once_a_stopped_engine_has_gone_on(bed: ConnectorBed) -> None:
    _, work = promised(bed)
    stopped = Stopped(bed)
    stopped.wait_let_go()
    quarantine = bed.sidecar.layouts.quarantine
    (held,) = quarantine.clients()
    assert sum(lease.num_chunks for lease in held.leases) >= 10

    other = stopped.should_continue()
    bed.listen()
    assert not bed.tiers.is_attached
    assert len(quarantine) == 1, "its worker may be copying"
    bed.work(work)
    bed.listen()

    assert bed.tiers.is_attached
    assert len(quarantine) == 0
    close(other)


def test_slots_of_a_stopped_engine_are_free_when_it_and_its_worker_have_ended(bed: ConnectorBed) -> None:
    promised(bed)
    stopped = Stopped(bed)
    stopped.wait_let_go()
    quarantine = bed.sidecar.layouts.quarantine

    other = stopped.should_continue()
    bed.tiers.close()
    bed.sidecar.turn()
    assert len(quarantine) == 1, "its worker maps the memory"
    bed.worker.close()
    bed.sidecar.turn()

    assert len(quarantine) == 0
    close(other)


def test_a_stopped_sidecar_is_found_out_also_by_an_engine_that_asks_nothing(bed: ConnectorBed) -> None:
    prompt = bed.prompt(200)
    bed.run(bed.request(prompt))
    bed.sidecar.is_stopped = True
    num_requests = 0
    while bed.tiers.is_attached:  # vLLM's own prefix cache has the prompt: the sidecar is told that it was used
        request = bed.request(prompt)
        bed.side.num_matched(request, 196)
        bed.side.on_allocated(request, [[]], 0)
        bed.finish_without_listening(request)
        bed.clock.now += 0.05
        bed.side.poll()
        num_requests += 1
        assert num_requests < 1000

    bed.make_well()
    assert bed.tiers.is_attached


def test_slots_are_kept_when_an_engine_is_closed_while_a_copy_hangs(bed: ConnectorBed) -> None:
    promised(bed)
    bed.worker.close()
    bed.tiers.close_while_copying()
    bed.sidecar.turn()

    assert sum(lease.num_chunks for client in bed.sidecar.endpoint.clients() for lease in client.leases) >= 10
    close_as_a_process_does(bed.sidecar.path)
    bed.sidecar.turn()
    assert bed.sidecar.endpoint.clients() == []


def close_as_a_process_does(path: str) -> None:
    """Close this process's connections to that socket, as its end would."""
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it was closed, or is a socket that is not connected
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            with socket.socket(fileno=os.dup(file)) as connection:
                is_left = connection.getpeername() == path
            if is_left:
                os.close(file)
