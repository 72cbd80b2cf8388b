"""The router over HTTP, before servers that do what each test wants: real sockets on both sides."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fake_replica import FakeReplica, Heard, begin_events, end_events, event, whole
from plain_http import NO_TLS

from kvtier.engine.config import EventsConfig
from kvtier.engine.kv_events import ZmqPublisher
from kvtier.routing.config import RouteConfig, route_config
from kvtier.routing.server import RouteServer
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.events import BlockStored
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.operators import Operators

DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
PAUSE_S = 0.005
HEALTH = {"every_s": 3600.0, "timeout_s": DEADLINE_S}  # replicas are looked at once
TOKEN = "operators-token"
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
LONG = "A long text that many questions are asked about. " * 100


class Routed:
    """A router that runs, and a client of it."""

    def __init__(self, server: RouteServer, client: httpx.AsyncClient, running: "asyncio.Task[None]") -> None:
        self.server, self.client, self.running = server, client, running

    async def complete(self, prompt: object = "Hello", **headers: str) -> httpx.Response:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt}, headers=headers)

    async def replica_of(self, prompt: object = "Hello", **headers: str) -> str:
        answer = await self.complete(prompt, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["replica"]

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        return next((float(each.rsplit(" ", 1)[1]) for each in text.splitlines() if each.startswith(line + " ")), 0.0)


@contextlib.asynccontextmanager
async def routing(
    *replicas: FakeReplica,
    operators: Operators | None = None,
    keys: ApiKeys | None = None,
    endpoints: list[dict[str, str]] | None = None,
    audit: str | None = None,
    **tables: object,
) -> AsyncIterator[Routed]:
    """A router before *replicas*, which looks at their health once an hour; *tables* are of its configuration."""
    listed = [
        {"url": each.url, "name": each.name, **(endpoints[i] if endpoints else {})} for i, each in enumerate(replicas)
    ]
    operating = {} if audit is None else {"operators": {"audit": audit}}
    given = {"replicas": listed, "health": HEALTH, "tokens": {"timeout_s": DEADLINE_S}, **operating, **tables}
    config: RouteConfig = route_config(None, given)
    bound = socket.create_server(("127.0.0.1", 0))
    server = RouteServer(config, bound, operators, keys)
    running = asyncio.create_task(server.run())
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, verify=NO_TLS) as client:
        await come_true(lambda: server.router.replicas[replicas[0].name].health != "unknown")
        try:
            yield Routed(server, client, running)
        finally:
            server.stop()
            await running


async def come_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(PAUSE_S)


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(play())


async def dies(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def dies_behind_its_headers(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
    await begin_events(writer)
    writer.transport.abort()


async def dies_inside_its_answer(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"replica"')
    await writer.drain()
    writer.close()


async def refuses(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
    await whole(writer, {"error": "it drains"}, 503)


# Passing on


def test_a_request_comes_as_it_was_sent_and_so_does_its_answer() -> None:
    async def play() -> None:
        async def answers(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            writer.write(
                b"HTTP/1.1 418 Teapot\r\nx-own: yes\r\nconnection: x-hop\r\nx-hop: no\r\ncontent-length: 3\r\n\r\ntea"
            )

        async with FakeReplica("a", answer=answers) as replica, routing(replica) as routed:
            headers = {
                "authorization": "Bearer key",
                "x-request-id": "mine",
                "te": "trailers",
                "connection": "keep-alive, x-mine",
                "x-mine": "for the router",
                "x-forwarded-for": "192.0.2.1",
                "user-agent": "a client",
            }
            answer = await routed.client.post("/v1/any%2Fpath?x=1&y=%20", content=b"\x00raw", headers=headers)

            (heard,) = replica.heard
            assert (heard.method, heard.target, heard.body) == ("POST", "/v1/any%2Fpath?x=1&y=%20", b"\x00raw")
            assert heard.headers["authorization"] == "Bearer key"
            assert heard.headers["x-request-id"] == "mine"
            assert heard.headers["x-forwarded-for"] == "192.0.2.1, 127.0.0.1"
            assert heard.headers["user-agent"] == "a client"
            assert heard.headers["host"] == replica.url.removeprefix("http://")
            assert not {"te", "x-mine"} & set(heard.headers)
            assert (answer.status_code, answer.text, answer.headers["x-own"]) == (418, "tea", "yes")
            assert answer.headers["x-request-id"] == "mine"
            assert "x-hop" not in answer.headers

    run(play)


EVIL = "evil.example"


@pytest.mark.parametrize("headers", [{"host": EVIL}, {"origin": f"http://{EVIL}"}, {"sec-fetch-site": "cross-site"}])
@pytest.mark.parametrize("path", ["/v1/route/replicas", "/metrics", "/v1/kvtier/documents", MESSAGES, "/dashboard"])
def test_a_page_of_another_site_reaches_neither_the_router_nor_a_replica(headers: dict[str, str], path: str) -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            assert (await routed.client.get(path, headers=headers)).status_code == 403
            assert (await routed.client.post(path, headers=headers, content="{}")).status_code == 403
            assert (await routed.client.get("/health", headers=headers)).status_code == 200
            assert not replica.heard

    run(play)


def test_named_hosts_and_origins_are_passed_on_and_a_page_of_the_routers_own_is_no_foreign_one_there() -> None:
    async def play() -> None:
        allowed = {"allowed_hosts": ["kv.example"], "cors_origins": ["https://chat.example"]}
        async with FakeReplica("a") as replica, routing(replica, **allowed) as routed:
            by_proxy = {"host": "kv.example", "origin": "https://kv.example"}
            by_page = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}

            assert (await routed.client.get("/dashboard", headers=by_proxy)).status_code == 200
            assert (await routed.client.get("/v1/models", headers=by_page)).status_code == 200
            assert [each.headers.get("origin") for each in replica.heard] == [None, "https://chat.example"]

    run(play)


def test_a_refused_host_names_the_option_and_with_the_replicas_keys_none_is_refused() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            error = (await routed.client.get("/v1/models", headers={"host": EVIL})).json()["error"]
            assert (error["code"], "--allow-host" in error["message"]) == ("unknown_host", True)
        async with FakeReplica("a") as replica, routing(replica, keys=ApiKeys({"sk-ann-1111": "ann"})) as routed:
            assert (await routed.client.get("/v1/models", headers={"host": EVIL})).status_code == 200

    run(play)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
def test_each_part_of_a_stream_comes_before_the_next_is_sent(path: str) -> None:
    async def play() -> None:
        should_continue = asyncio.Event()

        async def streams(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            await begin_events(writer)
            await event(writer, "one")
            await should_continue.wait()
            await event(writer, "two")
            await end_events(writer)

        async with (
            FakeReplica("a", answer=streams) as replica,
            routing(replica) as routed,
            routed.client.stream("POST", path, json={"model": "m", "stream": True}) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == "data: one"
            should_continue.set()
            assert [line async for line in lines if line] == ["data: two"]
            assert answer.headers["content-type"] == "text/event-stream"

    run(play)


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    async def play() -> None:
        async def streams(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            await begin_events(writer)
            while True:
                await event(writer, "more")
                await asyncio.sleep(PAUSE_S)

        async with FakeReplica("a", answer=streams) as replica, routing(replica) as routed:
            async with routed.client.stream("POST", COMPLETIONS, json={"stream": True}) as answer:
                await anext(answer.aiter_lines())
                assert routed.server.router.replicas["a"].load.num_requests == 1
            await come_true(lambda: replica.num_left == 1)
            await come_true(lambda: routed.server.router.replicas["a"].load.num_requests == 0)

    run(play)


def test_a_body_that_is_too_large_is_refused_in_the_words_of_the_api() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica, max_body="1KiB") as routed:
            openai = await routed.complete("x" * 2000)
            anthropic = await routed.client.post(MESSAGES, content=b"x" * 2000)

            assert (openai.status_code, openai.json()["error"]["code"]) == (413, "body_too_large")
            assert (anthropic.status_code, anthropic.json()["type"]) == (413, "error")
            assert replica.heard == []

    run(play)


def test_a_target_is_neither_parsed_nor_made_another() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            url = routed.client.base_url
            for target in (b"/a/../b/./c", b"//@elsewhere/x", b"/a%2e%2e/b;c?d=/../e"):
                request = httpx.Request("GET", url, extensions={"target": target})
                assert (await routed.client.send(request)).json() == {"replica": "a"}

            assert [heard.target for heard in replica.heard] == [
                "/a/../b/./c",
                "//@elsewhere/x",
                "/a%2e%2e/b;c?d=/../e",
            ]

    run(play)


def test_an_answer_to_head_has_the_length_and_no_body() -> None:
    async def play() -> None:
        async def answers(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")

        async with FakeReplica("a", answer=answers) as replica, routing(replica) as routed:
            answer = await routed.client.head("/v1/models")

            assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "500", b"")

    run(play)


@pytest.mark.parametrize("lines", [b"GET /v1/x HTTP/1.1\r\nx-own: \xff", b"GET /\xc3\xa4 HTTP/1.1"])
def test_what_cannot_be_passed_on_is_refused_and_no_replica_is_believed_to_be_dead(lines: bytes) -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            reader, writer = await asyncio.open_connection("127.0.0.1", routed.client.base_url.port)
            writer.write(lines + b"\r\nhost: localhost\r\n\r\n")
            status = await reader.readline()
            writer.close()

            assert status.startswith(b"HTTP/1.1 400 ")
            assert replica.heard == []
            assert await routed.replica_of() == "a"

    run(play)


def test_what_a_replica_wants_to_have_kept_is_its_clients() -> None:
    async def play() -> None:
        async def gives_a_cookie(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: who=ann\r\ncontent-length: 2\r\n\r\n{}")

        async with FakeReplica("a", answer=gives_a_cookie) as replica, routing(replica) as routed:
            answer = await routed.complete()
            routed.client.cookies.clear()
            await routed.complete()

            assert answer.headers["set-cookie"] == "who=ann"
            assert ["cookie" in heard.headers for heard in replica.heard] == [False, False]

    run(play)


def test_a_replica_with_a_path_has_it_before_every_target() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica:
            replica.url += "/behind/a/proxy"
            replica.ready_paths = ("/behind/a/proxy/ready",)
            async with routing(replica) as routed:
                await routed.complete()

            assert [heard.target for heard in replica.heard] == ["/behind/a/proxy/v1/completions"]

    run(play)


# Replicas that fail


@pytest.mark.parametrize("fails", [dies, dies_behind_its_headers, dies_inside_its_answer, refuses])
def test_a_replica_that_fails_before_its_answer_begins_loses_no_request(fails: object) -> None:
    async def play() -> None:
        async with FakeReplica("a", answer=fails) as bad, FakeReplica("b") as good, routing(bad, good) as routed:
            for number in range(8):
                assert await routed.replica_of(f"question {number}") == "b"

            bodies = [heard.body for heard in bad.heard]
            assert bodies, "none of the prompts was for the one that fails"
            assert len(set(bodies)) == len(bodies), "a prompt was sent there twice"
            assert len(good.heard) == 8

    run(play)


def test_requests_at_a_replica_that_is_killed_are_answered_by_others() -> None:
    async def play() -> None:
        async def waits(_: FakeReplica, __: Heard, ___: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        async with FakeReplica("a", answer=waits) as bad, FakeReplica("b") as good, routing(bad, good) as routed:
            asking = [asyncio.create_task(routed.replica_of(f"question {number}")) for number in range(16)]
            await come_true(lambda: len(bad.heard) + len(good.heard) == 16)
            assert bad.heard
            bad.kill()

            assert [await each for each in asking] == ["b"] * 16
            assert await routed.replica_of("another") == "b"
            assert await routed.metric('kvtier_route_retries_total{why="died"}') == len(bad.heard)

    run(play)


def test_the_root_of_a_router_leads_to_its_replicas() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            root = await routed.client.get("/", follow_redirects=True)

            assert root.url.path == "/v1/route/replicas"
            assert [each["replica"] for each in root.json()["data"]] == ["a"]

    run(play)


def test_a_replica_that_nobody_is_at_is_forgotten_at_once() -> None:
    async def play() -> None:
        async with FakeReplica("a") as gone, FakeReplica("b") as good, routing(gone, good) as routed:
            gone.kill()
            for number in range(8):
                assert await routed.replica_of(f"question {number}") == "b"

            told = (await routed.client.get("/v1/route/replicas")).json()["data"]
            assert [each["health"] for each in told] == ["dead", "ready"]

    run(play)


def test_a_stream_that_breaks_says_so_and_is_not_begun_again() -> None:
    async def play() -> None:
        async def breaks(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            await begin_events(writer)
            await event(writer, "one")
            writer.transport.abort()

        replicas = [FakeReplica(name, answer=breaks) for name in "ab"]
        async with replicas[0], replicas[1], routing(*replicas) as routed:
            lines: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await _read_into(lines, routed)

            assert lines[:2] == ["data: one", "event: error"]
            assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == "replica_failed"
            assert sum(len(each.heard) for each in replicas) == 1

    run(play)


async def _read_into(lines: list[str], routed: Routed) -> None:
    async with routed.client.stream("POST", COMPLETIONS, json={"stream": True}) as answer:
        async for line in answer.aiter_lines():
            lines += [line] if line else []


def test_if_all_refuse_the_last_refusal_is_the_answer() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name, answer=refuses) for name in "ab"]
        async with replicas[0], replicas[1], routing(*replicas) as routed:
            answer = await routed.complete()

            assert (answer.status_code, answer.json()) == (503, {"error": "it drains"})
            assert [len(each.heard) for each in replicas] == [1, 1]

    run(play)


def test_without_a_replica_the_answer_says_so() -> None:
    async def play() -> None:
        async with FakeReplica("a", ready=503) as replica, routing(replica) as routed:
            openai = await routed.complete()
            anthropic = await routed.client.post(MESSAGES, json={"model": "m"})
            ready, health = await routed.client.get("/ready"), await routed.client.get("/health")

            assert (openai.status_code, openai.json()["error"]["code"]) == (503, "no_replica")
            assert openai.headers["retry-after"] == "1"
            assert (anthropic.status_code, anthropic.json()["type"]) == (503, "error")
            assert (ready.status_code, health.status_code) == (503, 200)

    run(play)


def test_what_is_no_question_is_not_sent_again_once_a_replica_may_have_done_it() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name, answer=dies) for name in "ab"]
        async with replicas[0], replicas[1], routing(*replicas) as routed:
            answer = await routed.client.put("/v1/kvtier/documents/a", json={"text": "x"})

            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_failed")
            assert sum(len(each.heard) for each in replicas) == 1

    run(play)


def test_a_replica_that_is_alive_again_is_asked_again() -> None:
    async def play() -> None:
        async with (
            FakeReplica("a", ready=503) as replica,
            routing(replica, health={**HEALTH, "every_s": 0.01}) as routed,
        ):
            assert (await routed.complete()).status_code == 503
            replica.ready = 200
            await come_true(lambda: routed.server.router.replicas["a"].is_open)

            assert await routed.replica_of() == "a"

    run(play)


# Where a request goes


def test_a_conversation_stays_with_its_replica() -> None:
    async def play() -> None:
        async with FakeReplica("a") as one, FakeReplica("b") as other, routing(one, other) as routed:
            first = {await routed.replica_of(f"hello {turn}", x_session_id="mine") for turn in range(8)}
            bodies = [
                {"model": "m", "messages": [{"role": "user", "content": f"{turn}"}], "user": "ann"} for turn in range(8)
            ]
            second = {(await routed.client.post(CHAT, json=body)).json()["replica"] for body in bodies}
            metadata = {"user_id": "bob"}
            bodies = [{"messages": [{"role": "user", "content": f"{turn}"}], "metadata": metadata} for turn in range(8)]
            third = {(await routed.client.post(MESSAGES, json=body)).json()["replica"] for body in bodies}

            assert [len(each) for each in (first, second, third)] == [1, 1, 1]
            assert {heard.target for heard in one.heard + other.heard} == {COMPLETIONS, CHAT, MESSAGES}

    run(play)


def test_prompts_without_a_conversation_are_spread() -> None:
    async def play() -> None:
        async with FakeReplica("a") as one, FakeReplica("b") as other, routing(one, other) as routed:
            assert {await routed.replica_of(f"{number} hello") for number in range(20)} == {"a", "b"}

    run(play)


def test_without_events_a_question_about_a_text_goes_where_the_text_was_sent() -> None:
    async def play() -> None:
        async with FakeReplica("a") as one, FakeReplica("b") as other, routing(one, other) as routed:
            for number in range(6):
                text = f"{number} {LONG}"
                assert len({await routed.replica_of(text + question) for question in ("Why?", "When?", "Who?")}) == 1

            assert await routed.metric('kvtier_route_matched_tokens_total{tier="expected"}') > 6 * 2 * 1000
            assert one.heard
            assert other.heard

    run(play)


@contextlib.contextmanager
def publishing(num: int):
    config = EventsConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    with contextlib.ExitStack() as opened:
        publishers = [opened.enter_context(ZmqPublisher(config, [FullAttention(16)])) for _ in range(num)]
        yield publishers, [{"events": each.endpoint, "replay": each.replay_endpoint} for each in publishers]


def stored(tokens: list[int], salt: str | None = None) -> list[BlockStored]:
    extra = ExtraKeys(cache_salt=salt)
    chain = BlockChain(16, extra)
    chain.extend(tokens)
    return [BlockStored(Tier.DEVICE, 0, chain.names, 16, None, tokens[: 16 * len(chain.names)], 0, extra)]


def tokens_of(prompt: object) -> list[int]:
    """As the fake replica's `/tokenize` has them."""
    return list(json.dumps(prompt).encode())


