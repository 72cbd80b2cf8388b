"""The page docs/reference/http-api.md, made from the schema that `kvtier serve` has at `/openapi.json`."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from page_text import bullet, paragraph

from kvtier.server.openapi.document import IGNORED, NEUTRAL, openapi_document
from kvtier.server.openapi.operation import EVENTS, JSON
from kvtier.server.openapi.operations import OPERATIONS
from kvtier.web.paths import is_open

Object = Mapping[str, Any]

INTRODUCTION = """# HTTP API

The routes of `kvtier serve`. A running server has this schema at `/openapi.json`, and a page for people at `/docs`.
[Request parameters](request-parameters.md) says what the parameters of requests do. The routes of a sidecar are on
[a page of their own](sidecar-http.md).

- **API keys.** If the server has API keys, a request needs `Authorization: Bearer KEY` or `x-api-key: KEY`. Without a
  key, the status is 401. With isolated tenants, a route may refuse a tenant's key with status 403. The routes {open}
  need no key.
- **Operators.** The routes below `/v1/kvtier/operate/` need an operator's token. They do not exist on a server without
  operators.

This page is generated from the code by `make reference`.
"""
TITLES = {
    "OpenAI": "OpenAI's API",
    "Anthropic": "Anthropic's API",
    "tokens": "Tokens",
    "documents": "Documents",
    "explain": "Explanations",
    "watching": "Watching",
    "operating": "Operating",
}


def http_page() -> str:
    """Return the page."""
    document = openapi_document(OPERATIONS, needs_key=True, is_strict=True)
    schemas: dict[str, Object] = document["components"]["schemas"]
    operations = [
        (path, method, each) for path, methods in document["paths"].items() for method, each in methods.items()
    ]
    parts = [_introduction(document["paths"]), "\n## Routes\n"]
    tags = list(dict.fromkeys(operation["tags"][0] for _, _, operation in operations))
    for tag in tags:
        parts.append(f"\n**{TITLES[tag]}**\n\n")
        for path, method, operation in operations:
            if operation["tags"][0] == tag:
                parts.append(bullet(_link(method, path), _summary(operation)))
    for tag in tags:
        parts.append(f"\n## {TITLES[tag]}\n")
        for path, method, operation in operations:
            if operation["tags"][0] == tag:
                parts.append(_section(path, method, operation))
    parts.append("\n## Objects\n\n" + paragraph("The JSON objects of requests and answers."))
    parts += [_schema_section(name, schema) for name, schema in sorted(schemas.items())]
    return "".join(parts)


def _introduction(paths: Mapping[str, Object]) -> str:
    """The introduction with the routes that need no key, in lines of their own length."""
    free = [f"`{path}`" for path in paths if is_open(path) and "{" not in path]
    filled = INTRODUCTION.replace("{open}", f"{', '.join(free[:-1])} and {free[-1]}")
    lines = re.sub(r"\n(?=[^\n-])", " ", filled.replace("\n\n", "\0")).replace("\0", "\n\n")
    return "".join(_refilled(line) for line in lines.splitlines())


def _refilled(line: str) -> str:
    if line.startswith("- "):
        name, _, text = line[2:].partition("** ")
        return bullet(f"{name}**", text).replace("**:", "**", 1)
    return paragraph(line) if line else "\n"


def _section(path: str, method: str, operation: Object) -> str:
    parts = [f"\n### `{method.upper()} {path}`\n\n", paragraph(_summary(operation))]
    if operation["parameters"]:
        parts.append("\n")
        for each in operation["parameters"]:
            where = "in the path" if each["in"] == "path" else "in the query"
            parts.append(bullet(f"`{each['name']}`", f"{where}, {_type(each['schema'])}"))
    if "requestBody" in operation:
        body = operation["requestBody"]
        is_optional = "" if body["required"] else ", optional"
        parts.append(f"\nBody{is_optional}: {_type(body['content'][JSON]['schema'])}\n")
    parts.append("\nAnswers:\n\n")
    errors = []
    for status, response in operation["responses"].items():
        if int(status) < 400 or _is_own(response):
            content = f": {_content(response['content'])}" if response["content"] else ""
            parts.append(bullet(f"{status}", f"{response['description']}{content}"))
        else:
            errors.append(f"{status} ({response['description']})")
    if errors:
        kind = next(
            _type(each["content"][JSON]["schema"]) for each in operation["responses"].values() if _is_error(each)
        )
        parts.append(bullet(f"errors, {kind}", ", ".join(errors)))
    return "".join(parts)


def _summary(operation: Object) -> str:
    """Return what an operation does. Operators' commands are described as "An operator's command that …"."""
    text = _marked(operation["summary"]).removeprefix("An operator's command that ")
    return f"{text[:1].upper()}{text[1:]}"


