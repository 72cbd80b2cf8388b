"""The page at `/docs`: the OpenAPI document as HTML. It has no external files, because a browser may be offline."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .4rem 0; }
details { border-bottom: 1px solid #8886; }
details details { border: 0; }
code, pre { font: .9em ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; background: #8882; }
b { display: inline-block; min-width: 4.5rem; }
td, th { padding: .1rem 1rem .1rem 0; text-align: left; vertical-align: top; }
"""
_DIGEST = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def docs_page(document: Mapping[str, Any], document_path: str) -> str:
    """Return the HTML page that shows the OpenAPI *document*, with a link to its URL path *document_path*."""
    return "".join(_parts(document, document_path))


def _parts(document: Mapping[str, Any], document_path: str) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}: routes</title><style>{_STYLE}</style></head><body><main>"
    yield f'<h1>{escape(title)}</h1><p>For programs: <a href="{escape(document_path)}">{escape(document_path)}</a></p>'
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    for tag, group in groupby(operations, lambda item: item[2]["tags"][0]):
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in group:
            yield from _operation(method, path, operation, schemas)
    yield "<h2>schemas</h2>"
    for name, schema in schemas.items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        yield f"<p>{escape(schema.get('description', ''))}</p>{_fields(schema)}</details>"
    yield "</main></body></html>"


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation["summary"])
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {summary}</summary>"
    names = [name for scheme in operation["security"] for name in scheme]
    yield f"<p>Needs {escape(' or '.join(names))}.</p>" if names else "<p>Needs no key.</p>"
    if operation["parameters"]:
        rows = (
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{each['in']}</td>"
            f"<td>{_type(each['schema'])}</td></tr>"
            for each in operation["parameters"]
        )
        yield f"<table>{''.join(rows)}</table>"
    if "requestBody" in operation:
        yield f"<p>Body: {_content(operation['requestBody'])}</p>"
    rows = (
        f"<tr><td>{status}</td><td>{escape(told['description'])}</td><td>{_content(told)}</td></tr>"
        for status, told in operation["responses"].items()
    )
    yield f"<table>{''.join(rows)}</table></details>"


def _content(told: Mapping[str, Any]) -> str:  # told: a Request Body Object or a Response Object of OpenAPI
    return ", ".join(f"{escape(kind)} {_type(each.get('schema', {}))}" for kind, each in told["content"].items())


def _fields(schema: Mapping[str, Any]) -> str:
    """Return an HTML table of the fields in *schema*."""
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td>"
        f"<td>{'required' if name in required else escape(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of *schema* as a few words of HTML. A reference to a struct becomes a link to its section."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxItems": "up to", "maxLength": "up to"}
    limits = [f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema]
    return escape(" ".join([schema.get("type", "anything"), *limits]))
