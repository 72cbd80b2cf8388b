"""ApiError: an error that a client is told, as a JSON object of OpenAI's shape."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with *status*. Programs read *code*; *param* is the field of the request that is wrong."""

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

    def content(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that the client gets."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response that the client gets."""
        return json_response(self.content(), self.status, self.headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An HTTP response with *content* as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
