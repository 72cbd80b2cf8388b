"""The static files of the dashboard and its page of reasons. They contain no data, so they need no API key."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from kvtier.web.dashboard.reasons import reasons_page

ROOT = "/"
PAGE = "/dashboard"
ASSETS = f"{PAGE}/page"
REASONS = f"{PAGE}/reasons"  # explains why tokens are computed, see `reasons_page`

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Forbid content from other origins, inline scripts and styles, and frames that show this page on other pages.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file with its media type and its ETag."""

    content: bytes
    kind: str
    tag: str

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the browser's copy is current."""
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.kind)


def redirect_route(path: str) -> Route:
    """Return a route that redirects `GET /` to *path*. The address is relative, for proxies that add a prefix."""

    async def redirect(_: Request) -> Response:
        return RedirectResponse(path.lstrip("/"))

    return Route(ROOT, redirect)


def page_routes() -> list[BaseRoute]:
    """Return the HTTP routes of the dashboard page, of its scripts, styles and images, and of the redirect to it."""
    assets = _assets()
    index = assets.pop("index.html")

    async def page(request: Request) -> Response:
        return index.response(request)

    async def file(request: Request) -> Response:
        asset = assets.get(request.path_params["file"])
        if asset is None:
            raise HTTPException(404)
        return asset.response(request)

    explanations = _asset(reasons_page(), "text/html")

    async def reasons(request: Request) -> Response:
        return explanations.response(request)

    return [redirect_route(PAGE), Route(PAGE, page), Route(REASONS, reasons), Route(f"{ASSETS}/{{file}}", file)]


def _assets() -> dict[str, Asset]:
    folder = files("kvtier.web.dashboard") / "page"
    found = {}
    for file in folder.iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = _asset(file.read_bytes(), kind)
    return found


def _asset(content: bytes, kind: str) -> Asset:
    return Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
