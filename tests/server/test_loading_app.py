"""LoadingApp and Switch: what is answered while the model is loading, and how the next app takes over."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvtier.engine.config import ServerConfig
from kvtier.server.access import Access, KeyCheck
from kvtier.server.app import Switch
from kvtier.server.entrance import Entrance
from kvtier.server.loading_app import RETRY_S, LoadingApp
from kvtier.server.served_models import ServedModels
from kvtier.web.api_keys import ApiKeys

MODELS = ServedModels("small", ("an-adapter",), created=7, longest_request=None)


def loading(keys: ApiKeys | None = None) -> tuple[LoadingApp, Callable[..., httpx.Response]]:
    """A LoadingApp, and requests to it without a socket."""
    entrance = Entrance(ServerConfig(), keys)
    app = LoadingApp(entrance, MODELS)

    def ask(method: str, path: str, **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(Access(KeyCheck(Switch(app), entrance), entrance))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(asked())

    return app, ask


def test_it_is_alive_and_not_ready_and_says_how_far_it_is() -> None:
    app, ask = loading()
    app.set_stage("loading the weights")

    assert ask("GET", "/health").json() == {"status": "alive"}
    ready = ask("GET", "/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "loading", "stage": "loading the weights"})
    assert 'kvtier_http_requests_total{route="/ready",status="503"} 1.0' in ask("GET", "/metrics").text
    models = ask("GET", "/v1/models").json()["data"]
    assert [(model["id"], model["parent"], model["max_model_len"]) for model in models] == [
        ("small", None, None),
        ("an-adapter", "small", None),
    ]


def test_the_root_leads_to_the_dashboard_without_a_key() -> None:
    _, ask = loading(ApiKeys({"a-key-of-a-tenant": "one"}))

    root = ask("GET", "/")

    assert (root.status_code, root.headers["location"]) == (307, "dashboard")
    assert ask("GET", "/dashboard").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/kvtier/documents"),
        ("PUT", "/v1/kvtier/documents/report"),
        ("DELETE", "/v1/kvtier/documents/report/pin"),
        ("GET", "/what/it/does/not/have"),
    ],
)
def test_all_else_is_told_to_come_again_and_when(method: str, path: str) -> None:
    app, ask = loading()
    app.set_stage("loading the weights")

    answer = ask(method, path)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, str(RETRY_S))
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("loading", "the model is being loaded: loading the weights")


def test_who_has_no_key_is_not_told_how_far_it_is() -> None:
    _, ask = loading(ApiKeys({"sk-ann-1111": "ann"}))

    assert ask("POST", "/v1/completions").status_code == 401
    assert ask("POST", "/v1/completions", authorization="Bearer sk-ann-1111").status_code == 503
    assert ask("GET", "/health").status_code == 200


def test_a_server_that_ends_before_its_model_is_loaded_tells_nobody_to_come_again() -> None:
    app, ask = loading()

    app.end()

    assert ask("GET", "/ready").json() == {"status": "draining"}
    answer = ask("POST", "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" not in answer.headers


class NamedApp:
    """An app that answers with its name once the test lets it."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.has_begun = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_begun.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name})

    def share_among(self, num_tenants: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


def test_a_request_is_answered_to_its_end_by_the_app_that_began() -> None:
    async def story() -> list[bytes]:
        first, second = NamedApp(b"first"), NamedApp(b"second")
        switch = Switch(first)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(switch), base_url="http://localhost") as client:
            early = asyncio.create_task(client.get("/"))
            await first.has_begun.wait()
            switch.app = second
            first.may_answer.set()
            second.may_answer.set()
            return [(await early).content, (await client.get("/")).content]

    assert asyncio.run(story()) == [b"first", b"second"]


def test_anthropics_paths_are_answered_in_its_words() -> None:
    _, ask = loading()
    _, ask_with_keys = loading(ApiKeys({"sk-1234-5678": "ann"}))

    busy, keyless = ask("POST", "/v1/messages"), ask_with_keys("POST", "/v1/messages/count_tokens")
    keyed = ask_with_keys("POST", "/v1/messages", **{"x-api-key": "sk-1234-5678"})

    told = [(answer.status_code, answer.json()["error"]["type"]) for answer in (busy, keyless, keyed)]
    assert told == [(503, "overloaded_error"), (401, "authentication_error"), (503, "overloaded_error")]
    assert busy.headers["retry-after"] == str(RETRY_S)
    assert busy.json()["request_id"] == busy.headers["request-id"]
