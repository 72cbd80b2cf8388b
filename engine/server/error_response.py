"""error_response: the HTTP response for an error, in the shape of the API that was asked."""

from starlette.responses import Response
from starlette.types import Scope

from kvtier.engine.server.anthropic.error_object import error_object
from kvtier.engine.server.api_error import ApiError, json_response
from kvtier.engine.server.facts import facts_of
from kvtier.engine.server.paths import is_anthropics


def error_response(error: ApiError, scope: Scope) -> Response:
    """The response to the request with this *scope*: in Anthropic's shape under its paths, else in OpenAI's."""
    if is_anthropics(scope["path"]):
        return json_response(error_object(error, facts_of(scope).request_id), error.status, error.headers)
    return error.response()
