"""LoadingApp: answers requests while the model is being loaded."""

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from kvtier.server.answers import ServerStatus
from kvtier.server.app import shutting_down, starlette_app
from kvtier.server.entrance import Entrance
from kvtier.server.served_models import ServedModels
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.dashboard.assets import page_routes
from kvtier.web.paths import READY

log = logging.getLogger(__name__)

RETRY_S = 5


class LoadingApp:
    """The app while the model is being loaded. Owned by the event loop.

    It reports the progress in /ready, lists the models that will be served, and answers 503 to other requests.
    """

    def __init__(self, entrance: Entrance, models: ServedModels) -> None:
        self._stage = "starting"
        self._is_ending = False
        routes = [Route(READY, self._ready), *models.routes(), *page_routes(), Mount("/", self._not_yet)]
        self._app = starlette_app(routes, entrance.registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def set_stage(self, stage: str) -> None:
        """Set and log the stage of loading, which /ready and the 503 errors report. Safe to call from any thread."""
        self._stage = stage
        log.info("load: %s", stage)

    def share_among(self, num_tenants: int) -> None:
        """Do nothing, because tenants share nothing before the model is loaded."""

    def end(self) -> None:
        """Answer from now on that the server is shutting down."""
        self._is_ending = True

    async def _ready(self, _: Request) -> Response:
        if self._is_ending:
            return json_response(ServerStatus("draining"), 503)
        return json_response(ServerStatus("loading", self._stage), 503)

    async def _not_yet(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_ending:
            raise shutting_down()
        headers = {"Retry-After": str(RETRY_S)}
        raise ApiError(503, f"the model is being loaded: {self._stage}", code="loading", headers=headers)
