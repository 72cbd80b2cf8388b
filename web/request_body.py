"""Functions that read request bodies, within limits, and parse them to structs. They raise `ApiError`s."""

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from kvtier.engine.config import ServerConfig
from kvtier.engine.plain_errors import plain_error
from kvtier.web.api_error import ApiError

_HALF_A_PAIR = re.compile(  # a high surrogate without a low one after it, or a low one without a high one before it
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89aAbB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89aAbB][0-9a-fA-F]{2})(?<!\\)(?:\\\\)*(\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
NOTHING: Mapping[str, Collection[object]] = MappingProxyType({})
_T = TypeVar("_T")

MAX_VALUES = 1 << 20  # limit on numbers, strings and objects of a body, counted by the commas between them


def without_nulls(content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return *content* without the null fields that are optional in *kind* or in a struct nested in it.

    Other nulls are kept, for example those within a JSON schema or the variables of a template.
    """
    pruned = _pruned(content, _type_info(kind))
    assert isinstance(pruned, dict), "pruning an object returns an object"
    return pruned


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _pruned(value: object, kind: inspect.Type) -> object:
    match kind:
        case inspect.Metadata():
            return _pruned(value, kind.type)
        case inspect.UnionType():
            return _pruned(value, _member(value, kind.types))
        case inspect.StructType() if isinstance(value, Mapping):
            return _pruned_object(value, kind)
        case inspect.ListType() if isinstance(value, list):
            return [_pruned(each, kind.item_type) for each in value]
    return value


def _pruned_object(value: Mapping[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    fields = {each.encode_name: each for each in kind.fields}
    return {
        name: _pruned(each, fields[name].type) if name in fields else each
        for name, each in value.items()
        if each is not None or name not in fields or fields[name].required
    }


def _member(value: object, types: Sequence[inspect.Type]) -> inspect.Type:
    """Return the type of *value*, a list or struct type among *types*; `AnyType` if none of them matches."""
    if isinstance(value, list):
        return next((each for each in types if isinstance(each, inspect.ListType)), inspect.AnyType())
    structs = [each for each in types if isinstance(each, inspect.StructType)] if isinstance(value, Mapping) else []
    if len(structs) == 1:
        return structs[0]
    return next((each for each in structs if _is_tagged(value, each)), inspect.AnyType())


def _is_tagged(value: object, kind: inspect.StructType) -> bool:
    return isinstance(value, Mapping) and kind.tag_field is not None and value.get(kind.tag_field) == kind.tag


async def read_body(request: Request, settings: ServerConfig) -> bytes:
    """Read the body. Raise ApiError 413 if the body is too large, or 408 if it takes too long to arrive."""
    limit_bytes, timeout_s = settings.max_body, settings.body_timeout_s
    too_large = ApiError(413, f"the body has more than {limit_bytes} bytes; send less", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive in {timeout_s:g} s; send it again"
        raise ApiError(408, message, code="timeout") from None
    return bytes(body)


def parse(
    body: bytes, kind: type[_T], ignored: Collection[str] = (), neutral: Mapping[str, Collection[object]] = NOTHING
) -> _T:
    """Parse *body*, a JSON object, to an instance of *kind*. See `json_object` and `fit` for the details."""
    return fit(json_object(body), kind, ignored, neutral)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse *body*. Raise ApiError 400 if it is not a JSON object, 413 if it has more than `MAX_VALUES` values."""
    if body.count(b",") > MAX_VALUES:  # parsing blocks all clients, for half a second if 16 MiB are token ids
        message = f"the body has more than {MAX_VALUES:,} values (commas in texts count); send fewer prompts at a time"
        raise ApiError(413, message, code="body_too_large")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = _half_a_pair(body) or f"the body is not JSON: {error}"
        raise ApiError(400, what, code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object; send a JSON object", code="invalid_json")
    return content


def _half_a_pair(body: bytes) -> str | None:
    """Return an error message if *body* has half of a surrogate pair, else None.

    The JSON decoder's own message would be misleading: it says that the input was truncated.
    """
    if (half := _HALF_A_PAIR.search(body)) is None:
        return None
    escape = next(each for each in half.groups() if each).decode()
    return f"the body has {escape}, half of a surrogate pair, which is not a character; send both halves, or \\ufffd"


def fit(
    content: Mapping[str, Any],
    kind: type[_T],
    ignored: Collection[str] = (),
    neutral: Mapping[str, Collection[object]] = NOTHING,
) -> _T:
    """Convert a JSON object to an instance of *kind*. Raise ApiError 400, which names the field, if it does not fit.

    A null field counts as absent, also in nested structs. Unknown fields are errors, with two exceptions. Fields
    in *ignored* may have any value. Fields in *neutral* may have the values that *neutral* lists for them.
    """
    known: Collection[str] = getattr(kind, "__struct_fields__", ())
    content = {
        name: value for name, value in content.items() if value is not None and (name in known or name not in ignored)
    }
    for name in neutral.keys() & content.keys() - set(known):
        if content.pop(name) not in neutral[name]:
            raise ApiError(400, f"{name} is not supported; leave it out", code="unsupported_parameter", param=name)
    try:
        return msgspec.convert(without_nulls(content, kind), kind, str_keys=True)  # JSON keys are always strings
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _explain(message: str) -> ApiError:
    """Return the error for a *message* of msgspec, which has the form "what - at `$.path`"."""
    if unknown := re.match(
        r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?", message
    ):
        param = ".".join(filter(None, [unknown["path"], unknown["name"]]))
        return ApiError(400, f"{param}: unknown parameter", code="unknown_parameter", param=param)
    if missing := re.match(r"Object missing required field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", message):
        param = ".".join(filter(None, [missing[2], missing[1]]))
        return ApiError(400, f"{param}: is missing", code="missing_required_parameter", param=param)
    located = re.fullmatch(r"(.*) - at (?:`key` in )?`\$\.?([^`]*)`", message, re.DOTALL)
    if located:
        what, param = located.groups()
        message = f"{param}: {plain_error(what, table='an object')}"
    else:  # raised by one of kvtier's types, whose messages begin with the field's name
        param = next(iter(re.findall(r"^([a-z_]+)(?: is|:)", message)), "")
    return ApiError(400, message.replace("`", ""), code="invalid_value", param=param or None)
