"""What kvtier's own engines say of the traces of their blocks: the sidecar's spans of its writes to disk."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from engine_bed import Bed, Engine, engine_bed, names, publication
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver

from kvtier.engine.attached import wire
from kvtier.engine.attached.wire import Traced
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockName

NUM_IN_BATCH = 4  # blocks: a quarter of the slots of one extent


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture
def traced_bed(tmp_path: Path, receiver: OtlpReceiver) -> Iterator[Bed]:
    """A sidecar that traces; it samples nothing itself."""
    with (
        closing(Tracer(SpanSender(receiver.url, "kvtier-sidecar"), 0.0)) as tracer,
        engine_bed(tmp_path, store=MemoryStore(1 << 22), tracer=tracer) as bed,
    ):
        yield bed


def publish(engine: Engine, blocks: Sequence[BlockName], traced: Sequence[Traced]) -> None:
    slots = engine.reserve(len(blocks))
    assert len(slots) == len(blocks)
    engine.say(publication(engine, blocks, slots, traced=list(traced)))
    engine.bed.settle()
    engine.hear()


def by_blocks(spans: Sequence[ReceivedSpan]) -> dict[object, set[str]]:
    """The requests that spans are linked to, by the number of blocks in them."""
    return {span.attributes["kvtier.blocks"]: {trace for trace, _ in span.links} for span in spans}


def test_what_is_written_to_disk_is_linked_to_the_request_that_the_engine_named(
    traced_bed: Bed, receiver: OtlpReceiver
) -> None:
    engine, request = Engine(traced_bed, model="llama"), TraceContext.root(is_sampled=True)
    blocks = names(1, NUM_IN_BATCH)

    publish(engine, blocks, [Traced(request.header, wire.packed(range(NUM_IN_BATCH)))])

    (span,) = receiver.wait_for(1)
    assert (span.name, span.service, span.parent_id) == ("kvtier.spill.disk", "kvtier-sidecar", "")
    assert span.links == ((request.trace_id, request.span_id),)
    assert span.attributes["kvtier.model"] == "llama"
    assert (span.attributes["kvtier.blocks"], span.attributes["kvtier.bytes"]) == (
        NUM_IN_BATCH,
        NUM_IN_BATCH * 4096,
    )
    assert set(blocks) <= engine.disk[0]
    engine.close()


def test_only_the_blocks_that_were_named_are_the_requests(traced_bed: Bed, receiver: OtlpReceiver) -> None:
    engine = Engine(traced_bed)
    first, second = (TraceContext.root(is_sampled=True) for _ in range(2))
    blocks = names(1, NUM_IN_BATCH)
    traced = [Traced(first.header, wire.packed([0, 1])), Traced(second.header, wire.packed([1, 2]))]
    publish(engine, blocks, traced)

    for own in (blocks[:1], blocks[1:3], blocks[3:]):  # written again, without those beside them
        engine.ask(wire.Clear(), wire.Cleared)
        publish(engine, own, [])
    publish(engine, names(2, 3), traced[1:])

    spans = receiver.wait_for(4)
    assert by_blocks(spans) == {
        NUM_IN_BATCH: {first.trace_id, second.trace_id},
        1: {first.trace_id},
        2: {first.trace_id, second.trace_id},
        3: {second.trace_id},
    }
    engine.close()


@pytest.mark.parametrize(
    "header",
    [
        f"00-{'1' * 32}-{'2' * 16}-00",  # valid, and not sampled
        "",
        "garbage",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "\0" * 10_000,
    ],
)
def test_a_trace_that_is_not_sampled_or_none_has_no_span(traced_bed: Bed, receiver: OtlpReceiver, header: str) -> None:
    engine, request = Engine(traced_bed), TraceContext.root(is_sampled=True)

    publish(engine, names(1, 3), [Traced(header, wire.packed(range(3)))])
    publish(engine, names(2, 2), [Traced(request.header, wire.packed(range(2)))])

    spans = receiver.wait_for(1)
    assert by_blocks(spans) == {2: {request.trace_id}}
    assert len(engine.disk[0]) == 5
    engine.close()


@pytest.mark.parametrize(
    "traced",
    [
        [Traced(TraceContext.root(is_sampled=True).header, wire.packed([3]))],
        [Traced(TraceContext.root(is_sampled=True).header, wire.packed([-1]))],
        [Traced(TraceContext.root(is_sampled=True).header, b"\0")],
        [Traced(TraceContext.root(is_sampled=True).header, b"")] * (wire.MAX_TRACED + 1),
    ],
)
def test_what_no_engine_says_of_traces_ends_the_connection(traced_bed: Bed, traced: list[Traced]) -> None:
    engine = Engine(traced_bed)

    publish(engine, names(1, 3), traced)

    assert engine.is_ended
    assert traced_bed.endpoint.counts().refused == {"malformed": 1}
    engine.close()
    traced_bed.settle()
    assert traced_bed.num_leases() == 0


def test_a_sidecar_that_traces_nothing_takes_the_blocks_all_the_same(bed: Bed) -> None:
    engine, request = Engine(bed), TraceContext.root(is_sampled=True)

    publish(engine, names(1, 3), [Traced(request.header, wire.packed(range(3)))])

    assert set(engine.host[0]) == set(names(1, 3))
    engine.close()
