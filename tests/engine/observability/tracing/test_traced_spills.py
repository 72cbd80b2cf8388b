"""Spans of what is copied down in the background, as a collector gets them, with links to requests."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from chaos import FakeClock
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from serving import BLOCK_BYTES, BLOCK_SIZE, ServerInThread, serving, tables
from small_models import build, byte_tokenizer

from kvtier import LLM, SamplingParams
from kvtier.engine.observability.tracing.request_traces import RequestTraces
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.spill_traces import SpillTraces
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Caller
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.transfer.transfer_engine import Route
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating

TOKEN = "op-token-4444"
DOCUMENT = "The tower has four doors, and each of them is painted in another colour. " * 6
QUESTIONS = ("Which is the red one? ", "Who holds the keys? ")
SLACK_NS = 1_000_000_000  # two clocks are looked at, one after the other
BACKGROUND = ("kvtier.spill.host", "kvtier.spill.disk")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[ServerInThread]:
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    config = {**tables(), "disk": disk, "tracing": {"endpoint": receiver.url}}
    operating = Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog())
    with closing(operating), serving(build("llama"), config, operating=operating) as address:
        yield address


def ask(server: ServerInThread, prompt: str, max_tokens: int = 2, is_sampled: bool = True) -> TraceContext:
    """The span of which the request is a part."""
    parent = TraceContext.root(is_sampled)
    body = {"model": "small", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    answer = server.post("/v1/completions", json=body, headers={"traceparent": parent.header})
    assert answer.status_code == 200, answer.text
    return parent


def spill(server: ServerInThread) -> None:
    """Have all that is cached copied down to the disk."""
    answer = server.post("/v1/kvtier/operate/spill", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200, answer.text


def num_blocks(spans: Sequence[ReceivedSpan]) -> int:
    return sum(int(str(span.attributes["kvtier.blocks"])) for span in spans)


def request_of(receiver: OtlpReceiver, parent: TraceContext) -> ReceivedSpan:
    """The span of the engine's part in that trace."""
    (found,) = [span for span in receiver.spans if (span.name, span.trace_id) == ("kvtier.request", parent.trace_id)]
    return found


def test_a_batch_is_the_first_span_of_its_own_trace_with_a_link_to_the_request_whose_blocks_are_in_it(
    server: ServerInThread, receiver: OtlpReceiver
) -> None:
    parent = ask(server, DOCUMENT, max_tokens=2 * BLOCK_SIZE + 1)  # the last token's keys are never computed
    num_full = (len(DOCUMENT) + 2 * BLOCK_SIZE) // BLOCK_SIZE

    spill(server)

    traces = set()
    for name in BACKGROUND:
        spans = receiver.wait_until(name, lambda spans: num_blocks(spans) >= num_full)
        request = request_of(receiver, parent)
        assert num_blocks(spans) == num_full  # of the prompt and of the answer
        for span in spans:
            attributes = dict(span.attributes)
            assert not span.parent_id
            assert span.links == ((parent.trace_id, request.span_id),)
            assert request.start_ns - SLACK_NS < span.start_ns < span.end_ns < time.time_ns() + SLACK_NS
            assert (attributes["kvtier.tier.from"], attributes["kvtier.tier.to"]) == (
                ("device", "host") if name == BACKGROUND[0] else ("host", "disk")
            )
            assert attributes["kvtier.bytes"] == BLOCK_BYTES * int(str(attributes["kvtier.blocks"]))
            assert 0 < float(str(attributes["kvtier.copy_seconds"])) <= (span.end_ns - span.start_ns) / 1e9 + 1e-6
            assert attributes["kvtier.dropped"] == 0
            assert (span.service, span.is_failed) == ("kvtier", False)
            traces.add(span.trace_id)
    assert parent.trace_id not in traces
    assert len(traces) == len([span for span in receiver.spans if span.name in BACKGROUND])


def test_blocks_of_requests_that_are_not_traced_have_no_spans(server: ServerInThread, receiver: OtlpReceiver) -> None:
    ask(server, DOCUMENT, is_sampled=False)
    spill(server)

    parent = ask(server, DOCUMENT[::-1])
    spill(server)

    num_full = len(DOCUMENT) // BLOCK_SIZE
    for name in BACKGROUND:
        spans = receiver.wait_until(name, lambda spans: num_blocks(spans) >= num_full)
        assert num_blocks(spans) == num_full
        assert {trace for span in spans for trace, _ in span.links} == {parent.trace_id}


