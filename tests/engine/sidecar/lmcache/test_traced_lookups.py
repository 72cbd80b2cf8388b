"""Spans of what foreign engines look up and load."""

from contextlib import closing
from pathlib import Path

import pytest
from lmcache_bed import CHUNK, RawClient, lmcache_bed
from otlp_receiver import otlp_receiver

from kvtier.engine.records.recent_records import RecentRecords
from kvtier.engine.tracing.span_sender import SpanSender
from kvtier.engine.tracing.tracer import Tracer

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


@pytest.mark.parametrize(("sample", "least", "most"), [(0.0, 0, 0), (0.2, 120, 280), (1.0, 1000, 1000)])
def test_about_the_configured_part_is_sampled(sample: float, least: int, most: int) -> None:
    with otlp_receiver() as receiver, closing(Tracer(SpanSender(receiver.url, "test"), sample)) as tracer:
        for number in range(1000):
            for _ in range(2):  # of one request all or nothing
                tracer.on_part("kvtier.retrieve", f"request {number}", 0.0, 1.0, {})

    assert 2 * least <= len(receiver.spans) <= 2 * most
    assert len({span.trace_id for span in receiver.spans}) * 2 == len(receiver.spans)
