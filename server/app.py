"""Parts that `LoadingApp` and `ServingApp` share: common routes, error responses, and the `Switch` between the apps."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvtier.server.answers import ServerStatus, Version
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.dashboard.assets import ASSETS
from kvtier.web.error_response import error_response
from kvtier.web.facts import facts_of
from kvtier.web.paths import HEALTH, METRICS, VERSION


class App(Protocol):
    """An app that answers requests while the model is loading (`LoadingApp`), or afterwards (`ServingApp`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI defines it."""

    def share_among(self, num_tenants: int) -> None:
        """Divide shared resources, such as places in the queue, among *num_tenants* tenants from now on."""

    def end(self) -> None:
        """Refuse requests from now on, because the server is shutting down."""


class Switch:
    """An ASGI app that passes each request to *app*: first the `LoadingApp`, and later the `ServingApp`.

    Owned by the event loop.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def starlette_app(routes: Sequence[BaseRoute], registry: CollectorRegistry) -> Starlette:
    """Return a Starlette app with the given *routes*, and with /health, /version and /metrics."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    always = [Route(HEALTH, _health), Route(VERSION, _version), Route(METRICS, metrics)]
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
        Exception: _unexpected,
    }
    return Starlette(routes=[*always, *routes], exception_handlers=handlers)  # type: ignore[arg-type]  # each handler takes its own kind of error


def shutting_down() -> ApiError:
    """Return the error for a request to a server that is shutting down."""
    return ApiError(503, "the server is shutting down; use another one", code="shutting_down")


async def _health(_: Request) -> Response:
    return json_response(ServerStatus("alive"))


async def _version(_: Request) -> Response:
    return json_response(Version(version("kvtier")))


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer a request for which Starlette raised an error: an unknown route, or a method that the route lacks."""
    message = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 404:
        message = f"no such route: {request.method} {request.url.path}; {_known(request)}"
    return error_response(ApiError(error.status_code, message, headers=error.headers), request.scope)


def _known(request: Request) -> str:
    """Return the part of an error message that suggests the closest route and lists all routes."""
    routes = {route.path for route in request.app.routes if isinstance(route, Route)}
    paths = sorted(path for path in routes if not path.startswith(ASSETS))
    near = get_close_matches(request.url.path, paths, 1)
    return (f"did you mean {near[0]}? " if near else "") + f"The routes are {', '.join(paths)}"


async def _left(request: Request, _: ClientDisconnect) -> Response:
    facts_of(request.scope).client_left = True
    return error_response(ApiError(400, "the body was cut off; send it again", code="disconnected"), request.scope)


async def _unexpected(request: Request, _: Exception) -> Response:
    message = f"the server failed; look in the server's log for the request id {facts_of(request.scope).request_id}"
    return error_response(ApiError(500, message), request.scope)