def test_a_block_that_two_prompts_begin_with_is_linked_to_both(receiver: OtlpReceiver, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    config = {**tables(), "disk": disk, "tracing": {"endpoint": receiver.url, "sample": 1.0}}

    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate([DOCUMENT + question for question in QUESTIONS], SamplingParams(max_tokens=1))

    requests = {(span.trace_id, span.span_id) for span in receiver.spans if span.name == "kvtier.request"}
    spans = [span for span in receiver.spans if span.name == BACKGROUND[1]]
    num_own = sum(len(DOCUMENT + question) // BLOCK_SIZE - len(DOCUMENT) // BLOCK_SIZE for question in QUESTIONS)
    assert len(requests) == 2
    assert num_blocks(spans) == len(DOCUMENT) // BLOCK_SIZE + num_own
    assert num_blocks([span for span in spans if set(span.links) == requests]) >= len(DOCUMENT) // BLOCK_SIZE


def test_what_a_library_writes_at_its_end_is_told_too(receiver: OtlpReceiver, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    config = {**tables(), "disk": disk, "tracing": {"endpoint": receiver.url, "sample": 1.0}}

    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate([DOCUMENT], SamplingParams(max_tokens=1))

    (request,) = [span for span in receiver.spans if span.name == "kvtier.request"]
    to_disk = [span for span in receiver.spans if span.name == BACKGROUND[1]]
    assert num_blocks(to_disk) == len(DOCUMENT) // BLOCK_SIZE
    assert {span.links for span in to_disk} == {((request.trace_id, request.span_id),)}


def test_copies_that_end_with_the_engine_are_told_too(receiver: OtlpReceiver) -> None:
    config = {**tables(), "tracing": {"endpoint": receiver.url, "sample": 1.0}}  # without a disk nothing is flushed

    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate([DOCUMENT], SamplingParams(max_tokens=1))
        before = llm.core.cache.statistics().routes[Route.DEVICE_TO_HOST].copies

    copies = llm.core.cache.statistics().routes[Route.DEVICE_TO_HOST].copies
    assert before.num_done < before.num_submitted  # the last step's have not been taken in yet
    assert num_blocks([span for span in receiver.spans if span.name == BACKGROUND[0]]) == copies.num_submitted_blocks


def test_of_requests_without_a_trace_the_spills_of_the_configured_part_are_told(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    config = {**tables(), "disk": disk, "tracing": {"endpoint": receiver.url, "sample": 0.5}}
    documents = [f"{number} is a number. " * 8 for number in range(1000, 1030)]

    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate(documents, SamplingParams(max_tokens=1))

    requests = {(span.trace_id, span.span_id) for span in receiver.spans if span.name == "kvtier.request"}
    linked = {link for span in receiver.spans if span.name == BACKGROUND[1] for link in span.links}
    assert 0 < len(requests) < len(documents)
    assert linked == requests


def test_blocks_that_were_lost_before_they_were_copied_are_a_span_without_length_that_says_why(
    receiver: OtlpReceiver,
) -> None:
    clock, request = FakeClock(), TraceContext.root(is_sampled=True)
    own, foreign = ([BlockName(bytes([first + i]) * 32) for i in range(4)] for first in (0, 100))
    with closing(Tracer(SpanSender(receiver.url, "test"), 0.0)) as tracer:
        traces = SpillTraces(tracer, clock, {"kvtier.model": "m"})
        traces.add(request, own)

        traces.log.on_dropped(Route.DEVICE_TO_HOST, [*foreign[:2], own[0]], EvictionCause.QUOTA)
        traces.log.on_dropped(Route.DEVICE_TO_HOST, foreign, EvictionCause.ROOM)
        clock.now = 5.0
        before = time.time_ns()
        traces.go_on()

    (span,) = receiver.spans
    assert (span.name, span.links) == ("kvtier.spill.host", ((request.trace_id, request.span_id),))
    assert span.start_ns == span.end_ns == pytest.approx(before - 5e9, abs=SLACK_NS)
    assert span.attributes == {
        "kvtier.model": "m",
        "kvtier.tier.from": "device",
        "kvtier.tier.to": "host",
        "kvtier.blocks": 3,
        "kvtier.bytes": 0,
        "kvtier.copy_seconds": 0.0,
        "kvtier.dropped": 3,
        "kvtier.dropped.quota": 3,
    }


def test_a_request_has_the_blocks_that_it_comes_to_have_also_once_it_has_ended(receiver: OtlpReceiver) -> None:
    record = RequestRecord("r", None, None, 0.0, TokenBalance(), total_s=1.0)
    prompt, answer = ([BlockName(bytes([first + i]) * 32) for i in range(3)] for first in (0, 100))
    own, request = list(prompt), object()
    traces = RequestTraces(Tracer(SpanSender(receiver.url, "test"), 1.0))
    with closing(traces):
        traces.begin(request, Caller("r"), own)
        before = traces.find([*prompt, *answer])
        own += answer
        while_it_runs = traces.find([*prompt, *answer])
        own.append(BlockName(bytes([200]) * 32))
        traces.end(request, record)
        after = traces.find(own[-1:])

    (span,) = after
    assert before == {span: [0, 1, 2]}
    assert while_it_runs == {span: [0, 1, 2, 3, 4, 5]}
    assert after == {span: [0]}
    assert [(each.trace_id, each.span_id) for each in receiver.spans] == [(span.trace_id, span.span_id)]
