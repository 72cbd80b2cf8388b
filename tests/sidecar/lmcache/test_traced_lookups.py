"""Spans of what foreign engines look up and load."""

from contextlib import closing
from pathlib import Path

import pytest
from lmcache_bed import CHUNK, RawClient, lmcache_bed
from otlp_receiver import ReceivedSpan, otlp_receiver

from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.statistics import TokenBalance

DOCUMENT = list(range(1000, 1000 + 6 * CHUNK + 3))  # six full chunks and a tail


def test_a_lookup_is_the_first_span_of_a_trace_in_which_what_is_loaded_is_too(tmp_path: Path) -> None:
    with otlp_receiver() as receiver, closing(Tracer(SpanSender(receiver.url, "kvtier-sidecar"), 1.0)) as tracer:
        with lmcache_bed(tmp_path, records=RecentRecords([tracer.on_record]), tracer=tracer) as bed:
            client = RawClient(bed)
            client.register()
            client.lookup(DOCUMENT, "cold")
            client.store(DOCUMENT, "cold")
            client.lookup(DOCUMENT, "warm")
            assert client.retrieve(DOCUMENT, "warm")
            client.socket.close(0)
        spans = receiver.wait_for(3)

    cold, warm, retrieve = spans
    assert [span.name for span in spans] == ["kvtier.lookup", "kvtier.lookup", "kvtier.retrieve"]
    assert not cold.parent_id
    assert not warm.parent_id
    assert cold.trace_id != warm.trace_id == retrieve.trace_id
    assert retrieve.parent_id == warm.span_id
    assert warm.attributes["kvtier.tokens.host"] == retrieve.attributes["kvtier.tokens"] == 6 * CHUNK
    assert cold.attributes["kvtier.recomputed.never_seen"] == 6 * CHUNK
    assert retrieve.service == "kvtier-sidecar"


def test_what_is_written_to_disk_is_linked_to_the_lookup_of_the_request_that_stored_it(tmp_path: Path) -> None:
    other = DOCUMENT[::-1]
    with otlp_receiver() as receiver, closing(Tracer(SpanSender(receiver.url, "kvtier-sidecar"), 1.0)) as tracer:
        store, records = MemoryStore(1 << 24), RecentRecords([tracer.on_record])
        with lmcache_bed(tmp_path, store=store, records=records, tracer=tracer) as bed:
            client = RawClient(bed)
            client.register()
            for request, tokens in (("first", DOCUMENT), ("second", other)):
                client.lookup(tokens, request)
                client.store(tokens, request)
                bed.settle()
            client.socket.close(0)
        lookups = receiver.wait_until("kvtier.lookup", lambda spans: len(spans) == 2)
        spills = receiver.wait_until("kvtier.spill.disk", lambda spans: sum(map(num_blocks, spans)) == 12)

    for lookup in lookups:
        own = [span for span in spills if span.links == ((lookup.trace_id, lookup.span_id),)]
        assert sum(map(num_blocks, own)) == 6
        assert {span.attributes["kvtier.model"] for span in own} == {"m"}
    assert {span.parent_id for span in spills} == {""}


def test_nothing_is_told_of_what_is_written_for_requests_that_are_not_traced(tmp_path: Path) -> None:
    with (
        otlp_receiver() as receiver,
        closing(Tracer(SpanSender(receiver.url, "kvtier-sidecar"), 0.0)) as tracer,
        lmcache_bed(tmp_path, store=MemoryStore(1 << 24), tracer=tracer) as bed,
    ):
        client = RawClient(bed)
        client.register()
        client.store(DOCUMENT, "first")
        bed.settle()
        assert not bed.layouts.num_unsaved
        client.socket.close(0)

    assert receiver.spans == []


def num_blocks(span: ReceivedSpan) -> int:
    return int(str(span.attributes["kvtier.blocks"]))


@pytest.mark.parametrize(("sample", "minimum", "limit"), [(0.0, 0, 0), (0.2, 120, 280), (1.0, 1000, 1000)])
def test_about_the_configured_part_is_sampled(sample: float, minimum: int, limit: int) -> None:
    with otlp_receiver() as receiver, closing(Tracer(SpanSender(receiver.url, "test"), sample)) as tracer:
        for number in range(1000):  # of one request all or nothing
            tracer.on_record(RequestRecord(f"request {number}", None, "m", 0.0, TokenBalance(), lookup_s=1.0))
            tracer.on_part("kvtier.retrieve", f"request {number}", 0.0, 1.0, {})

    assert 2 * minimum <= len(receiver.spans) <= 2 * limit
    assert len({span.trace_id for span in receiver.spans}) * 2 == len(receiver.spans)