MESSAGE = [{"role": "user", "content": LONG}]
ASKED = {
    COMPLETIONS: ({"model": "m", "prompt": LONG}, LONG),
    CHAT: ({"model": "m", "messages": MESSAGE}, MESSAGE),
    MESSAGES: ({"model": "m", "messages": [{"role": "user", "content": LONG}]}, MESSAGE),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
def test_a_prompt_goes_to_the_replica_that_has_told_of_it(path: str) -> None:
    async def play() -> None:
        replicas = [FakeReplica(name) for name in "abc"]
        body, prompt = ASKED[path]
        with publishing(3) as (publishers, endpoints):
            publishers[1].publish(stored(tokens_of(prompt)))
            async with replicas[0], replicas[1], replicas[2], routing(*replicas, endpoints=endpoints) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes > 0)

                assert [(await routed.client.post(path, json=body)).json() for _ in range(3)] == [{"replica": "b"}] * 3
                num_blocks = len(tokens_of(prompt)) // 16
                matched = await routed.metric('kvtier_route_matched_tokens_total{tier="device"}')
                assert matched == 3 * 16 * num_blocks

    run(play)


def test_a_replica_that_was_out_of_reach_is_believed_again_when_its_events_come() -> None:
    async def play() -> None:
        replica, tokens = FakeReplica("a"), [*range(200)]
        with publishing(1) as (publishers, endpoints):
            publishers[0].publish(stored(tokens))
            async with replica, routing(replica, endpoints=endpoints, health={**HEALTH, "every_s": 0.01}) as routed:
                router = routed.server.router
                await come_true(lambda: router.index.num_prefixes > 0)
                router.mark_dead("a")
                await come_true(lambda: router.replicas["a"].is_open)
                publishers[0].publish(stored([7] * 16))
                await come_true(lambda: router.index.num_prefixes == 13)

                await routed.complete(tokens)
                assert await routed.metric('kvtier_route_matched_tokens_total{tier="device"}') == 192

    run(play)


