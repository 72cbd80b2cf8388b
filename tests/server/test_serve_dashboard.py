"""The page at `/dashboard` of `kvtier serve`, and its data: what is told, and who may see it."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from plain_http import NO_TLS
from prometheus_client.parser import text_string_to_metric_families
from serving import DEADLINE_S, Address, ServerInThread, come_true, serving, tables
from small_models import VOCAB, build
from watching import watching

from kvtier.web.paths import DATA_PATHS, STATS, STREAM

ANN, BOB, OPS = "sk-ann-1111", "sk-bob-3333", "sk-ops-4444"
KEYS = {ANN: "ann", BOB: "bob", OPS: "ops"}


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables(metrics_tenants=["ops", "bob"]), KEYS) as address:
        yield address


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def newest(server: Address, key: str | None = None, until: Any = lambda now: True) -> dict[str, float]:
    """The numbers of the first tick for which *until* holds, by column."""
    with watching(server.url, key) as events:
        columns = next(content for name, content in events if name == "hello")["columns"]
        for name, content in events:
            if name == "tick" and until(now := dict(zip(columns, content["now"], strict=True))):
                return now
    raise AssertionError("the stream ended")


def test_the_root_leads_to_the_page(server: ServerInThread) -> None:
    root = httpx.get(f"{server.url}/", follow_redirects=True, timeout=DEADLINE_S)

    assert root.url.path == "/dashboard"
    assert root.headers["content-type"].startswith("text/html")


def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_else_in(server: ServerInThread) -> None:
    page = server.get("/dashboard")
    names = [line.split('"')[1] for line in page.text.replace("src=", "href=").split("href=")[1:] if '"' in line]

    assert page.headers["content-type"].startswith("text/html")
    files = [part for part in names if part.startswith("dashboard/")]
    assert len(files) >= 5
    for path in ["dashboard", *files]:
        answer = server.get(f"/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.get(f"/{path}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_a_tick_tells_the_numbers_of_stats_and_of_metrics(server: ServerInThread) -> None:
    prompt = prompt_of(1, 200)
    for _ in range(2):
        server.complete(prompt, max_tokens=2)
    come_true(server.is_at_rest)
    server.ask(lambda core: core.idle())

    stats = server.get(STATS).json()
    now = newest(server, until=lambda now: now["tokens.device"] == stats["tokens"]["device"])
    metrics = {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }

    assert stats["tokens"]["device"] >= 199
    for source in ("device", "host", "disk", "recomputed"):
        assert now[f"tokens.{source}"] == stats["tokens"][source]
    for reason, num_tokens in stats["tokens"]["reasons"].items():
        assert now[f"reason.{reason}"] == num_tokens == metrics[f"kvtier_recomputed_tokens_total{reason}"]
    for tier, found in stats["cache"]["tiers"].items():
        assert now[f"tier.{tier}.bytes"] == found["num_bytes"] == metrics[f"kvtier_resident_bytes{tier}"]
        assert now[f"tier.{tier}.capacity"] == found["capacity_bytes"]
        assert now[f"tier.{tier}.evicted"] == sum(found["evicted"].values())
    for route, moved in stats["cache"]["routes"].items():
        assert now[f"lane.{route}.bytes"] == moved["num_bytes"] == metrics[f"kvtier_moved_bytes_total{route}"]
    assert now["requests.running"] == 0


def test_a_tick_tells_output_tokens_latencies_errors_and_memory(server: ServerInThread) -> None:
    server.complete(prompt_of(6, 40), max_tokens=5)
    for _ in range(3):
        assert server.get("/no/such/path").status_code == 404
    come_true(server.is_at_rest)
    server.ask(lambda core: core.idle())

    stats = server.get(STATS).json()
    now = newest(server, until=lambda now: now["tokens.generated"] == stats["requests"]["served"]["num_generated"])
    metrics = {
        sample.name: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }

    assert now["tokens.generated"] == metrics["kvtier_generated_tokens_total"] >= 5
    assert now["http.4xx"] == stats["http"]["num_4xx"] >= 3
    assert (now["http.429"], now["http.5xx"]) == (stats["http"]["num_429"], stats["http"]["num_5xx"])
    assert now["http.requests"] >= stats["http"]["num_requests"]  # the requests of this test are counted, too
    assert now["ttft.p50"] <= now["ttft.p90"] <= now["ttft.p95"] <= now["ttft.p99"]
    assert now["token_gap.p50"] <= now["token_gap.p99"]
    assert now["memory.resident"] == pytest.approx(metrics["kvtier_process_resident_bytes"], rel=0.2)
    assert now["memory.host_tier"] == stats["host_prepared_bytes"] == metrics["kvtier_host_prepared_bytes"]


def test_the_slowest_requests_and_documents_are_shown_with_where_their_tokens_came_from() -> None:
    prompt = prompt_of(2, 150)
    with serving(build("llama"), tables()) as server:  # its own: with others' requests this one is not the slowest
        body = {"model": "small", "prompt": prompt, "max_tokens": 1}
        server.post("/v1/completions", json=body, headers={"X-Request-Id": "the-slow-one"})
        url, document = f"{server.url}/v1/kvtier/documents/report", {"token_ids": prompt[:100]}
        assert httpx.put(url, json=document, timeout=DEADLINE_S, verify=NO_TLS).status_code == 201
        with watching(server.url) as events:
            own = next(content for name, content in events if name == "own" and content["slowest"])

    shown = next(request for request in own["slowest"] if request["id"] == "the-slow-one")
    assert sum(shown["tokens"].values()) == 150
    assert sum(shown["reasons"].values()) == shown["tokens"]["recomputed"]
    assert [document["id"] for document in own["documents"]] == ["report"]


def test_without_a_key_there_is_the_page_and_no_number(strict: ServerInThread) -> None:
    assert strict.get("/dashboard").status_code == 200
    assert strict.get("/dashboard/page/main.js").status_code == 200
    for path in [*DATA_PATHS, STATS]:
        assert strict.get(path).status_code == 401


def test_strictly_kept_apart_only_those_named_see_the_numbers(strict: ServerInThread) -> None:
    for path in [*DATA_PATHS - {STREAM}, STATS]:
        assert [strict.get(path, headers=bearer(key)).status_code for key in (ANN, OPS)] == [403, 200]
    assert strict.get(STREAM, headers=bearer(ANN)).status_code == 403


def test_strictly_kept_apart_each_sees_its_own_requests_only(strict: ServerInThread) -> None:
    strict.complete(prompt_of(3, 50), ANN, max_tokens=1)
    strict.complete(prompt_of(4, 60), BOB, max_tokens=1)

    own = {}
    for key in (BOB, OPS):
        with watching(strict.url, key) as events:
            own[key] = next(content for name, content in events if name == "own")

    assert {record["tenant"] for record in own[BOB]["slowest"]} == {"bob"}
    assert own[OPS]["slowest"] == []


def test_a_history_of_a_range_that_is_none_is_refused(server: ServerInThread) -> None:
    for text in ("0", "-1", "nan", "inf", "x", "9" * 400):
        answer = server.get(f"/dashboard/history?range={text}")

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "range")


def test_the_history_can_be_had_as_a_file(server: ServerInThread) -> None:
    newest(server)  # one sample at least has been taken

    history = server.get("/dashboard/history?range=600").json()
    table = server.get("/dashboard/download.csv?range=600")
    lines = table.text.splitlines()

    assert (history["step_s"], history["rows"]) == (1, 600)
    assert all(len(values) == 600 for values in history["columns"].values())
    assert "attachment" in table.headers["content-disposition"]
    assert lines[0].split(",")[:2] == ["time", "tokens.device"]
    assert len(lines) >= 2
    assert all(line.count(",") == lines[0].count(",") for line in lines)


def test_more_viewers_than_may_are_turned_away() -> None:
    config = {**tables(), "dashboard": {"max_viewers": 1}}
    with serving(build("llama"), config) as address:
        with watching(address.url) as events:
            next(events)
            refused = address.get(STREAM)
        come_true(lambda: _can_watch(address))

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "viewers")
    assert refused.headers["retry-after"]


def _can_watch(address: Address) -> bool:
    with httpx.stream("GET", address.url + STREAM, timeout=DEADLINE_S, verify=NO_TLS) as answer:
        return answer.status_code == 200


def test_viewers_do_not_hold_up_the_end_of_a_server() -> None:
    with serving(build("llama"), tables()) as address, watching(address.url) as events:
        next(events)
        address.stop()
        names = [name for name, _ in events]  # until the server has ended the stream

    assert set(names) <= {"tick", "own"}
