"""error_response: the HTTP response for an error, in the shape of the API that was asked."""

from starlette.responses import Response
from starlette.types import Scope

from kvtier.web.api_error import ApiError, json_response
from kvtier.web.error_object import error_object
from kvtier.web.facts import facts_of
from kvtier.web.paths import is_anthropics


def error_response(error: ApiError, scope: Scope) -> Response:
    """The response to the request with this *scope*: in Anthropic's shape under its paths, else in OpenAI's."""
    if is_anthropics(scope["path"]):
        return json_response(error_object(error, facts_of(scope).request_id), error.status, error.headers)
    return error.response()
