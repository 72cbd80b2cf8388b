"""`/openapi.json` and `/docs`: the documentation of this server's routes, for programs and for people."""

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from kvtier.server.openapi.document import openapi_document
from kvtier.server.openapi.operation import JSON, Operation
from kvtier.server.openapi.operations import OPERATIONS
from kvtier.server.openapi.page import HEADERS, docs_page
from kvtier.web.paths import DOCS, OPENAPI


class OpenApiRoutes:
    """The routes `/openapi.json` and `/docs` of one app. Owned by the event loop.

    Both answers are created at the first request. They contain no tenant's data, so clients need no key to read them.
    """

    def __init__(self, needs_key: bool, is_strict: bool) -> None:
        self._needs_key = needs_key
        self._is_strict = is_strict
        self._written: tuple[bytes, str] | None = None  # the document and the page

    def routes(self) -> list[Route]:
        """Return the routes `/openapi.json` and `/docs`."""
        return [Route(OPENAPI, self._document), Route(DOCS, self._page)]

    async def _document(self, request: Request) -> Response:
        return Response(self._of(request.app)[0], media_type=JSON)

    async def _page(self, request: Request) -> Response:
        return Response(self._of(request.app)[1], headers=HEADERS, media_type="text/html")

    def _of(self, app: Starlette) -> tuple[bytes, str]:
        if self._written is None:
            served = [operation for operation in OPERATIONS if _is_served(app, operation)]
            document = openapi_document(served, self._needs_key, self._is_strict)
            self._written = msgspec.json.encode(document), docs_page(document, OPENAPI)
        return self._written


def _is_served(app: Starlette, operation: Operation) -> bool:
    """Return whether the app has a route for *operation*. Routes for operators are optional."""
    scope = {"type": "http", "path": operation.path, "method": operation.method}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
