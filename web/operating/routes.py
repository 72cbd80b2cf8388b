"""The route `POST /v1/kvtier/operate/{verb}` (`paths.OPERATE`), for clients with an operator's token."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvtier.engine.config import ServerConfig, parse_bytes
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.operating.audit_log import LOGGER, AuditLog
from kvtier.web.operating.operators import Operators, RefusedTokens
from kvtier.web.operating.verbs import KINDS, Answer, LogLevel, Operated
from kvtier.web.request_body import parse, read_body

BODY = ServerConfig(max_body=parse_bytes("16MiB"), body_timeout_s=20.0)  # a million token ids


class Operating:
    """The handler of operators' requests to a server. It logs them in the audit log. Owned by the event loop."""

    def __init__(self, operators: Operators, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._operators = operators
        self._audit = audit
        self._refused = RefusedTokens(audit, clock)

    async def answer(self, request: Request, operated: Operated) -> Response:
        """Run the command in the request's path on the server *operated*. Raise `ApiError` if that fails."""
        verb = request.path_params["verb"]
        who = self._operators.name_of(request.headers.get("authorization", ""))
        if who is None:
            self._refused.note()
            message = "the operator's token is missing or wrong; send it as 'Authorization: Bearer TOKEN'"
            raise ApiError(401, message, code="invalid_token", headers={"WWW-Authenticate": "Bearer"})
        if verb not in KINDS:
            raise ApiError(404, f"unknown verb; use one of {', '.join(sorted(KINDS))}", code="no_verb")
        kind, carry_out = KINDS[verb], _deeds(operated)[verb]
        arguments: Mapping[str, object] = {}
        try:
            asked = parse(await read_body(request, BODY) or b"{}", kind, (), {})
            arguments = asked.told()
            found = await carry_out(asked)
        except ApiError as error:
            self._audit.write(who, verb, arguments, {"status": error.status, "why": str(error)})
            raise
        except BaseException as error:
            self._audit.write(who, verb, arguments, {"status": 500, "why": type(error).__name__})
            raise
        self._audit.write(who, verb, arguments, {"status": 200, **found})
        return json_response({"verb": verb, **found})

    def close(self) -> None:
        """Close the audit log."""
        self._audit.close()


def _deeds(operated: Operated) -> Mapping[str, Callable[[Any], Awaitable[Answer]]]:
    return {
        "reset": operated.reset,
        "evict": operated.evict,
        "spill": operated.spill,
        "pin": operated.pin,
        "unpin": operated.unpin,
        "check": operated.check,
        "log-level": _set_level,
    }


async def _set_level(asked: LogLevel) -> Answer:
    """Set a logger's level. A restart of the server restores the old level."""
    if asked.logger == LOGGER or asked.logger.startswith(f"{LOGGER}."):
        raise ApiError(
            400, "the audit log has a fixed level; give another logger", code="invalid_value", param="logger"
        )
    logger = logging.getLogger(asked.logger)
    before = logging.getLevelName(logger.getEffectiveLevel()).lower()
    logger.setLevel(asked.level.upper())
    return {"logger": asked.logger, "level": asked.level, "before": before}
