"""Builds the OpenAPI document of the server's operations.

Its schemas come from the structs that the server itself uses to parse requests and to write answers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from re import findall
from typing import Any

import msgspec

from kvtier.server.openapi.operation import EVENTS, JSON, Body, Operation, Outcome
from kvtier.web.api_error import ErrorAnswer
from kvtier.web.error_response import AnthropicErrorAnswer
from kvtier.web.paths import OPERATE, is_anthropics, is_open

Object = dict[str, Any]

WHY = {
    400: "a parameter is wrong or unknown, or the prompt is too long",
    401: "the key is missing or unknown",
    403: "not allowed for this tenant",
    404: "not found",
    405: "the route does not support the method",
    408: "the body arrived too slowly",
    409: "not possible in the current state",
    413: "the body is too large",
    429: "the queue is full; Retry-After says when to retry",
    503: "the model is loading, or the server is shutting down",
    504: "timeout",
    507: "no room in host memory or on disk",
}
IGNORED = "accepted and ignored"  # descriptions of request fields that kvtier does not use
NEUTRAL = "accepted if it changes nothing, else refused"
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key, as OpenAI's clients send it"},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "an API key, as Anthropic's clients send it",
    },
    "operator": {"type": "http", "scheme": "bearer", "description": "an operator's token"},
}


def openapi_document(operations: Sequence[Operation], needs_key: bool, is_strict: bool) -> Object:
    """Return the OpenAPI document of *operations* as a JSON object.

    With *needs_key*, clients need an API key. With *is_strict*, tenants are isolated from each other, so a route may
    refuse a tenant's key with 403.
    """
    kinds = list(_kinds(operations))
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(id, kinds), found, strict=True))
    for body in (operation.body for operation in operations if operation.body is not None):
        _add_let_pass(body, schemas, components)
    paths: dict[str, Object] = {}
    for operation in operations:
        written = _Writer(schemas, needs_key, is_strict).operation(operation)
        paths.setdefault(operation.path, {})[operation.method.lower()] = written
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvtier", "version": version("kvtier")},
        "paths": paths,
        "components": {
            "schemas": {name: _tidy(schema) for name, schema in components.items()},
            "securitySchemes": _SCHEMES,
        },
    }


class _Writer:
    """A converter of operations to OpenAPI. *schemas* has the schemas of all types, by the `id` of the type."""

    def __init__(self, schemas: Mapping[int, Object], needs_key: bool, is_strict: bool) -> None:
        self._schemas = schemas
        self._needs_key = needs_key
        self._is_strict = is_strict

    def operation(self, operation: Operation) -> Object:
        written: Object = {
            "tags": [operation.tag],
            "operationId": operation.operation_id,
            "summary": " ".join(operation.summary.split()),
            "security": self._security(operation.path),
            "parameters": list(self._parameters(operation)),
            "responses": self._responses(operation),
        }
        if (body := operation.body) is not None:
            schemas = [self._schemas[id(kind)] for kind in body.kinds]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            written["requestBody"] = {"required": body.is_required, "content": {JSON: {"schema": schema}}}
        return written

    def _security(self, path: str) -> list[Object]:
        if path.startswith(f"{OPERATE}/"):
            return [{"operator": []}]
        return [{"bearer": []}, {"x-api-key": []}] if self._needs_key and not is_open(path) else []

    def _parameters(self, operation: Operation) -> Iterator[Object]:
        for name in findall(r"{(\w+)}", operation.path):
            yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name, kind in operation.query.items():
            yield {"name": name, "in": "query", "required": False, "schema": self._schemas[id(kind)]}

    def _responses(self, operation: Operation) -> Object:
        path = operation.path
        refusals = [401, 403] if self._is_strict else [401]
        refused = refusals if self._needs_key and not is_open(path) else []
        error = self._schemas[id(AnthropicErrorAnswer if is_anthropics(path) else ErrorAnswer)]
        responses = {
            str(status): {"description": WHY[status], "content": {JSON: {"schema": error}}}
            for status in (*refused, *operation.errors)
        }
        responses |= {str(status): self._outcome(outcome) for status, outcome in operation.outcomes.items()}
        return dict(sorted(responses.items()))

    def _outcome(self, outcome: Outcome) -> Object:
        content = {kind: self._media_type(kind, told) for kind, told in outcome.content.items()}
        return {"description": outcome.what, "content": content}

    def _media_type(self, name: str, kind: object) -> Object:
        if name == EVENTS:  # OpenAPI 3.1 cannot describe the schema of an event
            return {}
        return {"schema": {"type": "string"} if kind is None else self._schemas[id(kind)]}


def _kinds(operations: Iterable[Operation]) -> Iterator[Any]:
    """Yield the types of the requests and answers of *operations*. A type may be yielded several times."""
    yield ErrorAnswer
    yield AnthropicErrorAnswer
    for operation in operations:
        yield from operation.query.values()
        if operation.body is not None:
            yield from operation.body.kinds
        for outcome in operation.outcomes.values():
            yield from (kind for kind in outcome.content.values() if kind is not None)


def _add_let_pass(body: Body, schemas: Mapping[int, Object], components: Mapping[str, Object]) -> None:
    """Add the fields in `body.ignored` and `body.neutral` to the schemas of the body's structs.

    The structs do not have these fields, but the server accepts them in requests.
    """
    for kind in body.kinds:
        name = schemas[id(kind)]["$ref"].rpartition("/")[2]
        properties = components[name].setdefault("properties", {})
        for field in sorted(body.ignored):
            properties.setdefault(field, {"description": IGNORED})
        for field, values in sorted(body.neutral.items()):
            allowed = {"enum": [*values, None], "description": NEUTRAL}
            properties.setdefault(field, allowed)


def _tidy(schema: Object) -> Object:
    """Return *schema* with its description, the docstring of a struct, joined to one line."""
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    return schema
