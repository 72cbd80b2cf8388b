"""The router before real servers of kvtier with a small model: what is cached is found, and no request is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import anthropic_client
import httpx
import pytest
from foreign.running import free_port
from plain_http import NO_TLS
from routed_servers import Router, routing
from served_config import configured
from serving import (
    DEADLINE_S,
    MODEL,
    Address,
    ServerInThread,
    chat_tokenizer,
    come_true,
    serving,
    serving_process,
    tables,
)
from small_models import build

pytestmark = pytest.mark.long

DOCUMENT = "The report says that the {} of the year was dry, and that the harvest was small in all parts of it. " * 8
SEASONS = ("spring", "summer", "autumn", "winter")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[list[ServerInThread], Router]]:
    """Two servers that publish events, and a router before them."""
    with ExitStack() as opened:
        found, replicas = [], []
        for name in ("one", "two"):
            events, replay = (f"tcp://*:{free_port()}" for _ in range(2))
            config = {**tables(), "events": {"endpoint": events, "replay_endpoint": replay}}
            server = opened.enter_context(serving(build("llama"), config))
            found.append(server)
            here = {"events": events.replace("*", "127.0.0.1"), "replay": replay.replace("*", "127.0.0.1")}
            replicas.append({"url": server.url, "name": name, **here})
        yield found, opened.enter_context(routing(replicas))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def num_known(router: Router) -> int:
    return router.server.router.index.num_prefixes


def asked(router: Router, content: str) -> int:
    """Ask a chat; how many tokens came from the cache."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = router.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_question_about_a_document_goes_to_the_server_that_has_it(
    servers: tuple[list[ServerInThread], Router],
) -> None:
    _, router = servers
    for season in SEASONS:
        _ask_until_found(router, DOCUMENT.replace("{}", season))

    assert router.metric("kvtier_route_event_losses_total") == 0
    assert router.metric('kvtier_route_tokenize_total{result="failed"}') == 0


def _ask_until_found(router: Router, text: str) -> None:
    """Ask, and again until the server's events have come: then its tokens are found, and known to be."""
    minimum = len(text) // 16 * 16 - 16
    asked(router, text + "Why?")

    def is_found() -> bool:
        before = router.matched("device")
        return asked(router, text + "When?") >= minimum and router.matched("device") >= before + minimum

    come_true(is_found)


def test_anthropics_messages_go_the_same_way(servers: tuple[list[ServerInThread], Router]) -> None:
    _, router = servers
    text = "An Anthropic client asks. " * 40
    minimum = len(text) // 16 * 16 - 16

    def is_found() -> bool:
        before = router.matched("device")
        message = anthropic_client.ask(router, 2, messages=[{"role": "user", "content": f"{text} When?"}])
        return message.usage.cache_read_input_tokens >= minimum and router.matched("device") >= before + minimum

    come_true(is_found)


def test_openais_client_streams_through_the_router(servers: tuple[list[ServerInThread], Router]) -> None:
    _, router = servers
    with router.streaming("The quick brown fox", max_tokens=20) as stream:
        texts = [event["choices"][0]["text"] for event in stream]
    whole = router.complete("The quick brown fox", max_tokens=20)["choices"][0]["text"]

    assert len(texts) > 1
    assert "".join(texts) == whole


def test_a_server_that_forgets_all_is_not_believed_to_have_anything(
    servers: tuple[list[ServerInThread], Router],
) -> None:
    found, router = servers
    text = DOCUMENT.replace("{}", "monsoon")
    asked(router, text + "Why?")
    come_true(lambda: num_known(router) > 0)
    for server in found:
        come_true(server.is_at_rest)
        server.ask(lambda core: core.cache.reset())
        server.complete("x" * 40, max_tokens=1)  # a step publishes what has happened

    come_true(lambda: num_known(router) < len(text) // 16)


def test_a_killed_server_loses_no_request_that_had_not_begun(
    servers: tuple[list[ServerInThread], Router], tmp_path: Path, model_folder: Path
) -> None:
    """A server's process is killed with requests that wait in it, half of them for streams. What had not begun is
    answered by the other; a stream that had begun ends with an error, and none is begun twice."""
    found, _ = servers
    with serving_process(tmp_path, model_folder, configured(tmp_path)) as victim:
        replicas = [{"url": found[0].url, "name": "stays"}, {"url": victim.url, "name": "victim"}]
        with routing(replicas) as router, ThreadPoolExecutor(24) as asking:
            answers = [asking.submit(_answer, router, number, number % 2 == 0) for number in range(24)]
            come_true(lambda: router.metric('kvtier_route_replica_requests{replica="victim"}') > 4)
            victim.signal(signal.SIGKILL)
            texts = [answer.result() for answer in answers]

            num_broken = router.metric('kvtier_route_failures_total{why="broken"}')
            assert router.metric("kvtier_route_failures_total") == num_broken
            assert router.metric("kvtier_route_retries_total") > 0
            assert all(texts)
            assert sum("replica_failed" in text for text in texts) == num_broken


def _answer(router: Router, number: int, is_streamed: bool) -> str:
    """All that came of an answer."""
    prompt = f"{number} is the number of this question, and nobody has asked it before"
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 200}
    if not is_streamed:
        answer = router.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.text
    text = ""
    with (
        suppress(httpx.RemoteProtocolError),
        httpx.Client(timeout=DEADLINE_S, verify=NO_TLS) as client,
        client.stream("POST", f"{router.url}/v1/completions", json={**body, "stream": True}) as answer,
    ):
        for piece in answer.iter_text():
            text += piece
    assert text.endswith("data: [DONE]\n\n") or '"replica_failed"' in text
    return text


def test_the_command_routes_until_it_is_told_to_end(servers: tuple[list[ServerInThread], Router]) -> None:
    found, _ = servers
    command = [sys.executable, "-m", "kvtier.cli.main", "route", *(each.url for each in found)]
    environment = {**os.environ, "KVTIER_OPERATOR_TOKEN": "a-token-of-a-test"}
    with subprocess.Popen(
        [*command, "--port", "0", "--log-format", "json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            port = next(json.loads(line)["port"] for line in process.stderr if '"listening"' in line)
            address = Address(port)
            come_true(lambda: address.get("/ready").json()["num_open"] == 2)
            text = address.complete("Hello", max_tokens=3)["choices"][0]["text"]
            drained = address.post(
                f"/v1/route/drain?replica={found[0].url}", headers={"Authorization": "Bearer a-token-of-a-test"}
            )
            process.send_signal(signal.SIGTERM)

            assert process.wait(DEADLINE_S) == 0
            assert text == found[0].complete("Hello", max_tokens=3)["choices"][0]["text"]
            assert drained.json()["draining"]
            assert '"who": "operator"' in process.stderr.read()
        finally:
            process.kill()
