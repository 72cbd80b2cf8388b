"""Whose blocks are whose, of requests that are traced."""

import random
from collections.abc import Sequence

import pytest

from kvtier.engine.observability.tracing import spill_traces
from kvtier.engine.observability.tracing.spill_traces import MAX_LINKS, MAX_OWNERS, TracedBlocks
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.tiers.naming.block_hash import BlockName


def names(*numbers: int) -> list[BlockName]:
    return [BlockName(number.to_bytes(32, "big")) for number in numbers]


def requests(number: int) -> list[TraceContext]:
    return [TraceContext.root(is_sampled=True) for _ in range(number)]


def test_a_block_is_found_with_every_request_that_has_it_and_its_place() -> None:
    first, second = requests(2)
    blocks = TracedBlocks()
    blocks.add(first, names(1, 2, 3))
    blocks.add(second, names(1, 2, 8))

    assert blocks.find(names(9, 3, 2)) == {first: [1, 2], second: [2]}
    assert blocks.find(names(8)) == {second: [0]}
    assert blocks.find(names(4, 5)) == {}


def test_a_request_that_has_more_blocks_later_has_all_of_them() -> None:
    (request,) = requests(1)
    blocks = TracedBlocks()
    blocks.add(request, names(1))
    blocks.add(request, names(2))
    blocks.add(request, names(1))  # it was copied down a second time

    assert blocks.find(names(1, 2)) == {request: [0, 1]}


def test_of_many_requests_with_one_block_the_newest_are_told() -> None:
    many = requests(3 * MAX_OWNERS)
    blocks = TracedBlocks()
    for request in many:
        blocks.add(request, names(1))

    assert list(blocks.find(names(1))) == many[-MAX_OWNERS:]


def test_a_batch_has_no_more_requests_than_a_span_may_have_links() -> None:
    blocks = TracedBlocks()
    for number, request in enumerate(requests(2 * MAX_LINKS)):
        blocks.add(request, names(number))

    assert len(blocks.find(names(*range(2 * MAX_LINKS)))) == MAX_LINKS


@pytest.mark.parametrize("limit", [1, 20])
def test_the_oldest_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(spill_traces, "MAX_BLOCKS", limit)
    monkeypatch.setattr(spill_traces, "MAX_OWNERS", 2 * limit)
    seed = random.randrange(1 << 32)
    rng, blocks = random.Random(seed), TracedBlocks()
    added: list[tuple[TraceContext, Sequence[BlockName]]] = []

    for request in requests(60):
        added.append((request, names(*rng.sample(range(12), rng.randint(1, 6)))))
        blocks.add(*added[-1])

        while sum(len(own) for _, own in added) > limit and len(added) > 1:
            added.pop(0)
        asked = names(*rng.sample(range(12), 5))
        model = {each: [asked.index(name) for name in asked if name in own] for each, own in added}
        assert blocks.find(asked) == {each: places for each, places in model.items() if places}, f"seed {seed}"