def _is_error(response: Object) -> bool:
    reference = response["content"].get(JSON, {}).get("schema", {}).get("$ref", "")
    return bool(reference.endswith("ErrorAnswer"))


def _is_own(response: Object) -> bool:
    return not _is_error(response)


def _content(content: Object) -> str:
    kinds = []
    for media_type, value in content.items():
        if media_type == JSON and value.get("schema", {}).get("$ref"):
            kinds.append(_type(value["schema"]))
        else:
            kinds.append("a stream of events" if media_type == EVENTS else f"`{media_type}`")
    return " or ".join(kinds)


def _schema_section(name: str, schema: Object) -> str:
    parts = [f"\n### `{name}`\n\n"]
    if "enum" in schema:
        return parts[0] + paragraph(f"One of {_values(schema['enum'])}.")
    if "description" in schema and not _is_signature(schema):
        parts.append(paragraph(_marked(schema["description"].split(" Attributes: ")[0])) + "\n")
    required = set(schema.get("required", ()))
    properties = schema.get("properties", {})
    ignored = [f"`{name}`" for name, each in properties.items() if each.get("description") == IGNORED]
    neutral = [_neutral(name, each) for name, each in properties.items() if each.get("description") == NEUTRAL]
    parts += [
        _field(field, each, field in required)
        for field, each in properties.items()
        if each.get("description") not in (IGNORED, NEUTRAL)
    ]
    if ignored:
        parts.append(bullet("accepted and ignored", ", ".join(ignored)))
    if neutral:
        parts.append(
            bullet(
                "accepted with null or a value in brackets, which change nothing; refused with any other value",
                ", ".join(neutral),
            )
        )
    if not properties:
        parts.append("No fields.\n")
    return "".join(parts)


def _is_signature(schema: Object) -> bool:
    """Whether the description is only the signature that Python gives a class without a docstring."""
    return bool(schema["description"].startswith(f"{schema.get('title', chr(0))}("))


def _field(name: str, schema: Object, is_required: bool) -> str:
    told = [] if not schema.keys() & {"type", "anyOf", "$ref", "enum", "const", "allOf"} else [_type(schema)]
    if is_required:
        told.append("required")
    elif "default" in schema and schema["default"] not in (None, [], {}):
        told.append(f"default `{json.dumps(schema['default'])}`")
    return bullet(f"`{name}` ({'; '.join(told)})" if told else f"`{name}`", schema.get("description", ""))


def _neutral(name: str, schema: Object) -> str:
    """A field that is accepted if it changes nothing, with the values that do not."""
    values = [each for each in schema["enum"] if each is not None]
    return f"`{name}` ({_values(values)})" if values else f"`{name}`"


def _type(schema: Object) -> str:  # noqa: PLR0911  # a table of cases
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        parts = [_type(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return " or ".join(dict.fromkeys(parts)) or "null"
    if "enum" in schema:
        return _values(each for each in schema["enum"] if each is not None)
    if "const" in schema:
        return _values([schema["const"]])
    kind = schema.get("type")
    if kind == "array":
        if schema.get("prefixItems"):
            return "list of " + ", ".join(map(_type, schema["prefixItems"]))
        return f"list of {_type(schema.get('items') or {})}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    names = {"string": "text", "number": "number", "integer": "integer", "boolean": "true or false", "null": "null"}
    return names[kind] + _range(schema) if kind in names else "any"


def _range(schema: Object) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if above is not None:
        return f" above {above:,}" + (f", at most {most:,}" if most is not None else "")
    if least is not None and most is not None and abs(most) < 1 << 31:
        return f" from {least:,} to {most:,}"
    return f", {least:,} or more" if least is not None else f", at most {most:,}" if most is not None else ""


def _values(values: Iterator[object] | list[object]) -> str:
    return " or ".join(f"`{json.dumps(each)}`" for each in values)


def _marked(text: str) -> str:
    return re.sub(r"(?<![\w*`])\*([\w.]+)\*(?![\w*`])", r"`\1`", text)


def _link(method: str, path: str) -> str:
    """A link to the section of a route. GitHub and mkdocs name the anchor of `GET /` differently, so it has none."""
    name = f"`{method.upper()} {path}`"
    return name if path == "/" else f"[{name}](#{_anchor(method, path)})"


def _anchor(method: str, path: str) -> str:
    """The anchor of a heading: lower case, without punctuation, and with a hyphen for each blank."""
    return re.sub(r"[^\w\- ]", "", f"{method} {path}".lower()).replace(" ", "-")
