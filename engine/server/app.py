"""What the loading and the serving app share: a few answers, how errors look, and how one follows the other."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvtier.engine.server.api_error import ApiError, json_response
from kvtier.engine.server.facts import facts_of
from kvtier.engine.server.paths import HEALTH, METRICS, VERSION


class App(Protocol):
    """Answers requests while the server is as far as it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one, as ASGI has it."""

    def share_among(self, num_tenants: int) -> None:
        """So many tenants share the server from now on."""

    def end(self) -> None:
        """Take no more requests: the server is about to end."""


class Switch:
    """The app behind the port: *app* answers every request that comes while it is there. Owned by the event loop."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the app of this moment, to the end."""
        await self.app(scope, receive, send)


def starlette_app(routes: Sequence[BaseRoute], registry: CollectorRegistry) -> Starlette:
    """An app of *routes*, and of those that any server answers at any time."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    always = [Route(HEALTH, _health), Route(VERSION, _version), Route(METRICS, metrics)]
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
        Exception: _unexpected,
    }
    return Starlette(routes=[*always, *routes], exception_handlers=handlers)  # type: ignore[arg-type]  # each takes its own kind


def shutting_down() -> ApiError:
    """What a request is told that comes when the server is about to end."""
    return ApiError(503, "the server is about to end; ask another one", code="shutting_down")


async def _health(_: Request) -> Response:
    return json_response({"status": "alive"})


async def _version(_: Request) -> Response:
    return json_response({"version": version("kvtier")})


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such route, or not with this method."""
    what = "no such route" if error.status_code == 404 else error.detail
    message = f"{what}: {request.method} {request.url.path}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _left(request: Request, _: ClientDisconnect) -> Response:
    facts_of(request.scope).client_left = True
    return ApiError(400, "the body was cut off", code="disconnected").response()


async def _unexpected(request: Request, _: Exception) -> Response:
    return ApiError(500, f"something went wrong; its id is {facts_of(request.scope).request_id}").response()
