"""Spans of kvtier's own engine on a real `kvtier sidecar`, and of that sidecar, as a collector gets them from both."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from foreign.running import free_port
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from serving import BLOCK_SIZE, MODEL, Address, ServerProcess, come_true, serving_process
from small_models import build, byte_tokenizer

from kvtier import LLM, SamplingParams
from kvtier.engine.observability.tracing.trace_context import TraceContext

pytestmark = pytest.mark.long

TOKEN = "op-token-5555"
PROMPT = "The ferry leaves when the tide does, and not a minute before it. " * 8
NUM_FULL = len(PROMPT) // BLOCK_SIZE
STAGES = ("queue", "lookup", "plan", "promote.host", "promote.disk", "prefill", "decode")
CONFIG = """
[device]
capacity = "8MiB"
block_size = 16

[scheduler]
load = "always"
"""


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


def tracing(receiver: OtlpReceiver) -> str:
    return f'[tracing]\nendpoint = "{receiver.url}"\n'


def ask(server: Address, prompt: str, parent: TraceContext) -> dict:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 3}
    answer = server.post("/v1/completions", json=body, headers={"traceparent": parent.header})
    assert answer.status_code == 200, answer.text
    return answer.json()


def operate(server: Address, verb: str, **asked: object) -> None:
    answer = server.post(f"/v1/kvtier/operate/{verb}", json=asked, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200, answer.text


def num_in_host(server: ServerProcess) -> int:
    lines = server.get("/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith('kvtier_resident_blocks{tier="host"}')).split()[1]))


def num_blocks(spans: Sequence[ReceivedSpan]) -> int:
    return sum(int(str(span.attributes["kvtier.blocks"])) for span in spans)


def test_a_request_that_loads_from_the_sidecars_host_memory_and_disk_has_a_span_for_each_stage(
    tmp_path: Path, model_folder: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", TOKEN)
    socket, port = str(tmp_path / "own.sock"), free_port()
    first, untold, second = (TraceContext.root(is_sampled) for is_sampled in (True, False, True))
    config = CONFIG + tracing(receiver)
    with (
        started_sidecar(tmp_path, socket, tracing(receiver), http_port=port),
        serving_process(tmp_path, model_folder, config, "--sidecar", f"unix://{socket}") as server,
    ):
        ask(server, PROMPT, first)
        to_disk = receiver.wait_until("kvtier.spill.disk", lambda spans: num_blocks(spans) == NUM_FULL)
        ask(server, PROMPT[::-1], untold)
        come_true(lambda: num_in_host(server) == 2 * NUM_FULL)
        operate(Address(port), "spill")
        operate(server, "evict", tier="device", bytes="1GiB")
        operate(Address(port), "evict", tier="host", blocks=NUM_FULL // 2)
        come_true(lambda: num_in_host(server) == 2 * NUM_FULL - NUM_FULL // 2)

        tokens = ask(server, PROMPT, second)["kvtier"]["tokens"]
        spans = {span.name: span for span in receiver.wait_for(2 + len(STAGES), second.trace_id)}

    assert tokens["host"]
    assert tokens["disk"]
    assert tokens["host"] + tokens["disk"] == (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    http, request = spans.pop("POST /v1/completions"), spans.pop("kvtier.request")
    assert (http.parent_id, request.parent_id) == (second.span_id, http.span_id)
    assert set(spans) == {f"kvtier.{stage}" for stage in STAGES}
    for span in spans.values():
        assert span.parent_id == request.span_id
        assert request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns
    numbers = {stage: spans[f"kvtier.{stage}"].attributes.get("kvtier.tokens") for stage in STAGES}
    assert numbers == {
        "queue": None,
        "lookup": len(PROMPT),
        "plan": None,
        "promote.host": tokens["host"],
        "promote.disk": tokens["disk"],
        "prefill": tokens["recomputed"],
        "decode": 3,
    }
    for tier in ("host", "disk"):
        assert request.attributes[f"kvtier.tokens.{tier}"] == tokens[tier]
        assert spans["kvtier.plan"].end_ns <= spans[f"kvtier.promote.{tier}"].start_ns
        assert spans[f"kvtier.promote.{tier}"].end_ns <= spans["kvtier.prefill"].start_ns

    (computed,) = [span for span in receiver.spans if (span.name, span.trace_id) == ("kvtier.request", first.trace_id)]
    to_host = [span for span in receiver.spans if span.name == "kvtier.spill.host"]
    assert num_blocks(to_host) == NUM_FULL
    assert {span.service for span in to_host} == {"kvtier"}
    assert {span.service for span in to_disk} == {"kvtier-sidecar"}
    assert {span.links for span in (*to_host, *to_disk)} == {((computed.trace_id, computed.span_id),)}
    assert {span.parent_id for span in (*to_host, *to_disk)} == {""}
    assert untold.trace_id not in {span.trace_id for span in receiver.spans}
    assert num_blocks([span for span in receiver.spans if span.name == "kvtier.spill.disk"]) == NUM_FULL


def test_a_library_on_a_sidecar_traces_too(tmp_path: Path, receiver: OtlpReceiver) -> None:
    socket = str(tmp_path / "own.sock")
    config = {
        "device": {"capacity": "8MiB", "block_size": BLOCK_SIZE},
        "scheduler": {"load": "always"},
        "sidecar": f"unix://{socket}",
        "tracing": {"endpoint": receiver.url, "sample": 1.0},
    }
    with started_sidecar(tmp_path, socket, tracing(receiver)):
        for _ in range(2):
            with LLM(build("llama"), config, byte_tokenizer()) as llm:
                llm.generate([PROMPT], SamplingParams(max_tokens=1))
        to_disk = receiver.wait_until("kvtier.spill.disk", lambda spans: num_blocks(spans) == NUM_FULL)

    cold, warm = [span for span in receiver.spans if span.name == "kvtier.request"]
    (promote,) = [span for span in receiver.spans if span.name == "kvtier.promote.host"]
    assert (cold.parent_id, warm.parent_id, promote.parent_id) == ("", "", warm.span_id)
    assert promote.attributes == {"kvtier.tokens": (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE}
    assert {span.links for span in to_disk} == {((cold.trace_id, cold.span_id),)}