def test_token_ids_need_nobody_to_be_asked_and_a_salt_is_looked_at() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name, tokenize_status=lambda _: 404) for name in "ab"]
        tokens = [*range(200)]
        with publishing(2) as (publishers, endpoints):
            publishers[0].publish(stored(tokens))
            publishers[1].publish(stored(tokens, "salt"))
            async with replicas[0], replicas[1], routing(*replicas, endpoints=endpoints) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes == 24)

                assert await routed.replica_of(tokens) == "a"
                answer = await routed.client.post(COMPLETIONS, json={"prompt": [tokens], "cache_salt": "salt"})
                assert answer.json() == {"replica": "b"}

    run(play)


def test_with_the_replicas_keys_a_tenants_blocks_are_known_by_its_key() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name) for name in "ab"]
        tokens = [*range(200)]
        keys = ApiKeys({"anns-api-key": "ann", "bobs-api-key": "bob"})
        with publishing(2) as (publishers, endpoints):
            for publisher, tenant in zip(publishers, ("ann", "bob"), strict=True):
                publisher.publish(stored(tokens, f"{tenant}\0"))
            async with replicas[0], replicas[1], routing(*replicas, endpoints=endpoints, keys=keys) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes == 24)

                assert await routed.replica_of(tokens, authorization="Bearer anns-api-key") == "a"
                assert await routed.replica_of(tokens, authorization="Bearer bobs-api-key") == "b"
                assert await routed.replica_of(tokens, x_api_key="bobs-api-key") == "b"

    run(play)


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 422, 429, 500, 503])
def test_one_refused_question_for_tokens_is_about_that_question_alone(status: int) -> None:
    def refuses(heard: Heard) -> int:
        if "prompt" not in heard.content:
            return 400  # as every server does that has the route
        return status if heard.content.get("model") == "typo" else 200

    async def play() -> None:
        replica = FakeReplica("a", tokenize_status=refuses)
        with publishing(1) as (publishers, endpoints):
            publishers[0].publish(stored([*range(32)]))
            async with replica, routing(replica, endpoints=endpoints) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes > 0)

                await routed.client.post(COMPLETIONS, json={"model": "typo", "prompt": LONG})
                assert replica.num_tokenized == 0
                for number in range(3):
                    await routed.complete(f"{number} {LONG}")
                    await routed.client.post(COMPLETIONS, json={"model": "typo", "prompt": LONG})
                assert replica.num_tokenized == 3

    run(play)


