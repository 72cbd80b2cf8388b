"""The HTTP response for an error, in OpenAI's or Anthropic's format."""

from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from kvtier.web.api_error import ApiError, json_response
from kvtier.web.facts import facts_of
from kvtier.web.paths import is_anthropics

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicError(msgspec.Struct, frozen=True):
    """The description of an error in Anthropic's format."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True):
    """The body of an error response in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


def error_object(error: ApiError, request_id: str) -> AnthropicErrorAnswer:
    """Return the body of the response for *error*, in Anthropic's format."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorAnswer("error", AnthropicError(kind, str(error)), request_id)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the error response to the request with this ASGI *scope*.

    The response has Anthropic's format on the paths of Anthropic's API, otherwise OpenAI's format.
    """
    if is_anthropics(scope["path"]):
        return json_response(error_object(error, facts_of(scope).request_id), error.status, error.headers)
    return error.response()
