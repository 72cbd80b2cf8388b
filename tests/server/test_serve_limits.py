"""The server under more requests than it takes, with clients that leave, and while it ends."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import wraps

import httpx
import pytest
from plain_http import NO_TLS
from serving import DEADLINE_S, MODEL, ServerInThread, chat_tokenizer, come_true, serving, tables
from small_models import build

from kvtier.engine.config import as_config
from kvtier.server.build_server import build_server
from kvtier.server.documents.documents import Documents
from kvtier.server.http_server import HttpServer
from kvtier.server.waiting_room import RoomFull, WaitingRoom
from kvtier.web.api_keys import ApiKeys


@pytest.fixture(scope="module")
def small() -> Iterator[ServerInThread]:
    """A server that runs two completions and lets one wait."""
    config = tables(max_queued=1, max_body=4000, max_prompt_tokens=300)
    config["scheduler"] = {"load": "always", "max_running": 2, "token_budget": 64, "prefill_chunk": 64}
    with serving(build("llama"), config) as address:
        yield address


@pytest.fixture
def small_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.web.connection.SEND_TIMEOUT_S", 0.2)


def test_a_body_that_is_too_large_is_a_413(small: ServerInThread) -> None:
    body = b'{"prompt": "' + b"x" * 5000

    announced = small.post("/v1/completions", content=body)
    in_chunks = small.post("/v1/completions", content=iter([body[:3000], body[3000:]]))

    assert [answer.status_code for answer in (announced, in_chunks)] == [413, 413]
    assert announced.json()["error"]["code"] == "body_too_large"
    assert small.complete("Hello")["choices"]


def test_a_prompt_longer_than_the_server_takes_is_a_400(small: ServerInThread) -> None:
    answer = small.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 301})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert small.complete("x" * 300)["choices"]


def test_more_completions_than_there_can_be_at_once_are_a_400(small: ServerInThread) -> None:
    answer = small.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"], "n": 2})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_completions")


def test_beyond_the_queue_it_is_429_with_the_time_to_try_again(small: ServerInThread) -> None:
    with small.streaming("Hello", max_tokens=3500) as a, small.streaming("Hello", max_tokens=3500) as b:
        next(a), next(b)  # both run
        waiting = threading.Thread(target=small.complete, args=["Hello"])
        waiting.start()
        come_true(lambda: small.service.room.num_inside == 3)

        refused = small.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert small.complete("Hello")["choices"]


@pytest.mark.long
def test_the_openai_client_comes_again_when_it_is_told_to(small: ServerInThread) -> None:
    client = small.openai().with_options(max_retries=10)
    with small.streaming("Hello", n=3, max_tokens=250) as stream:
        next(stream)

        done = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)  # 429 at first

        assert done.usage.completion_tokens == 2
        assert sum(1 for _ in stream)  # and nothing was taken from the others


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_client_that_leaves_a_stream_takes_its_leases_along(small: ServerInThread, num_choices: int) -> None:
    with small.streaming("Hello " * 20, max_tokens=3500, n=num_choices) as stream:
        next(stream)
        assert not small.is_at_rest()

    come_true(small.is_at_rest)
    small.ask(lambda core: core.cache.check())
    come_true(lambda: small.service.llm.statistics().num_running == 0)


def test_a_client_that_does_not_wait_for_its_answer_takes_its_leases_along(small: ServerInThread) -> None:
    body = {"model": MODEL, "prompt": "Hello " * 20, "max_tokens": 3500, "ignore_eos": True}

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{small.url}/v1/completions", json=body, timeout=httpx.Timeout(DEADLINE_S, read=0.3))

    come_true(small.is_at_rest)
    small.ask(lambda core: core.cache.check())


def test_clients_that_come_and_leave_at_any_moment_leave_nothing_behind(small: ServerInThread) -> None:
    async def leave_after(client: httpx.AsyncClient, seconds: float) -> None:
        body = {"model": MODEL, "prompt": "Hello " * 30, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        try:
            async with asyncio.timeout(seconds), client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            pass

    async def all_leave() -> None:
        async with httpx.AsyncClient(base_url=small.url, timeout=DEADLINE_S, verify=NO_TLS) as client:
            await asyncio.gather(*(leave_after(client, 0.004 * i) for i in range(1, 40)))

    asyncio.run(all_leave())

    come_true(small.is_at_rest)
    small.ask(lambda core: core.cache.check())
    assert small.complete("Hello")["choices"]


def test_the_port_answers_while_the_model_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reached, gate = build("llama"), threading.Event(), threading.Event()
    forward = type(model).forward

    @wraps(forward)
    def waiting(*arguments: object, **named: object) -> object:
        reached.set()
        gate.wait(DEADLINE_S)
        return forward(*arguments, **named)

    monkeypatch.setattr(type(model), "forward", waiting)  # loading runs the model
    try:
        with serving(model, tables(20), until="/health") as address:
            assert reached.wait(DEADLINE_S)
            loading = address.get("/ready")
            refused = address.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
            listed = address.get("/v1/models").json()["data"][0]
            metrics = address.get("/metrics")
            gate.set()
            come_true(lambda: address.get("/ready").status_code == 200)
            assert address.complete("Hello")["choices"]

        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        assert "attention" in loading.json()["stage"]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert (listed["id"], listed["max_model_len"]) == (MODEL, None)
        assert metrics.status_code == 200
    finally:
        gate.set()


def test_keys_that_were_replaced_while_the_model_was_loading_are_those_that_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_documents, keys = Documents.open, {"sk-ann-1111": "ann"}
    more = ApiKeys({**keys, "sk-bob-2222": "bob"})

    async def opened(*arguments: object) -> Documents:
        documents = await open_documents(*arguments)
        servers[0].replace_keys(more)  # as SIGHUP does it; nothing serves yet
        return documents

    servers: list[HttpServer] = []
    monkeypatch.setattr(Documents, "open", opened)
    with serving(build("llama"), tables(40), keys, started=servers.append) as address:
        assert address.service.room.share.num_tenants == 2
        pinned = [address.complete([n] * 49, "sk-ann-1111", max_tokens=1, kvtier={"pin": True}) for n in range(1, 5)]

    assert [answer["kvtier"]["pinned"] for answer in pinned] == [True] * 3 + [False]  # of 10 blocks, 3 at a time


def test_streams_that_do_not_finish_in_time_are_told_so() -> None:
    with (
        serving(build("llama"), tables(300, drain_s=0.2)) as address,
        address.streaming("Hello", max_tokens=4000) as stream,
    ):
        events = [next(stream)]
        address.stop()
        with pytest.raises(AssertionError, match="DONE"):
            events.extend(stream)

    assert events[-1]["error"]["code"] == "shutting_down"


@pytest.mark.long
def test_who_only_waits_when_the_server_ends_is_told_so_at_once_and_who_runs_goes_on() -> None:
    config = tables(300, drain_s=60 * DEADLINE_S)
    config["scheduler"] = {"load": "always", "max_running": 1, "token_budget": 64, "prefill_chunk": 64}
    refused: list[httpx.Response] = []
    with serving(build("llama"), config) as address:
        body = {"model": MODEL, "prompt": "Hello", "stream": True}
        waiting = threading.Thread(target=lambda: refused.append(address.post("/v1/completions", json=body)))
        with address.streaming("Hello", max_tokens=300) as stream:
            next(stream)
            waiting.start()
            come_true(lambda: address.service.room.num_inside == 2)
            address.stop()
            waiting.join(DEADLINE_S)
            still_inside = address.service.room.num_inside
            num_events = sum(1 for _ in stream)  # to its [DONE]

    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in refused] == [(503, "shutting_down")]
    assert still_inside == 1
    assert num_events > 10


def test_a_text_that_is_sure_to_be_too_long_is_refused_before_it_is_tokenized(small: ServerInThread) -> None:
    text = "x" * 3500  # as much as a body may have here
    message = {"model": MODEL, "messages": [{"role": "user", "content": text}]}

    answers = [
        small.post("/v1/completions", json={"model": MODEL, "prompt": text}),
        small.post("/v1/completions", json={"model": MODEL, "prompt": ["a", text]}),
        small.post("/v1/chat/completions", json=message),
    ]

    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "or more" in answer.json()["error"]["message"]


def test_a_prompt_whose_client_leaves_before_its_turn_is_never_tokenized(small: ServerInThread) -> None:
    tokenizers, gate = small.service.llm.tokenizers, threading.Event()
    blocking = [
        asyncio.run_coroutine_threadsafe(tokenizers.run(lambda _: gate.wait(DEADLINE_S)), small.loop) for _ in range(2)
    ]
    try:
        come_true(lambda: tokenizers.num_running == 2)
        with socket.create_connection(("127.0.0.1", small.port), DEADLINE_S) as connection:
            body = json.dumps({"model": MODEL, "prompt": "Hello"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            come_true(lambda: tokenizers.num_waiting == 1)

        come_true(lambda: tokenizers.num_waiting == 0)

        assert small.service.room.num_inside == 0
    finally:
        gate.set()
        for job in blocking:
            job.result(DEADLINE_S)


@pytest.mark.long
def test_a_client_that_does_not_read_is_left(small_timeout: None) -> None:
    config = tables(3000)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 600, "n": 32, "stream": True, "logprobs": 20}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with serving(build("llama"), config) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little is sent before it is full
        client.connect(("127.0.0.1", address.port))
        client.sendall(head + content)
        come_true(lambda: address.service.room.num_inside == 32)

        come_true(address.is_at_rest)

        come_true(lambda: 'route="/v1/completions",status="499"' in address.get("/metrics").text)
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_an_engine_that_fails_ends_the_server_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("the device is broken")

    async def story() -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        server = build_server(model, as_config(tables(20)), bound, MODEL, None, chat_tokenizer())
        running = asyncio.create_task(server.run())
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, verify=NO_TLS) as client:
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(type(model), "forward", fail)
            answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})

        assert answer.status_code == 503
        with pytest.raises(ArithmeticError, match="the device is broken"):
            await running

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    server = build_server("/nowhere/model", as_config(tables(20)), socket.create_server(("127.0.0.1", 0)), MODEL)

    with pytest.raises(ValueError, match="/nowhere/model: cannot be loaded"):
        asyncio.run(asyncio.wait_for(server.run(), DEADLINE_S))


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_as_long_as_it_took_others_to_leave() -> None:
    clock = Clock()
    room = WaitingRoom(2, clock)
    with room.enter(1):
        for _ in range(10):
            with room.enter(1):
                clock.now += 7.0

        with room.enter(1):
            with pytest.raises(RoomFull) as one:
                room.enter(1).__enter__()
            with pytest.raises(RoomFull) as two:
                room.enter(2).__enter__()

    assert (one.value.retry_after_s, two.value.retry_after_s) == (7, 14)


def test_time_in_which_nobody_was_there_is_not_waited_for() -> None:
    clock = Clock()
    room = WaitingRoom(1, clock)
    for _ in range(5):
        with room.enter(1):
            clock.now += 2.0
        clock.now += 500.0

    with room.enter(1), pytest.raises(RoomFull) as full:
        room.enter(1).__enter__()

    assert full.value.retry_after_s == 2


def test_before_anybody_has_left_the_wait_is_what_the_first_took_so_far() -> None:
    clock = Clock()
    room = WaitingRoom(1, clock)
    with room.enter(1):
        clock.now += 30.0
        with pytest.raises(RoomFull) as full:
            room.enter(1).__enter__()

    assert full.value.retry_after_s == 30
    assert room.num_inside == 0


def test_who_is_refused_takes_no_room() -> None:
    room = WaitingRoom(3, time.monotonic)
    with room.enter(2):
        with pytest.raises(RoomFull):
            room.enter(2).__enter__()
        with room.enter(1):
            assert room.num_inside == 3

    assert room.num_inside == 0
