"""`/openapi.json` and `/docs`: every route is there, and the schemas are those of the structs."""

from collections.abc import Iterator
from html.parser import HTMLParser

import msgspec
import pytest
from serving import MODEL, ServerInThread, serving, tables
from small_models import build
from starlette.routing import BaseRoute, Match, Route

from kvtier.server.chat_request import ChatRequest, Message
from kvtier.server.completion_request import CompletionRequest
from kvtier.server.generation_request import IGNORED
from kvtier.server.openapi.document import openapi_document
from kvtier.server.openapi.operation import Operation
from kvtier.server.openapi.page import docs_page
from kvtier.server.responses.responses_request import ResponsesRequest
from kvtier.tiers.naming.tier import Reason
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating

ANN = "sk-ann-1111"
TOKEN = "op-12345678"


@pytest.fixture(scope="module")
def whole() -> Iterator[ServerInThread]:
    """A server with keys and operators, which has every route that there is."""
    operating = Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog())
    with serving(build("llama"), tables(), keys={ANN: "ann"}, operating=operating) as address:
        yield address


@pytest.fixture(scope="module")
def document(whole: ServerInThread) -> dict:
    answer = whole.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def routes_of(server: ServerInThread) -> list[Route]:
    return [route for route in server.server.app.routes if isinstance(route, Route)]


def answers(route: BaseRoute, path: str, method: str) -> bool:
    return route.matches({"type": "http", "path": path, "method": method.upper()})[0] is Match.FULL


def test_every_route_of_the_server_is_in_it_with_each_of_its_methods(whole: ServerInThread, document: dict) -> None:
    told = [(path, method) for path, methods in document["paths"].items() for method in methods]

    for route in routes_of(whole):
        for method in (route.methods or set()) - {"HEAD"}:
            assert any(answers(route, path, method) for path, other in told if other.upper() == method), (
                f"{method} {route.path} is missing in server/openapi/operations.py"
            )
    for path, method in told:
        assert any(answers(route, path, method) for route in routes_of(whole)), f"there is no {method} {path}"


def test_a_server_without_operators_has_none_of_their_verbs(server: ServerInThread) -> None:
    paths = server.get("/openapi.json").json()["paths"]

    assert not [path for path in paths if "operate" in path]
    assert "/v1/completions" in paths


def test_keys_are_needed_where_the_server_asks_for_them(
    whole: ServerInThread, document: dict, server: ServerInThread
) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "get" and "{" not in path and "stream" not in path:
                needs_key = whole.get(path).status_code == 401
                assert bool(operation["security"]) == needs_key, path
                assert ("401" in operation["responses"]) == needs_key, path
    assert document["paths"]["/v1/kvtier/operate/reset"]["post"]["security"] == [{"operator": []}]
    of_open = server.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]
    assert of_open["security"] == []
    assert "401" not in of_open["responses"]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, Message, ResponsesRequest])
def test_a_body_has_every_field_of_its_struct(document: dict, kind: type[msgspec.Struct]) -> None:
    schema = document["components"]["schemas"][kind.__name__]

    assert set(kind.__struct_encode_fields__) <= set(schema["properties"])
    required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    assert set(schema.get("required", ())) == required


def test_a_body_has_the_fields_that_are_let_pass(document: dict) -> None:
    of_chat = document["components"]["schemas"]["ChatRequest"]["properties"]

    assert set(of_chat) >= IGNORED
    assert of_chat["echo"]["enum"] == [False, None]


def test_answers_have_their_statuses_and_media_types(document: dict) -> None:
    completions = document["paths"]["/v1/completions"]["post"]["responses"]

    assert set(completions["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "413", "429", "503"} <= set(completions)
    error = completions["400"]["content"]["application/json"]["schema"]["$ref"]
    of_anthropic = document["paths"]["/v1/messages"]["post"]["responses"]["400"]
    assert error.endswith("/ErrorAnswer")
    assert of_anthropic["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicErrorAnswer")
    assert document["components"]["schemas"]["Reason"]["enum"] == sorted(Reason)


def test_an_answer_has_the_fields_of_its_schema(whole: ServerInThread, document: dict) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 2}
    answer = whole.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {ANN}"}).json()

    parts = {
        "ChatAnswer": answer,
        "ChatMessage": answer["choices"][0]["message"],
        "UsageObject": answer["usage"],
        "KvtierObject": answer["kvtier"],
        "TokenSources": answer["kvtier"]["tokens"],
    }
    for name, part in parts.items():
        schema = document["components"]["schemas"][name]
        assert set(schema["required"]) <= set(part) <= set(schema["properties"]), name


def test_every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own(document: dict) -> None:
    found: list[str] = []

    def look(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found.append(value["$ref"])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(document)

    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in found} <= set(schemas)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


class _Page(HTMLParser):
    """The ids and links of a page, and the elements that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_every_operation_and_fetches_nothing_from_elsewhere(
    whole: ServerInThread, document: dict
) -> None:
    answer = whole.get("/docs")
    page = _Page()
    page.feed(answer.text)

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script" not in page.tags
    assert all(link == "/openapi.json" or link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    for path, methods in document["paths"].items():
        assert path in page.text
        assert all(operation["summary"] in page.text for operation in methods.values())
    assert "prompt_logprobs" in page.text


def test_an_unknown_route_names_them(server: ServerInThread) -> None:
    message = server.get("/openapi").json()["error"]["message"]

    assert "did you mean /openapi.json?" in message
    assert "/docs" in message


def test_what_is_written_in_a_name_is_no_markup() -> None:
    operation = Operation("<tag>", "GET", "/<path>", "<b>summary</b>", {})

    page = docs_page(openapi_document([operation], needs_key=False, is_strict=False), "/openapi.json")

    assert "<tag>" not in page
    assert "/<path>" not in page
    assert "<b>summary" not in page
