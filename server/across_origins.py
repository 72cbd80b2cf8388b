"""Lets pages of other origins ask the server from a browser, if the operator has named them."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvtier.engine.config import ServerConfig


def across_origins(app: ASGIApp, settings: ServerConfig) -> ASGIApp:
    """*app*, which pages of `server.cors_origins` may ask; a browser's question before that needs no key. Keys come in
    headers and never in cookies, so no credentials of the browser's go along."""
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],
    )
