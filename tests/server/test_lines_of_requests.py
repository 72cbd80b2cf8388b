"""Lines in the log of one request: by its id and its trace's each of them is found, at a server and at a sidecar."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_sidecar import started_sidecar
from foreign.running import free_port
from serving import Address, ServerInThread, come_true, serving_process
from sidecars import running_sidecar, small_config

from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.server import serving_app
from kvtier.sidecar.http import app as sidecar_app
from kvtier.web.log_lines import JsonLines, PlainLines

TOKEN = "op-token-6666"
CONFIG = '[device]\ncapacity = "8MiB"\nblock_size = 16\n'


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The log as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logging.getLogger().addHandler(handler)
    logging.getLogger("kvtier").setLevel(logging.INFO)  # `log_as_found` takes it back
    yield stream
    logging.getLogger().removeHandler(handler)


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def own(written: io.StringIO, request_id: str) -> list[dict]:
    """The request's lines so far."""
    return [line for line in lines(written.getvalue()) if line.get("request_id") == request_id]


def headers(request_id: str, trace: TraceContext) -> dict[str, str]:
    return {"x-request-id": request_id, "traceparent": trace.header, "Authorization": f"Bearer {TOKEN}"}


def broken(*_: object) -> None:
    raise RuntimeError("this was not foreseen")


def test_what_went_wrong_in_a_server_stands_in_the_log_with_the_id_that_the_client_is_told(
    server: ServerInThread, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceContext.root(is_sampled=False)
    monkeypatch.setattr(serving_app, "stats_view", broken)

    answer = server.get("/v1/kvtier/stats", headers=headers("it-failed", trace))
    come_true(lambda: len(own(written, "it-failed")) == 2)  # they are written after the answer

    request, failure = sorted(own(written, "it-failed"), key=lambda line: "error" in line)
    assert answer.status_code == 500
    assert "it-failed" in answer.text
    assert (request["message"], request["status"]) == ("request", 500)
    assert "this was not foreseen" in failure["error"]
    assert {request["trace_id"], failure["trace_id"]} == {trace.trace_id}


def test_what_went_wrong_in_a_sidecar_stands_in_the_log_with_the_id_that_the_client_is_told(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceContext.root(is_sampled=True)
    monkeypatch.setattr(sidecar_app, "stats_view", broken)
    with running_sidecar(small_config()) as sidecar:
        answer = sidecar.get("/v1/kvtier/stats", headers=headers("it-failed", trace))
        without = sidecar.get("/health")

    told = own(written, "it-failed")
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "it-failed"
    assert without.headers["x-request-id"] not in ("", "it-failed")
    assert any("this was not foreseen" in line["message"] for line in told)
    assert {line["trace_id"] for line in told} == {trace.trace_id}


def test_lines_for_people_have_the_ids_too(server: ServerInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainLines())
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(serving_app, "stats_view", broken)

    server.get("/v1/kvtier/stats", headers={"x-request-id": "for-people"})
    come_true(lambda: "Exception in ASGI" in stream.getvalue())

    logging.getLogger().removeHandler(handler)
    assert "request_id=for-people" in next(line for line in stream.getvalue().splitlines() if "Exception in" in line)


@pytest.mark.parametrize("asked", ["a b", "x" * 129, "", '{"a":1}'])
def test_an_id_that_could_be_mistaken_for_something_else_is_replaced(asked: str) -> None:
    with running_sidecar(small_config()) as sidecar:
        answer = sidecar.get("/health", headers={"x-request-id": asked})

    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.long
def test_what_operators_do_is_found_by_request_and_trace_at_a_server_and_at_a_sidecar(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", TOKEN)
    socket, port = str(tmp_path / "own.sock"), free_port()
    at_server, at_sidecar = (TraceContext.root(is_sampled) for is_sampled in (False, True))
    with (
        started_sidecar(tmp_path, socket, 'log_format = "json"\n', http_port=port) as sidecar,
        serving_process(tmp_path, model_folder, CONFIG, "--sidecar", f"unix://{socket}") as server,
    ):
        asked = {"model": "small", "prompt": "Who was it? " * 20, "max_tokens": 2}
        answered = server.post("/v1/completions", json=asked, headers=headers("asked", at_server))
        reset = {"json": {"all": True}}
        for address, trace in ((server, at_server), (Address(port), at_sidecar)):
            address.post("/v1/kvtier/operate/reset", headers=headers("reset", trace), **reset)
        Address(port).post("/v1/kvtier/clear", headers=headers("clear", at_sidecar))
        sidecar.stop()
        assert sidecar.process.stderr is not None
        of_sidecar = lines("".join(sidecar.said) + sidecar.process.stderr.read())
        of_server = server.lines()

    def found(of: list[dict], request_id: str) -> list[tuple[str, str]]:
        return [(line["message"], line["trace_id"]) for line in of if line.get("request_id") == request_id]

    assert answered.headers["x-request-id"] == "asked"
    assert found(of_server, "asked") == [("request", at_server.trace_id)]
    assert sorted(found(of_server, "reset")) == [("audit", at_server.trace_id), ("request", at_server.trace_id)]
    assert found(of_sidecar, "reset") == [("audit", at_sidecar.trace_id)]
    assert found(of_sidecar, "clear") == [("http: 1 layouts were cleared", at_sidecar.trace_id)]
    others = [line["message"] for line in (*of_server, *of_sidecar) if "request_id" not in line]
    assert any("engines may attach" in message for message in others)
    assert "ready" in others