def test_tokens_that_were_asked_for_one_client_are_asked_for_again_for_another_one() -> None:
    async def play() -> None:
        replica = FakeReplica("a")
        with publishing(1) as (publishers, endpoints):
            publishers[0].publish(stored([*range(32)]))
            async with replica, routing(replica, endpoints=endpoints) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes > 0)
                asking = [{"authorization": "Bearer ann"}, {"authorization": "Bearer eve"}, {"x_api_key": "eve"}, {}]

                for num_asked, headers in enumerate(asking, 1):
                    await routed.complete(LONG, **headers)
                    await routed.complete(LONG, **headers)
                    assert replica.num_tokenized == num_asked
                salted = {"model": "m", "prompt": LONG, "cache_salt": "the victim's"}
                await routed.client.post(COMPLETIONS, json=salted)
                assert replica.num_tokenized == len(asking) + 1

    run(play)


def test_a_prompt_that_a_replica_refuses_is_expected_of_nobody() -> None:
    async def refuses_it(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
        await whole(writer, {"error": "the prompt is too long"}, 400)

    async def play() -> None:
        async with FakeReplica("a", answer=refuses_it) as replica, routing(replica) as routed:
            assert (await routed.complete(LONG)).status_code == 400
            assert routed.server.router.index.num_prefixes == 0

    run(play)


def test_a_replica_without_tokenize_is_asked_once_and_texts_are_compared() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name, tokenize_status=lambda _: 404) for name in "ab"]
        with publishing(2) as (publishers, endpoints):
            publishers[0].publish(stored([*range(32)]))
            async with replicas[0], replicas[1], routing(*replicas, endpoints=endpoints) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes > 0)

                assert len({await routed.replica_of(LONG + str(number)) for number in range(5)}) == 1
                assert await routed.metric('kvtier_route_tokenize_total{result="failed"}') == 2

    run(play)


