"""The JSON object of an error in Anthropic's shape."""

from kvtier.web.api_error import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: ApiError, request_id: str) -> dict[str, object]:
    """What the client is told of *error*, in the answer to the request of that id."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
