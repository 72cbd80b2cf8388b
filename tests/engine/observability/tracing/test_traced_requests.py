"""Spans of requests, as a collector gets them from a server."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from serving import ServerInThread, come_true, serving, tables
from small_models import build, byte_tokenizer
from waiting import wait_for

from kvtier import LLM, SamplingParams
from kvtier.engine.observability.tracing import span_sender
from kvtier.engine.observability.tracing.span_sender import SpanSender
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating

TOKEN = "op-token-3333"
PROMPT = "Where were you last night? " * 12
OTHER = "I was where I am every night. " * 12
SERVER = 2  # the kind of a span


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture
def own_receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInThread]:
    disk = {"path": str(tmp_path_factory.mktemp("disk") / "store"), "capacity": "64MiB"}
    config = {**tables(), "disk": disk, "tracing": {"endpoint": receiver.url}}
    operating = Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog())
    with closing(operating), serving(build("llama"), config, operating=operating) as address:
        yield address


def traced(server: ServerInThread, parent: TraceContext | None, prompt: str = PROMPT, max_tokens: int = 3) -> dict:
    headers = {} if parent is None else {"traceparent": parent.header}
    body = {"model": "small", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    answer = server.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def operate(server: ServerInThread, verb: str, **asked: object) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = server.post(f"/v1/kvtier/operate/{verb}", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text


def by_name(spans: Sequence[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_a_request_is_a_child_of_its_callers_span_and_its_stages_lie_in_it(
    server: ServerInThread, receiver: OtlpReceiver
) -> None:
    parent = TraceContext.root(is_sampled=True)

    answer = traced(server, parent, OTHER)

    spans = by_name(receiver.wait_for(7, parent.trace_id))
    http, request = spans.pop("POST /v1/completions"), spans.pop("kvtier.request")
    assert (http.parent_id, http.kind, http.attributes["http.response.status_code"]) == (parent.span_id, SERVER, 200)
    assert request.parent_id == http.span_id
    assert set(spans) == {f"kvtier.{name}" for name in ("queue", "lookup", "plan", "prefill", "decode")}
    for span in spans.values():
        assert span.parent_id == request.span_id
        assert request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns
    slack_ns = 2_000_000  # the clocks of a request and of HTTP are two
    assert http.start_ns - slack_ns <= request.start_ns <= request.end_ns <= http.end_ns + slack_ns
    assert request.attributes["kvtier.tokens.prompt"] == answer["usage"]["prompt_tokens"]
    assert request.attributes["kvtier.tokens.recomputed"] == len(OTHER)
    assert request.attributes["kvtier.tokens.generated"] == 3
    assert spans["kvtier.prefill"].attributes == {"kvtier.tokens": len(OTHER)}
    assert request.service == "kvtier"


def test_blocks_that_come_up_have_a_span_for_each_tier_that_they_come_from(
    server: ServerInThread, receiver: OtlpReceiver
) -> None:
    first, then = TraceContext.root(is_sampled=True), TraceContext.root(is_sampled=True)
    traced(server, None)
    operate(server, "spill")
    operate(server, "evict", tier="device", bytes="1GiB")

    traced(server, first)
    from_host = by_name(receiver.wait_for(8, first.trace_id))
    operate(server, "evict", tier="device", bytes="1GiB")
    operate(server, "evict", tier="host", bytes="1GiB")
    traced(server, then)
    from_disk = by_name(receiver.wait_for(8, then.trace_id))

    for spans, name in ((from_host, "kvtier.promote.host"), (from_disk, "kvtier.promote.disk")):
        promote, request = spans[name], spans["kvtier.request"]
        assert promote.attributes["kvtier.tokens"] == (len(PROMPT) - 1) // 16 * 16
        assert request.start_ns <= spans["kvtier.plan"].end_ns <= promote.start_ns < promote.end_ns <= request.end_ns
    assert "kvtier.promote.disk" not in from_host
    assert "kvtier.promote.host" not in from_disk


def test_attributes_are_names_and_numbers_and_have_no_text_of_the_prompt(
    server: ServerInThread, receiver: OtlpReceiver
) -> None:
    parent = TraceContext.root(is_sampled=True)

    text = traced(server, parent)["choices"][0]["text"]

    for span in receiver.wait_for(7, parent.trace_id):
        for name, value in span.attributes.items():
            assert name.startswith(("kvtier.", "http."))
            assert isinstance(value, int | float | str)
            assert "Where were" not in str(value)
            assert text not in str(value)


def test_the_sampled_flag_is_obeyed_and_its_trace_is_in_the_log(
    server: ServerInThread, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    not_sampled, sampled = TraceContext.root(is_sampled=False), TraceContext.root(is_sampled=True)
    before = {span.trace_id for span in receiver.spans}

    with caplog.at_level(logging.INFO, "kvtier"):
        traced(server, not_sampled)
        traced(server, None)
        traced(server, sampled)
        wait_for(lambda: len(logged_traces(caplog)) == 3)  # a line is written after the answer has been

    receiver.wait_for(7, sampled.trace_id)
    assert {span.trace_id for span in receiver.spans} - before == {sampled.trace_id}
    (new,) = set(logged_traces(caplog)) - {not_sampled.trace_id, sampled.trace_id}
    assert len(new) == 32


def logged_traces(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The traces of the completions that the log has a line of."""
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]
    return [line["trace_id"] for line in lines if line["path"] == "/v1/completions"]


