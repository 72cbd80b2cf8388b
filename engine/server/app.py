"""The routes, and how their errors look."""

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtier.engine.server.access import Access, KeyCheck
from kvtier.engine.server.api_error import ApiError, json_response
from kvtier.engine.server.facts import facts_of
from kvtier.engine.server.service import Service


def build_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    routes = [
        Route("/v1/completions", _complete, methods=["POST"]),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
        Route("/v1/documents", _documents),
        Route("/v1/documents/{id}", _documents, methods=["GET", "PUT", "DELETE"]),
        Route("/v1/documents/{id}/{action}", _documents, methods=["POST", "DELETE"]),
        Route("/v1/models", _models),
        Route("/v1/models/{model:path}", _model),
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/metrics", _metrics),
        Route("/version", _version),
    ]
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
        Exception: _unexpected,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # each takes its own kind
    app.state.service = service
    return Access(KeyCheck(app, service), service, frozenset(route.path for route in routes))


async def _complete(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.llm()  # without an engine there is no torch yet, which generation imports
    from kvtier.engine.server.generation import complete

    return await complete(request)


async def _chat(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.llm()
    from kvtier.engine.server.generation import chat

    return await chat(request)


async def _documents(request: Request) -> Response:
    service: Service = request.app.state.service
    service.llm()
    from kvtier.engine.server.document_routes import answer

    return await answer(request)


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    data = [_model_object(service, name) for name in (service.model_name, *service.config.lora)]
    return json_response({"object": "list", "data": data})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response(_model_object(service, request.path_params["model"]))


def _model_object(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvtier",
        "max_model_len": service.longest_request,  # vLLM's word, and so is the next
        "parent": None if service.lora_of(name) is None else service.model_name,
    }


async def _health(_: Request) -> Response:
    return json_response({"status": "alive"})


async def _ready(request: Request) -> Response:
    service: Service = request.app.state.service
    if service.is_ready:
        return json_response({"status": "ready"})
    if service.is_draining:
        return json_response({"status": "draining"}, 503)
    return json_response({"status": "loading", "stage": service.stage}, 503)


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(generate_latest(service.registry), headers={"content-type": CONTENT_TYPE_LATEST})


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
