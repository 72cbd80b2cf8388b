"""schemathesis asks a real server what its own schema says may be asked: no server error, and answers as declared."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from plain_http import NO_TLS
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import BLOCK_BYTES, BLOCK_SIZE, DEADLINE_S, MODEL, ServerInThread, serving
from small_models import build

from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating
from kvtier.web.paths import DOCUMENTS, OPERATE, RESPONSES

ANN, TOKEN = "sk-ann-1111", "op-12345678"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = {GenerationMode.POSITIVE: 12, GenerationMode.NEGATIVE: 4}  # of each operation
ENDLESS = "/dashboard/stream"  # a stream that ends when its viewer leaves
SEED = 7
# Of these a body has one: structs check that, and a schema cannot say it.
ONE_OF = [("text", "token_ids"), ("prompt", "messages"), ("prompt", "token_ids"), ("bytes", "blocks")]
ONE_OF += [("tenant", "namespace", "all")]
# Names that there are: of random ones the server says 404, and no more.
KNOWN = {"id": ["a", "b"], "model": [MODEL], "file": ["dashboard.css", "main.js"]}
KNOWN_FIELDS = {
    "prompt": "Who was it?",
    "messages": [{"role": "user", "content": "Who was it?"}],
    "input": [{"type": "message", "role": "user", "content": "Who was it?"}],
}
NEEDED = {"max_tokens", "model", "seconds", "text", "tier", "level", "tokens", "ttl_s", "pin"}
# The name of a pin, a size as a text, one of two with a number: nothing that chance makes up often.
MAY_ALL_BE_REFUSED = {f"POST {OPERATE}/{verb}" for verb in ("unpin", "evict", "pin")}


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[ServerInThread]:
    """A server of few tokens, so that an answer without a limit is short."""
    config = {
        "device": {"capacity": 16 * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": 64 * BLOCK_BYTES},
        "scheduler": {"max_running": 8},
        "server": {"max_queued": 8, "metrics_tenants": ["ann"]},
    }
    operating = Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog())
    with serving(build("llama"), config, keys={ANN: "ann"}, operating=operating) as address:
        yield address


def put_document(server: ServerInThread, document_id: str) -> None:
    url, headers = f"{server.url}{DOCUMENTS}/{document_id}", {"Authorization": f"Bearer {ANN}"}
    answer = httpx.put(url, json={"text": "A document."}, headers=headers, timeout=DEADLINE_S, verify=NO_TLS)
    assert answer.status_code in (200, 201), answer.text


def put_response(server: ServerInThread) -> str:
    """A response that is stored; its id."""
    body, headers = {"model": MODEL, "input": "Who?", "max_output_tokens": 1}, {"Authorization": f"Bearer {ANN}"}
    answer = server.post(RESPONSES, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def sharpened(case: Case, number: int, server: ServerInThread) -> Case:
    """The case made to ask for something that there is, but for every fourth one."""
    if number % 4 == 0:
        return case
    if case.path.startswith(f"{RESPONSES}/"):
        case.path_parameters = {"id": put_response(server)}
        return case
    for name in set(KNOWN) & set(case.path_parameters or {}):
        case.path_parameters[name] = KNOWN[name][number % len(KNOWN[name])]
    if isinstance(case.body, dict):
        case.body = sharpened_body(with_whole_numbers(case.body), number)
    return case


def sharpened_body(body: dict[str, Any], number: int) -> dict[str, Any]:
    """The body without the fields that exclude each other; of every second one only a few fields are made up."""
    if number % 2:
        others = sorted(set(body) - set(KNOWN_FIELDS) - NEEDED)
        made_up = [others[(number + i) % len(others)] for i in range(3)] if others else []
        body = {
            name: value for name, value in body.items() if name in NEEDED or name in made_up or name in KNOWN_FIELDS
        }
        body |= {name: value for name, value in KNOWN_FIELDS.items() if name in body}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for names in ONE_OF:
        there = [name for name in names if body.get(name)]
        kept = there[number // 2 % len(there)] if there else None
        body = {name: value for name, value in body.items() if name not in names or name == kept}
    return body


def with_whole_numbers(value: Any) -> Any:
    """The same with 1 in the place of 1.0, which JSON Schema calls an integer, and the server does not."""
    if isinstance(value, dict):
        return {name: with_whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.long
def test_the_server_answers_as_its_schema_says_and_never_fails(fuzzed: ServerInThread) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    statuses: dict[str, Counter[int]] = {}
    failures: list[str] = []

    def look_at(operation: APIOperation, mode: GenerationMode) -> None:
        key = TOKEN if operation.path.startswith(OPERATE) else ANN
        told, num_cases = statuses.setdefault(operation.label, Counter()), 0

        @seed(SEED)
        @settings(
            max_examples=NUM_EXAMPLES[mode], deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            nonlocal num_cases
            num_cases += 1
            case = sharpened(case, num_cases, fuzzed)
            headers = {"Authorization": f"Bearer {key}", "x-request-id": KNOWN["id"][num_cases % 2]}
            response = case.call(headers=headers, timeout=DEADLINE_S)
            told[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        if operation.path.startswith(f"{DOCUMENTS}/"):
            for document_id in KNOWN["id"]:  # it may have been deleted
                put_document(fuzzed, document_id)
        try:
            ask()
        except Unsatisfiable:  # nothing is asked for that could be wrong
            pass
        except FailureGroup as failure:
            failures.append(f"{operation.label}, {mode}: {failure}: {failure.exceptions}")

    for operation in (found.ok() for found in schema.get_all_operations()):
        if operation.path != ENDLESS and not operation.definition.raw.get("deprecated"):
            for mode in NUM_EXAMPLES:
                look_at(operation, mode)

    assert not failures, "\n\n".join(failures)
    refused = {label for label, told in statuses.items() if not any(200 <= status < 400 for status in told)}
    assert refused <= MAY_ALL_BE_REFUSED, f"of these no example was ever answered: {statuses}"
    assert fuzzed.is_at_rest()