@pytest.mark.parametrize(("max_cached", "num_asked"), [(2 * len(LONG), 1), (len(LONG) // 2, 3)])
def test_answers_of_tokenize_are_kept_as_far_as_there_is_room(max_cached: int, num_asked: int) -> None:
    async def play() -> None:
        replica, tokens = FakeReplica("a"), {"timeout_s": DEADLINE_S, "max_cached": max_cached}
        with publishing(1) as (publishers, endpoints):
            publishers[0].publish(stored([*range(32)]))
            async with replica, routing(replica, endpoints=endpoints, tokens=tokens) as routed:
                await come_true(lambda: routed.server.router.index.num_prefixes > 0)
                for _ in range(3):
                    await routed.complete(LONG)

                assert await routed.metric('kvtier_route_tokenize_total{result="answered"}') == num_asked

    run(play)


def test_documents_and_the_questions_that_name_them_are_at_one_replica() -> None:
    async def play() -> None:
        replicas = [FakeReplica(name) for name in "abc"]
        async with replicas[0], replicas[1], replicas[2], routing(*replicas) as routed:
            for number in range(4):
                await routed.client.put(f"/v1/kvtier/documents/{number}", json={"text": "x"})
                content = [{"type": "document", "document_id": str(number)}]
                await routed.client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})

            assert sorted(len(each.heard) for each in replicas) == [0, 0, 8]

    run(play)


# Operators, and the end


def test_a_replica_that_is_drained_gets_no_new_request_until_it_is_not() -> None:
    async def play() -> None:
        operators = Operators(ApiKeys({TOKEN: "operator"}))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        one, other = FakeReplica("a"), FakeReplica("b")
        async with one, other, routing(one, other, operators=operators) as routed:
            assert (await routed.client.post("/v1/route/drain?replica=a")).status_code == 401
            assert (await routed.client.get("/v1/route/replicas")).status_code == 401
            unknown = await routed.client.post("/v1/route/drain?replica=c", headers=headers)
            drained = await routed.client.post("/v1/route/drain?replica=a", headers=headers)

            assert (unknown.status_code, drained.json()["draining"]) == (404, True)
            assert {await routed.replica_of(f"{number} hello") for number in range(10)} == {"b"}
            assert await routed.metric("kvtier_route_draining_replicas") == 1

            await routed.client.post("/v1/route/undrain?replica=a", headers=headers)
            assert {await routed.replica_of(f"{number} hello") for number in range(20)} == {"a", "b"}

    run(play)


def test_refused_operators_are_counted_and_in_the_audit_log_in_a_line_a_minute(tmp_path: Path) -> None:
    async def play() -> None:
        audit = tmp_path / "audit.log"
        operators = Operators(ApiKeys({TOKEN: "operator"}))
        async with FakeReplica("a") as replica, routing(replica, operators=operators, audit=str(audit)) as routed:
            for path in ("/v1/route/drain?replica=a", "/v1/route/undrain?replica=a"):
                await routed.client.post(path, headers={"Authorization": "Bearer wrong-token"})
            await routed.client.get("/v1/route/replicas")

            assert await routed.metric("kvtier_route_operators_refused_total") == 3
            (line,) = [json.loads(line) for line in audit.read_text().splitlines()]
            assert (line["who"], line["outcome"]) == (None, {"status": 401, "times": 1})

    run(play)


def test_without_operators_nobody_drains() -> None:
    async def play() -> None:
        async with FakeReplica("a") as replica, routing(replica) as routed:
            answer = await routed.client.post("/v1/route/drain?replica=a")

            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_operators")
            assert (await routed.client.get("/v1/route/replicas")).json()["data"][0]["health"] == "ready"

    run(play)


def test_told_to_end_the_router_lets_answers_go_on_and_refuses_new_requests() -> None:
    async def play() -> None:
        should_continue = asyncio.Event()

        async def streams(_: FakeReplica, __: Heard, writer: asyncio.StreamWriter) -> None:
            await begin_events(writer)
            await event(writer, "one")
            await should_continue.wait()
            await event(writer, "two")
            await end_events(writer)

        async with FakeReplica("a", answer=streams) as replica, routing(replica, drain_s=DEADLINE_S) as routed:
            async with routed.client.stream("POST", COMPLETIONS, json={"stream": True}) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                routed.server.stop()
                await come_true(lambda: routed.server.app.is_ending)
                refused = await routed.complete()
                should_continue.set()

                assert [line async for line in lines if line] == ["data: two"]
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            await routed.running

    run(play)