def test_each_choice_of_a_request_has_a_span(server: ServerInThread, receiver: OtlpReceiver) -> None:
    parent = TraceContext.root(is_sampled=True)
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 2, "n": 2, "temperature": 1, "ignore_eos": True}

    server.post("/v1/completions", json=body, headers={"traceparent": parent.header})

    spans = receiver.wait_for(1 + 2 * 6, parent.trace_id)
    (http,) = [span for span in spans if span.kind == SERVER]
    requests = [span for span in spans if span.name == "kvtier.request"]
    assert {span.parent_id for span in requests} == {http.span_id}
    assert len({span.attributes["kvtier.request_id"] for span in requests}) == 2


def test_a_request_that_fails_has_a_failed_span_only_if_the_server_did(
    server: ServerInThread, receiver: OtlpReceiver
) -> None:
    parent = TraceContext.root(is_sampled=True)

    server.post("/v1/completions", json={"model": "none"}, headers={"traceparent": parent.header})

    (http,) = receiver.wait_for(1, parent.trace_id)
    assert (http.attributes["http.response.status_code"], http.is_failed) == (400, False)


def test_of_requests_without_a_trace_the_configured_part_is_traced(own_receiver: OtlpReceiver) -> None:
    tracing = {"endpoint": f"{own_receiver.url}/v1/traces", "sample": 1.0}
    config = {**tables(), "host": {"capacity": 0}, "tracing": tracing}  # nothing is copied down
    with serving(build("llama"), config) as address:
        traced(address, None)
        address.get("/v1/models")
        spans = own_receiver.wait_for(8)

    roots = [span for span in spans if not span.parent_id]
    assert {span.name for span in roots} == {"POST /v1/completions", "GET /v1/models"}
    assert len({span.trace_id for span in spans}) == 2


def test_a_library_traces_too(own_receiver: OtlpReceiver) -> None:
    tracing = {"endpoint": own_receiver.url, "sample": 1.0}
    config = {**tables(), "host": {"capacity": 0}, "tracing": tracing}

    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2))

    spans = by_name(own_receiver.spans)
    assert not spans["kvtier.request"].parent_id
    assert spans["kvtier.prefill"].parent_id == spans["kvtier.request"].span_id


def test_a_collector_that_is_not_there_delays_nobody_and_is_told_of_once(
    own_receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_sender, "MAX_AT_ONCE", 1)
    own_receiver.status = 400
    sender = SpanSender(own_receiver.url, "test")
    with closing(sender), caplog.at_level(logging.WARNING):
        for _ in range(3):
            sender.send(lambda: [])
        come_true(lambda: own_receiver.num_messages == 3)
        own_receiver.status = 200
        sender.send(lambda: [])
        come_true(lambda: own_receiver.num_messages == 4)

    told = [record.getMessage() for record in caplog.records if "tracing" in record.getMessage()]
    assert ["does not accept spans" in line for line in told] == [True, False]


def test_without_the_packages_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)

    with pytest.raises(ImportError, match=r"pip install 'kvtier\[otel\]'"):
        SpanSender("http://127.0.0.1:4318", "test")


def test_tiers_have_a_stage_each() -> None:
    from kvtier.engine.scheduling.loading import PROMOTE

    assert set(PROMOTE) == set(Tier) - {Tier.DEVICE}
