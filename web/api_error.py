"""An error that is sent to the client as a JSON object in OpenAI's format."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorObject(msgspec.Struct, frozen=True):
    """The description of an error. *code* tells programs what failed. *param* is the request's invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of an error response in OpenAI's format."""

    error: ErrorObject


class ApiError(Exception):
    """An error that ends a request with a response of HTTP status *status*.

    *code* tells programs what failed. *param* is the request's invalid field.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def content(self) -> ErrorAnswer:
        """Return the body of the error response."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorAnswer(ErrorObject(message=str(self), type=kind, param=self.param, code=self.code))

    def response(self) -> Response:
        """Return the HTTP response to send to the client."""
        return json_response(self.content(), self.status, self.headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with *content*, a struct or other JSON value, as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
